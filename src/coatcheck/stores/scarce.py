"""Scarce threads: that none can be started is an outage, and like any other it passes.

Beneath `threaded.py` and the wires. Invariant: whoever was told so has asked for nothing, and who
comes later tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coatcheck.errors import StoreUnavailable


def started(name: str, work: Callable[..., None], *args: object) -> threading.Thread:
    """A thread that does *work*; it ends with the process."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    with outage_without_thread():
        thread.start()
    return thread


@contextmanager
def outage_without_thread() -> Iterator[None]:
    """Around whatever starts a thread: the limit of a container or of a user may be reached."""
    try:
        yield
    except RuntimeError as error:
        raise StoreUnavailable(f"no thread could be started: {error}") from error
