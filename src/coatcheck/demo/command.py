"""The command: `coatcheck demo`, from its arguments to its exit code.

0: the promise held; 1: it did not, or the demo could not be told. Its files stay where it says,
so that an order can be looked up afterwards; only those of an interrupted demo are removed.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Self

from coatcheck.demo.display import Display
from coatcheck.demo.story import Guard, Outcome, tell
from coatcheck.errors import Misconfigured


def run(
    *, orders: int, seed: int, keep: Path | None, as_json: bool, guard: Guard = "coatcheck"
) -> int:
    """
    Tell the story on standard output; or JSON there, and what people see on standard error.

    *guard* cannot be chosen on the command line: it is for the test that sees the demo fail.
    """
    directory = _empty_directory(keep)
    display = Display(sys.stderr if as_json else sys.stdout)
    try:
        with _Interrupts():
            outcome = tell(
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
    display.close(outcome)
    if as_json:
        sys.stdout.write(json.dumps(_facts(outcome), indent=2) + "\n")
    return 0 if outcome.promise_held else 1


class _Interrupts:
    """
    Ends with `KeyboardInterrupt` whatever Ctrl-C came into, however that has ended.

    Python raises it between any two instructions. Between those that take and release a lock, what
    comes out of them is another error; and in a finalizer it is told to nobody.
    """

    def __init__(self) -> None:
        self._have_come = False
        self._is_ours = False

    def __enter__(self) -> Self:
        # Else somebody else has decided what it means: a shell ignores it for what runs behind.
        is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_plain and threading.current_thread() is threading.main_thread():
            self._is_ours = True
            signal.signal(signal.SIGINT, self._notice)
        return self

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._have_come = True
        signal.default_int_handler(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._have_come:
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
        raise Misconfigured(f"--keep {wanted}: it is not empty; name a new directory")
    return wanted.resolve()


def _facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "promise_held": outcome.promise_held,
        "seed": outcome.seed,
        "seconds": outcome.seconds,
        "without_keys": asdict(outcome.without_keys),
        "with_coatcheck": asdict(outcome.with_coatcheck),
        "witness": None if outcome.witness is None else asdict(outcome.witness),
        "directory": str(outcome.directory),
    }
