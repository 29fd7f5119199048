"""The contract: what the engine does with a connection, sync and async under the same names.

The engine calls `begin` with a claim, runs the handler, and calls `end` with the completion, or
`rollback`. Drivers that execute one statement per call build on `StatementByStatement`.
"""

from __future__ import annotations

from typing import Any, Protocol

from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.errors import is_savepoint_gone

# Set after the claim and released before the end. If the handler commits or rolls back meanwhile,
# the savepoint is gone. PostgreSQL needs none: there, the end finds a row only if the current
# transaction has written it.
_SET_SAVEPOINT = Statement("savepoint coatcheck_claim", ())
_RELEASE_SAVEPOINT = Statement("release savepoint coatcheck_claim", ())


class InTransaction(Misconfigured):
    """The connection is already in a transaction of the application; we changed nothing in it."""

    def __init__(self, state: str = "in a transaction already") -> None:
        super().__init__(
            f"the connection for this operation is {state}; pass one that is idle, because an "
            "operation that loses against a duplicate rolls its transaction back"
        )


class TransactionConnection(Protocol):
    """A connection of the application, used for one transaction of sync code."""

    handle: Any  # the application's own object, as its handler uses it
    dialect: Dialect

    def begin(self, claim: Statement) -> int:
        """
        Begin a transaction, execute *claim* in it and return the number of affected rows.

        Raises `InTransaction` if the connection is in a transaction already.
        """
        ...

    def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        ...

    def is_closed(self) -> bool:
        """The connection was closed while the handler ran, so no end can be sent on it."""
        ...

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        ...

    def rollback(self) -> None:
        """Roll the transaction back."""
        ...


class AsyncTransactionConnection(Protocol):
    """A connection of the application, used for one transaction of async code."""

    handle: Any
    dialect: Dialect

    async def begin(self, claim: Statement) -> int:
        """
        Begin a transaction, execute *claim* in it and return the number of affected rows.

        Raises `InTransaction` if the connection is in a transaction already.
        """
        ...

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        ...

    def is_closed(self) -> bool:
        """The connection was closed while the handler ran, so no end can be sent on it."""
        ...

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        ...

    async def rollback(self) -> None:
        """Roll the transaction back."""
        ...


class StatementByStatement(Protocol):
    """`begin` and `end` for drivers that execute one statement per call."""

    dialect: Dialect

    def start(self) -> None:
        """Begin a transaction; raises `InTransaction` if one is open already."""
        ...

    def write(self, statement: Statement, /) -> int:
        """Execute *statement* and return the number of affected rows."""
        ...

    def commit(self) -> None:
        """Commit; raises if the commit failed."""
        ...

    def begin(self, claim: Statement) -> int:
        """Begin a transaction, execute *claim* in it and return the number of affected rows."""
        self.start()
        affected = self.write(claim)
        if affected == 1 and self.dialect != "postgresql":
            self.write(_SET_SAVEPOINT)
        return affected

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        if not self._is_still_open() or self.write(statement) != 1:
            return False
        self.commit()
        return True

    def _is_still_open(self) -> bool:
        """The handler has not ended our transaction, as far as a savepoint has to show that."""
        if self.dialect == "postgresql":
            return True
        try:
            self.write(_RELEASE_SAVEPOINT)
        except Exception as error:
            if is_savepoint_gone(error, self.dialect):
                return False
            raise
        return True


class AsyncStatementByStatement(Protocol):
    """The same for async code."""

    dialect: Dialect

    async def start(self) -> None:
        """Begin a transaction; raises `InTransaction` if one is open already."""
        ...

    async def write(self, statement: Statement, /) -> int:
        """Execute *statement* and return the number of affected rows."""
        ...

    async def commit(self) -> None:
        """Commit; raises if the commit failed."""
        ...

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, execute *claim* in it and return the number of affected rows."""
        await self.start()
        affected = await self.write(claim)
        if affected == 1 and self.dialect != "postgresql":
            await self.write(_SET_SAVEPOINT)
        return affected

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        if not await self._is_still_open() or await self.write(statement) != 1:
            return False
        await self.commit()
        return True

    async def _is_still_open(self) -> bool:
        """The handler has not ended our transaction, as far as a savepoint has to show that."""
        if self.dialect == "postgresql":
            return True
        try:
            await self.write(_RELEASE_SAVEPOINT)
        except Exception as error:
            if is_savepoint_gone(error, self.dialect):
                return False
            raise
        return True
