"""Starts, kills and stops the servers of the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import coatcheck

# 20 s: a hundred times what a start takes.
START_S_MAX = 20.0
# 5 s to finish running requests; then the process is killed.
STOP_S_MAX = 5.0


class Service:
    """One server; `with` starts it and stops it."""

    def __init__(self, name: str, directory: Path, *arguments: object) -> None:
        self.port = 0  # of the current process; a restart changes it, 0: there is none
        self._name = name
        self._log = directory / f"{name}.log"
        module = ("-m", "coatcheck.demo.servers", name)
        # -P: do not import modules from the current directory.
        self._command = [sys.executable, "-P", *module, str(directory), *map(str, arguments)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it listens."""
        source = str(Path(coatcheck.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            self.port = self._read_port(process)
        except BaseException:  # including Ctrl-C
            self.kill()
            raise

    def _read_port(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        timeout = threading.Timer(START_S_MAX, process.kill)
        timeout.daemon = True  # so that Ctrl-C before `cancel` does not delay the end
        try:
            timeout.start()
            line = process.stdout.readline()
        finally:
            timeout.cancel()
        if not line.strip().isdigit():
            raise RuntimeError(f"the {self._name} did not start; see {self._log}")
        return int(line)

    def kill(self) -> None:
        """End the process at once: kill -9."""
        self.port = 0  # nothing listens there; the system may give the old one to another program
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes its pipes and waits for its end
                process.kill()

    def stop(self) -> None:
        """Let the process finish its requests, then end it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S_MAX)
        self.kill()
