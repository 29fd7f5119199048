"""The contract: what is done with a lent connection, sync and async under the same names."""

from __future__ import annotations

from typing import Any, Protocol

from coatcheck.stores.ledger import Dialect, Statement


class Lent(Protocol):
    """A connection that the application has lent us for one transaction, for sync code."""

    handle: Any  # what was lent, as its owner knows it
    dialect: Dialect

    def begin(self) -> None:
        """Begin a transaction; `Misconfigured` where one is open already."""
        ...

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    def commit(self) -> None:
        """Commit; an error where that did not happen."""
        ...

    def rollback(self) -> None:
        """Undo."""
        ...


class AsyncLent(Protocol):
    """A connection that the application has lent us for one transaction, for async code."""

    handle: Any
    dialect: Dialect

    async def begin(self) -> None:
        """Begin a transaction; `Misconfigured` where one is open already."""
        ...

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    async def commit(self) -> None:
        """Commit; an error where that did not happen."""
        ...

    async def rollback(self) -> None:
        """Undo."""
        ...


IN_TRANSACTION = (
    "the connection that was lent is in a transaction already; lend one that is idle, because "
    "losing against a duplicate rolls back"
)
