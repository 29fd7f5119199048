"""Prompt futures: whoever has to hand an answer on hears of it in the same turn of the loop.

Between a wire and `looped.py`. An ordinary future tells a turn later, and a turn of an event loop
that was idle costs as much as packing a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Prompt(asyncio.Future[T]):
    """A future that can also be awaited; it has one listener besides, whom it tells at once."""

    _listener: Callable[[asyncio.Future[T]], None] | None = None

    def tell(self, listener: Callable[[asyncio.Future[T]], None]) -> None:
        """Call *listener* when there is a result or an error; if there is one, a turn later."""
        if self.done():
            self.add_done_callback(listener)
        else:
            self._listener = listener

    def set_result(self, result: T, /) -> None:
        """As usual."""
        super().set_result(result)
        self._tell()

    def set_exception(self, exception: type | BaseException, /) -> None:
        """As usual."""
        super().set_exception(exception)
        self._tell()

    def _tell(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener(self)
