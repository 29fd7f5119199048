"""`coatcheck demo`, from its arguments to its exit code.

Exit code 0: with coatcheck every order was charged exactly once. 1: not so, or a server did not
start. The files of the demo are removed when it ends, also by Ctrl-C. They stay with --keep, so
that an order can be looked up, and after a failure, so that its cause can be found.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Self

from coatcheck.demo.report import Display
from coatcheck.demo.servers import Guard
from coatcheck.demo.story import run_story
from coatcheck.errors import Misconfigured


def run(
    *, orders: int, seed: int, keep: Path | None, as_json: bool, guard: Guard = "coatcheck"
) -> int:
    """
    Run the demo and print its report; with *as_json*, JSON on stdout and the report on stderr.

    *guard* is no option of the command line: a test uses it to see the demo fail.
    """
    directory = _empty_directory(keep)
    display = Display(sys.stderr if as_json else sys.stdout)
    try:
        with _Interrupts():
            result = run_story(
                orders=orders, seed=seed, directory=directory, display=display, guard=guard
            )
    except RuntimeError as error:
        sys.stderr.write(f"coatcheck: {error}\n")
        return 1
    except KeyboardInterrupt:
        display.interrupt()
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if keep is None and result.promise_held:
        shutil.rmtree(directory, ignore_errors=True)
        example = result.example and replace(result.example, lookup="")
        result = replace(result, directory=None, example=example)
    display.show_result(result)
    if as_json:
        facts = {"promise_held": result.promise_held, **asdict(result)}
        sys.stdout.write(json.dumps(facts, indent=2, default=str) + "\n")
    return 0 if result.promise_held else 1


class _Interrupts:
    """
    Raises `KeyboardInterrupt` at the end of the block if Ctrl-C was pressed in it.

    Python raises it between any two instructions. In the middle of a lock's methods it becomes
    another error, and in a finalizer it is dropped; so this remembers that it came.
    """

    def __init__(self) -> None:
        self._was_pressed = False
        self._is_installed = False

    def __enter__(self) -> Self:
        # Another handler stays: a shell, for example, ignores Ctrl-C for background jobs.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            self._is_installed = True
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._was_pressed = True
        signal.default_int_handler(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._was_pressed:
            raise KeyboardInterrupt


def _empty_directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="coat-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        is_empty = not any(wanted.iterdir())
    except OSError as error:
        raise Misconfigured(f"--keep {wanted}: {error.strerror}") from error
    if not is_empty:
        raise Misconfigured(f"--keep {wanted}: the directory is not empty; name a new one")
    return wanted.resolve()
