"""The contract: what the engine does with a connection of the application.

The engine calls `begin` with a claim, runs the handler, and calls `end` with the completion, or
`rollback`. All methods are flows (`core/flow.py`) whose only effects are calls of the driver. So
one adapter serves the sync and the async connections of a driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from coatcheck.core.flow import Call, Effect, Flow, run, run_async
from coatcheck.errors import Misconfigured, NotCommitted
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.errors import is_savepoint_gone

# Set after the claim. To undo what the handler has written, the end rolls back to it: the claim
# stays written, and its row locked. If the handler commits or rolls back by itself, the savepoint
# is gone. To notice that, it is always set on SQLite and MySQL, and released at the end. PostgreSQL
# needs none for that: there, the end finds a row only if the current transaction has written it.
_SET_SAVEPOINT = Statement("savepoint coatcheck_handler", ())
_RELEASE_SAVEPOINT = Statement("release savepoint coatcheck_handler", ())
_ROLLBACK_TO_SAVEPOINT = Statement("rollback to savepoint coatcheck_handler", ())

_CLOSED = (
    "the connection was closed before the operation was complete; leave that to the pool or "
    "function that it comes from"
)
_ENDED = (
    "the handler has committed or rolled back by itself, or a deadlock has undone its transaction; "
    "leave commit and rollback to the operation, or use a savepoint"
)


class InTransaction(Misconfigured):
    """The connection is already in a transaction of the application; we changed nothing in it."""

    def __init__(self, state: str = "in a transaction already") -> None:
        super().__init__(
            f"the connection for this operation is {state}; pass one that is idle, because an "
            "operation that loses against a duplicate rolls its transaction back"
        )


class TransactionConnection:
    """
    A connection or session of the application, used for one transaction.

    Attributes:
        handle: the application's own object, as its handler uses it.
        dialect: the database it leads to.
    """

    dialect: Dialect

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be installed
        self.handle = handle

    def start(self) -> Flow[None]:
        """Begin a transaction; raises `InTransaction` if one is open already."""
        raise NotImplementedError

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        raise NotImplementedError

    def is_closed(self) -> bool:
        """The connection was closed while the handler ran, so no end can be sent on it."""
        raise NotImplementedError

    def commit(self) -> Flow[None]:
        """Commit; raises if the commit failed."""
        raise NotImplementedError

    def rollback(self) -> Flow[None]:
        """Roll the transaction back."""
        raise NotImplementedError

    def begin(self, claim: Iterable[Statement], *, can_undo: bool = False) -> Flow[bool]:
        """
        Begin a transaction and write *claim* in it; return whether it was written.

        Executes the statements of *claim* in order until one of them affects a row. *can_undo*:
        `end` may have to undo what the handler writes.
        """
        yield from self.start()
        for statement in claim:
            if (yield from self.write(statement)) == 1:
                yield from self.set_savepoint(can_undo=can_undo)
                return True
        return False

    def end(self, completion: Statement, *, undo: bool = False) -> Flow[None]:
        """
        Write *completion* and commit; raises `NotCommitted` if our transaction is over.

        *undo*: before that, undo what the handler has written. The claim keeps its lock meanwhile.
        """
        if self.is_closed():
            raise NotCommitted(_CLOSED)
        try:
            yield from self.undo() if undo else self.release_savepoint()
        except Exception as error:
            if is_savepoint_gone(error, self.dialect):
                raise NotCommitted(_ENDED) from error
            raise
        if (yield from self.write(completion)) != 1:
            raise NotCommitted(_ENDED)
        yield from self.commit()

    def set_savepoint(self, *, can_undo: bool) -> Flow[None]:
        """Set a savepoint after the claim, unless the database needs none for this operation."""
        if can_undo or self.dialect != "postgresql":
            yield from self.write(_SET_SAVEPOINT)

    def release_savepoint(self) -> Flow[None]:
        """Release the savepoint if its absence shows that our transaction is over."""
        if self.dialect != "postgresql":
            yield from self.write(_RELEASE_SAVEPOINT)

    def undo(self) -> Flow[None]:
        """Undo what the handler has written, and keep the claim."""
        yield from self.write(_ROLLBACK_TO_SAVEPOINT)


def call(flow: Flow[Any]) -> Any:  # noqa: ANN401 - what the flow returns
    """Run a *flow* of a connection for sync code."""
    return run(flow, _perform)


async def call_async(flow: Flow[Any]) -> Any:  # noqa: ANN401 - what the flow returns
    """Run a *flow* of a connection for async code."""
    return await run_async(flow, _perform_async)


def _perform(effect: Effect[Any]) -> Any:  # noqa: ANN401 - what the driver returns
    assert isinstance(effect, Call)
    return effect.function(*effect.args)


async def _perform_async(effect: Effect[Any]) -> Any:  # noqa: ANN401 - what the driver returns
    result = _perform(effect)
    return await result if inspect.isawaitable(result) else result


@lru_cache(maxsize=64)
def numbered(text: str) -> str:
    """Return *text* with the placeholders of asyncpg ($1, $2 …) in place of %s."""
    start, *rest = text.split("%s")
    return start + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
