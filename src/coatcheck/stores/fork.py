"""Forks: an engine made before the fork works in each child, with threads of its own.

Servers such as gunicorn load the application once and fork. A child inherits the engine's memory
but none of its threads, and locks in whatever state they were; so it makes them anew.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something that has parts belonging to one process."""

    def _renew(self) -> None: ...


_LIVING: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_after_fork(living: Renewable) -> None:
    """Have *living* make its threads and locks anew in every forked child."""
    _LIVING.add(living)


def _in_child() -> None:
    for living in list(_LIVING):
        living._renew()  # noqa: SLF001 - the protocol above


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
