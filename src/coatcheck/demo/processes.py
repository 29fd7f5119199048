"""Processes: the two servers as the demo sees them, to be started, killed and stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import coatcheck

# 20 s: a hundred times what starting takes; a machine that is slower than that shows nothing.
START_S_MAX = 20.0
# 5 s to finish what runs; then it is ended.
STOP_S_MAX = 5.0


class Service:
    """A server of the demo; `with` starts it and makes sure that nothing of it is left."""

    def __init__(self, name: str, directory: Path, *arguments: object) -> None:
        self.port = 0  # of the present process; a restart brings another
        self._name = name
        self._log = directory / f"{name}.log"
        module = f"coatcheck.demo.{name}"
        # -P: what lies in the current directory is not what we import.
        self._command = [sys.executable, "-P", "-m", module, str(directory), *map(str, arguments)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start a process and wait until it listens."""
        ours = str(Path(coatcheck.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            self.port = self._port_of(process)
        except BaseException:  # an impatient Ctrl-C, too
            self.kill()
            raise

    def _port_of(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        too_late = threading.Timer(START_S_MAX, process.kill)
        too_late.daemon = True  # nobody waits for it if Ctrl-C comes before it can be cancelled
        try:
            too_late.start()
            said = process.stdout.readline()
        finally:
            too_late.cancel()
        if not said.strip().isdigit():
            raise RuntimeError(f"the {self._name} did not start; see {self._log}")
        return int(said)

    def kill(self) -> None:
        """End the process in the middle of what it does: kill -9."""
        if self._process is not None:
            self._process.kill()
            self._let_go()

    def stop(self) -> None:
        """Let the process finish what it does, then end it."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._let_go()

    def _let_go(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
