"""Django: `django.db.connection`, inside a block of `transaction.atomic`.

So `ATOMIC_REQUESTS`, `atomic` in a view and `on_commit` work as usual. A connection of Django
belongs to one thread, so it is for sync code.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from coatcheck.core.flow import Call, Flow
from coatcheck.errors import NotCommitted
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection

_NUMBERED_MARK = re.compile(r"\?(\d+)")

logger = logging.getLogger("coatcheck")


class DjangoConnection(TransactionConnection):
    """A connection of Django, or the proxy for it."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a package that may not be installed
        super().__init__(handle)
        self.dialect = cast("Dialect", handle.vendor)
        self._atomic: Any = None
        self._did_connect = False  # it was not connected before us

    def start(self) -> Flow[None]:
        """Enter an `atomic` block."""
        handle = self.handle
        self._did_connect = handle.connection is None
        if handle.in_atomic_block or not handle.get_autocommit():
            raise InTransaction
        atomic = import_module("django.db.transaction").atomic(using=handle.alias)
        yield from Call(atomic.__enter__)
        self._atomic = atomic
        # At the start of a request Django closes a connection that is in a transaction.
        handle.close_if_unusable_or_obsolete = _stay_open

    def write(self, statement: Statement) -> Flow[int]:
        """
        Execute *statement* and return the number of affected rows.

        Raises in a block that is marked for rollback, which Django would end without an error.
        """
        if self.handle.get_rollback():
            raise NotCommitted(
                "the transaction is marked for rollback, by set_rollback(True) or by an error in "
                "an inner atomic block; nothing was committed"
            )
        text, values = statement.text, statement.values
        if self.dialect == "sqlite":
            text, order = _with_django_marks(text)
            values = tuple(values[index] for index in order)
        with self.handle.cursor() as cursor:
            yield from Call(cursor.execute, (text, values))
            affected: int = cursor.rowcount
            return affected

    def undo(self) -> Flow[None]:
        """Undo what the handler has written, its `on_commit` functions and its rollback mark."""
        self.handle.set_rollback(False)
        self.handle.run_on_commit = []
        yield from super().undo()

    def is_closed(self) -> bool:
        """Never: Django marks the block for rollback instead, and `write` raises."""
        return False

    def commit(self) -> Flow[None]:
        """Commit, then run the `on_commit` functions; their errors do not undo the commit."""
        handle, atomic = self.handle, self._leave_block()
        hooks, handle.run_on_commit = handle.run_on_commit, []
        yield from Call(atomic.__exit__, (None, None, None))
        handle.run_on_commit = hooks
        try:
            handle.run_and_clear_commit_hooks()
        except Exception:
            logger.exception(
                "coatcheck: the operation is committed, but a function passed to "
                "transaction.on_commit() raised; it does not run again"
            )
        self._release()

    def rollback(self) -> Flow[None]:
        """Roll back."""
        if self._atomic is not None:
            atomic = self._leave_block()
            self.handle.set_rollback(True)
            yield from Call(atomic.__exit__, (None, None, None))
        self._release()

    def _leave_block(self) -> Any:  # noqa: ANN401 - see above
        """Return our block, to be exited; from now on Django may close the connection."""
        atomic, self._atomic = self._atomic, None
        del self.handle.close_if_unusable_or_obsolete
        return atomic

    def _release(self) -> None:
        """Close what we connected, as Django does after a request: there may be no request."""
        if self._did_connect:
            with suppress(Exception):  # the transaction is over, whatever becomes of the connection
                self.handle.close_if_unusable_or_obsolete()


@lru_cache(maxsize=64)
def _with_django_marks(text: str) -> tuple[str, tuple[int, ...]]:
    """
    Return *text* with %s in place of ?1, ?2 …, and the index of the value for each.

    Django knows no numbered placeholders, and fills in the values itself when it logs queries.
    """
    order = tuple(int(number) - 1 for number in _NUMBERED_MARK.findall(text))
    return _NUMBERED_MARK.sub("%s", text), order


def _stay_open() -> None:
    """Replaces the method that would close a connection in our transaction."""
