"""Forks: an engine that was made before a fork works in each child, with threads of its own.

Servers such as gunicorn load the application once and fork. A child inherits the engine's memory
but none of its threads, and its locks may be held by threads that do not exist there. So it makes
new ones.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object with threads, locks or connections, which belong to one process."""

    def _renew(self) -> None: ...


_RENEWABLES: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_after_fork(renewable: Renewable) -> None:
    """Call `_renew` of *renewable* in every forked child, as long as it exists."""
    _RENEWABLES.add(renewable)


def _renew_all() -> None:
    for renewable in list(_RENEWABLES):
        renewable._renew()  # noqa: SLF001 - the protocol above


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
