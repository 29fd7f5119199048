"""Django: `django.db.connection`, in a block of `transaction.atomic`.

So that `ATOMIC_REQUESTS`, `atomic` in a view and `on_commit` mean what they always mean. A
connection of Django's belongs to one thread, so it is for sync code.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from coatcheck.errors import NotCommitted
from coatcheck.lent.contract import InTransaction, OneByOne
from coatcheck.stores.ledger import Dialect, Statement

_MARK = re.compile(r"\?(\d+)")

logger = logging.getLogger("coatcheck")


class DjangoLent(OneByOne):
    """A connection of Django's, or the proxy for it."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a package that may not be here
        self.handle = handle
        self.dialect = cast("Dialect", handle.vendor)
        self._atomic: Any = None
        self._is_ours = False  # nobody had connected it before us

    def start(self) -> None:
        """Begin."""
        handle = self.handle
        self._is_ours = handle.connection is None
        if handle.in_atomic_block or not handle.get_autocommit():
            raise InTransaction
        atomic = import_module("django.db.transaction").atomic(using=handle.alias)
        atomic.__enter__()
        self._atomic = atomic
        # At the start of a request Django closes what somebody has left in a transaction.
        handle.close_if_unusable_or_obsolete = _stay_open

    def write(self, statement: Statement) -> int:
        """
        Execute *statement*; how many rows it affected.

        A block that is marked for a rollback ends without a word, so that is said here.
        """
        if self.handle.get_rollback():
            raise NotCommitted("the handler has marked its transaction for a rollback")
        text, values = statement.text, statement.values
        if self.dialect == "sqlite":
            text, order = _with_percents(text)
            values = tuple(values[number] for number in order)
        with self.handle.cursor() as cursor:
            cursor.execute(text, values)
            affected: int = cursor.rowcount
            return affected

    def is_closed(self) -> bool:
        """It is marked for a rollback then, which `write` tells."""
        return False

    def commit(self) -> None:
        """Commit; what goes wrong in a hook after that is no news about the commit."""
        handle, atomic = self.handle, self._taken()
        hooks, handle.run_on_commit = handle.run_on_commit, []
        atomic.__exit__(None, None, None)
        handle.run_on_commit = hooks
        try:
            handle.run_and_clear_commit_hooks()
        except Exception:
            logger.exception("committed, but a function given to on_commit() has failed")
        self._let_go()

    def rollback(self) -> None:
        """Undo."""
        if self._atomic is not None:
            atomic = self._taken()
            self.handle.set_rollback(True)
            atomic.__exit__(None, None, None)
        self._let_go()

    def _taken(self) -> Any:  # noqa: ANN401 - see above
        """Our block, to be left; from now on Django may close what it likes."""
        atomic, self._atomic = self._atomic, None
        del self.handle.close_if_unusable_or_obsolete
        return atomic

    def _let_go(self) -> None:
        """Do with what we have connected as Django does after a request: there may be none."""
        if self._is_ours:
            with suppress(Exception):  # as with all that is given back
                self.handle.close_if_unusable_or_obsolete()


@lru_cache(maxsize=64)
def _with_percents(text: str) -> tuple[str, tuple[int, ...]]:
    """
    *text* with the marks that Django knows, which have no numbers, and the values they stand for.

    Where it logs queries, it fills them in by itself.
    """
    order = tuple(int(number) - 1 for number in _MARK.findall(text))
    return _MARK.sub("%s", text), order


def _stay_open() -> None:
    """In place of what would close a connection that is in our transaction."""
