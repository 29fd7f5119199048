"""The contract: what is done with a lent connection, sync and async under the same names."""

from __future__ import annotations

from typing import Any, Protocol

from coatcheck.errors import Misconfigured
from coatcheck.lent.trouble import is_over
from coatcheck.stores.ledger import Dialect, Statement

# Set behind the claim, and released before the end: whatever ends the transaction meanwhile takes
# it away. On PostgreSQL the end itself finds only what its own transaction has claimed.
_MARK = Statement("savepoint coatcheck_claim", ())
_RELEASE = Statement("release savepoint coatcheck_claim", ())


class InTransaction(Misconfigured):
    """A connection that was lent is in a transaction of its owner's; nothing was done there."""

    def __init__(self, where: str = "in a transaction already") -> None:
        super().__init__(
            f"the connection that was lent is {where}; lend one that is idle, because losing "
            "against a duplicate rolls back"
        )


class Lent(Protocol):
    """A connection that the application has lent us for one transaction, for sync code."""

    handle: Any  # what was lent, as its owner knows it
    dialect: Dialect

    def begin(self, claim: Statement) -> int:
        """
        Begin a transaction, and execute *claim* in it; how many rows it affected.

        `InTransaction` where one is open already, which is its owner's.
        """
        ...

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    def is_closed(self) -> bool:
        """It is known to be closed, so that no end can be sent on it: its handler did that."""
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

        `InTransaction` where one is open already, which is its owner's.
        """
        ...

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        ...

    def is_closed(self) -> bool:
        """It is known to be closed, so that no end can be sent on it: its handler did that."""
        ...

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        ...

    async def rollback(self) -> None:
        """Undo."""
        ...


class OneByOne(Protocol):
    """A connection that is told one thing at a time."""

    dialect: Dialect

    def start(self) -> None:
        """Begin a transaction; `InTransaction` where one is open already."""
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
        affected = self.write(claim)
        if affected == 1 and self.dialect != "postgresql":
            self.write(_MARK)
        return affected

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if not self._is_open() or self.write(statement) != 1:
            return False
        self.commit()
        return True

    def _is_open(self) -> bool:
        """The transaction that we have begun is not over, as far as has to be asked."""
        if self.dialect == "postgresql":
            return True
        try:
            self.write(_RELEASE)
        except Exception as error:
            if is_over(error, self.dialect):
                return False
            raise
        return True


class AsyncOneByOne(Protocol):
    """The same for async code."""

    dialect: Dialect

    async def start(self) -> None:
        """Begin a transaction; `InTransaction` where one is open already."""
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
        affected = await self.write(claim)
        if affected == 1 and self.dialect != "postgresql":
            await self.write(_MARK)
        return affected

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if not await self._is_open() or await self.write(statement) != 1:
            return False
        await self.commit()
        return True

    async def _is_open(self) -> bool:
        """The transaction that we have begun is not over, as far as has to be asked."""
        if self.dialect == "postgresql":
            return True
        try:
            await self.write(_RELEASE)
        except Exception as error:
            if is_over(error, self.dialect):
                return False
            raise
        return True
