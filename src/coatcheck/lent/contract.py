"""The contract: what is done with a lent connection, sync and async under the same names."""

from __future__ import annotations

from typing import Any, Protocol

from coatcheck.stores.ledger import Dialect, Statement


class Lent(Protocol):
    """A connection that the application has lent us for one transaction, for sync code."""

    handle: Any  # what was lent, as its owner knows it
    dialect: Dialect

    def begin(self, claim: Statement) -> int:
        """
        Begin a transaction, and execute *claim* in it; how many rows it affected.

        `Misconfigured` where one is open already.
        """
        ...

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        ...

    def rollback(self) -> None:
        """Undo."""
        ...


class AsyncLent(Protocol):
    """A connection that the application has lent us for one transaction, for async code."""

    handle: Any
    dialect: Dialect

    async def begin(self, claim: Statement) -> int:
        """
        Begin a transaction, and execute *claim* in it; how many rows it affected.

        `Misconfigured` where one is open already.
        """
        ...

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        ...

    async def rollback(self) -> None:
        """Undo."""
        ...


class OneByOne(Protocol):
    """A connection that is told one thing at a time."""

    def start(self) -> None:
        """Begin a transaction; `Misconfigured` where one is open already."""
        ...

    def write(self, statement: Statement, /) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    def commit(self) -> None:
        """Commit; an error where that did not happen."""
        ...

    def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        self.start()
        return self.write(claim)

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if self.write(statement) != 1:
            return False
        self.commit()
        return True


class AsyncOneByOne(Protocol):
    """The same for async code."""

    async def start(self) -> None:
        """Begin a transaction; `Misconfigured` where one is open already."""
        ...

    async def write(self, statement: Statement, /) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    async def commit(self) -> None:
        """Commit; an error where that did not happen."""
        ...

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        await self.start()
        return await self.write(claim)

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if await self.write(statement) != 1:
            return False
        await self.commit()
        return True


IN_TRANSACTION = (
    "the connection that was lent is in a transaction already; lend one that is idle, because "
    "losing against a duplicate rolls back"
)
