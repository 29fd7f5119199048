"""Does the memory of a process stay flat over a million operations?

One process runs operations with a short window, on a clock that moves on, and sweeps as an engine
does. The number of live records stays the same, so any growth is a leak. Every tenth operation is a
retry, and every hundredth fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target, counted
from coatcheck import AsyncEngine, Policy

OPERATIONS = 1_000_000
OPERATIONS_QUICK = 100_000
QUARTERS = 4
# Operations between two sweeps, and the time of each operation on that clock.
SWEEP_EVERY = 10_000
STEP_MS = 6
POLICY = Policy(window="60s", margin=0, lease="60s")


def measure(*, quick: bool) -> Table:
    """Measure in a process of its own, and return the table."""
    operations = OPERATIONS_QUICK if quick else OPERATIONS
    command = [sys.executable, "-m", "benchmarks.memory_growth", str(operations)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    resident_mib = [Samples((value,)) for value in json.loads(found)]
    rows = [_row(resident_mib, quarter, operations) for quarter in range(QUARTERS + 1)]
    live = SWEEP_EVERY + POLICY.window_ms // STEP_MS
    return Table(
        name="memory_growth",
        question="resident memory of one process over many operations",
        rows=rows,
        notes=[f"memory store, {live} live records at most; 1 in 10 a retry, 1 in 100 fails"],
    )


def _row(resident_mib: list[Samples], quarter: int, operations: int) -> Row:
    grown = resident_mib[quarter].over(resident_mib[1])
    of = f"{TIMES} the first quarter"
    # 5 % is noise of the allocator. A leak of 100 bytes per operation would be 80 MB.
    flat = Target(measured=grown, bound="≤", limit=1.05, unit=of)
    return Row(
        what=f"after {counted(operations * quarter // QUARTERS)} operations, MiB",
        product=resident_mib[quarter],
        ratios=[(of, grown)] if quarter > 1 else (),
        targets=[flat] if quarter == QUARTERS else (),
    )


async def _run(operations: int) -> list[float]:
    now_ms = 1_800_000_000_000
    engine = AsyncEngine("memory://", POLICY, clock=lambda: now_ms, sweep_every_s=None)
    resident_mib = [_resident_mib()]
    for number in range(1, operations + 1):
        now_ms += STEP_MS
        order = number - (number % 10 == 0)
        try:
            await engine.run(f"order-{order}", _place, order)
        except ArithmeticError:
            pass
        if number % SWEEP_EVERY == 0:
            await engine.store.sweep(now_ms, SWEEP_EVERY)
        if number % (operations // QUARTERS) == 0:
            resident_mib.append(_resident_mib())
    await engine.close()
    return resident_mib


async def _place(order: int) -> dict[str, int]:
    if order % 100 == 51:
        raise ArithmeticError
    return {"order": order}


def _resident_mib() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the peak also shows a leak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(int(sys.argv[1])))))
