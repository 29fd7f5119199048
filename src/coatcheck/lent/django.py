"""Django: `django.db.connection`, in a block of `transaction.atomic`.

So that `ATOMIC_REQUESTS`, `atomic` in a view and `on_commit` mean what they always mean. A
connection of Django's belongs to one thread, so it is for sync code.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from coatcheck.errors import NotCommitted
from coatcheck.lent.contract import InTransaction, OneByOne
from coatcheck.stores.ledger import Dialect, Statement


class DjangoLent(OneByOne):
    """A connection of Django's, or the proxy for it."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a package that may not be here
        self.handle = handle
        self.dialect = cast("Dialect", handle.vendor)
        self._atomic: Any = None

    def start(self) -> None:
        """Begin."""
        if self.handle.in_atomic_block or not self.handle.get_autocommit():
            raise InTransaction
        atomic = import_module("django.db.transaction").atomic(using=self.handle.alias)
        atomic.__enter__()
        self._atomic = atomic

    def write(self, statement: Statement) -> int:
        """
        Execute *statement*; how many rows it affected.

        A block that is marked for a rollback ends without a word, so that is said here.
        """
        if self.handle.get_rollback():
            raise NotCommitted("the handler has marked its transaction for a rollback")
        with self.handle.cursor() as cursor:
            cursor.execute(statement.text, statement.values)
            affected: int = cursor.rowcount
            return affected

    def commit(self) -> None:
        """Commit."""
        atomic, self._atomic = self._atomic, None
        atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        """Undo."""
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            self.handle.set_rollback(True)
            atomic.__exit__(None, None, None)
