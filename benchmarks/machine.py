"""The machine that the figures were measured on."""

from __future__ import annotations

import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("coatcheck", "idemkit", "starlette", "uvicorn", "uvloop", "httptools")


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory beside the code, because /tmp is often in memory and not on a disk."""
    RESULTS.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="work-", dir=RESULTS)


def facts() -> dict[str, Any]:
    """Return what a reader must know to judge the figures."""
    with scratch_directory() as directory:
        fsync_us = _fsync_us(Path(directory))
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
        "file_system": _file_system(RESULTS),
        "fsync_us": round(fsync_us),
        "load_before": round(os.getloadavg()[0], 2),
        "packages": {name: _version(name) for name in PACKAGES},
    }


@contextmanager
def pinned(to: Literal["first", "last"]) -> Iterator[str]:
    """Keep this process on one processor, if the system allows it; yields which one."""
    try:
        before = os.sched_getaffinity(0)
        chosen = min(before) if to == "first" else max(before)
        os.sched_setaffinity(0, {chosen})
    except (AttributeError, OSError):  # not every system has it, nor allows it
        yield "any processor"
        return
    try:
        yield f"processor {chosen} of {len(before)}"
    finally:
        os.sched_setaffinity(0, before)


def processor_s(pid: int) -> float:
    """Return the processor time of process *pid*, all threads; NaN if the system does not tell."""
    try:
        # Linux's clock of another process, as clock_getcpuclockid(3) would name it.
        return time.clock_gettime(~pid << 3 | 2)
    except (AttributeError, OSError):
        return float("nan")


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _file_system(path: Path) -> str:
    """Return the type of the file system of *path*, from the longest mount point above it."""
    best = ("", "unknown")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if path.resolve().is_relative_to(mount):
                best = max(best, (mount, kind))
    return best[1]


def _fsync_us(directory: Path) -> float:
    """Return the median time to write and sync one page."""
    times_us: list[float] = []
    with (directory / "fsync").open("wb", buffering=0) as file:
        for _ in range(50):
            start = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file)
            times_us.append((time.perf_counter() - start) * 1e6)
    return median(times_us)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from this folder"
