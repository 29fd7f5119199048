"""Unread: what a search comes by and cannot read, such as what a newer release has written.

For stores whose records are values or items that anybody may put there. Who asks for such a one by
its id is told so, because it may say that something was done; but it is no reason to show nothing
of all the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from coatcheck.core.record import Record
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fates import Divided, Fate

logger = logging.getLogger("coatcheck")


class Unread(StoreUnavailable):
    """What stands under one id is nothing that this release can read: no news about the others."""


class LeftOut:
    """Tells once for one store that something is left out; a search may go by it every minute."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, why: Unread) -> None:
        """Warn whoever reads the log, the first time."""
        if not self._is_told:
            self._is_told = True
            logger.warning("left out of lists and searches, like all that cannot be read: %s", why)

    def read(
        self, get: Callable[[Sequence[bytes]], Sequence[Record | None]], ids: Sequence[bytes]
    ) -> Iterator[Record]:
        """What *get* gives for *ids*, without those that are gone or cannot be read."""
        for fate in _fates(get, ids):
            if isinstance(fate, Unread):
                self.tell(fate)
            elif isinstance(fate, Exception):
                raise fate
            elif fate is not None:
                yield fate


def _fates(
    get: Callable[[Sequence[bytes]], Sequence[Record | None]], ids: Sequence[bytes]
) -> Sequence[Fate]:
    try:
        return get(ids)
    except Divided as error:
        return error.fates
    except Unread as error:
        return [error]  # there was but one
