"""Transaction mode: the record and the handler's writes commit in one transaction.

`OperationTransaction` performs the effects of `core/transaction.py` on a connection of the
application's. It is written as flows; what differs between threads and event loops is in the two
classes at the end. Duplicates in the same process do not take a connection each to wait for the
row; they wait like all others. Whatever goes wrong, the transaction is over and the connection is
returned before the caller learns of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from coatcheck.core.flow import Call, Effect, Flow
from coatcheck.core.record import GONE, RUNNING, Record, Swap, in_doubt
from coatcheck.core.transaction import Begin, Commit
from coatcheck.errors import CoatcheckError, Misconfigured, NotCommitted, StoreUnavailable
from coatcheck.operation import Operation
from coatcheck.stores.transaction_statements import Dialect, Statement, TransactionStatements
from coatcheck.transactions import AsyncTransactionConnection, TransactionConnection
from coatcheck.transactions.contract import InTransaction
from coatcheck.transactions.errors import ErrorKind, error_kind_of, is_busy, is_refused
from coatcheck.transactions.run_to_end import run_to_end
from coatcheck.transactions.sources import ConnectionSource, acquire, acquire_async

if TYPE_CHECKING:  # the attempts hold transactions in turn
    from coatcheck.engine.attempts import Attempts

# Nothing has run when a claim fails, so it may be made again: on another connection, if a pool did
# not know yet that the first one is dead.
TRIES = 3
# The record that a claim lost against may be swept before it is read, but not again and again.
_GONE_MAX = 5
# The nonce that stands for a claim in a transaction that only its own process can see yet.
_UNCOMMITTED = -1
# 5 s: as long as a store waits for its database. A rollback that is not over then ends by itself.
ROLLBACK_S_MAX = 5.0


class Repeat(CoatcheckError):
    """
    The database undid the transaction (a deadlock, a serialization failure): run it again.

    Raised by `complete` and `fail` if the policy allows it; *repeats* is for the next `begin`.
    """

    def __init__(self, repeats: int) -> None:
        super().__init__("the database undid this transaction; it may be run again")
        self.repeats = repeats

    def __reduce__(self) -> tuple[type[Repeat], tuple[int]]:
        return Repeat, (self.repeats,)


class Database(NamedTuple):
    """Where connections come from, and how a record is written on them."""

    source: ConnectionSource
    statements: TransactionStatements


class Access(Protocol):
    """Acquires and returns connections; everything is awaited in async code."""

    def acquire(self, source: ConnectionSource, /) -> Any:  # noqa: ANN401 - a connection and its manager
        """A connection, and the context manager to leave for it."""
        ...

    def leave(self, manager: Any, failure: BaseException | None, /) -> Any:  # noqa: ANN401 - None, or awaited
        """Return the connection."""
        ...

    def undo(
        self,
        connection: Any,  # noqa: ANN401 - of any driver
        manager: Any,  # noqa: ANN401 - of the application
        failure: BaseException | None,
        timeout_s: float,
        /,
    ) -> Any:  # noqa: ANN401 - None, or awaited
        """Roll back and return the connection, also if the caller is cancelled meanwhile."""
        ...


class OperationTransaction:
    """The transaction of one operation, and the connection it is open on."""

    def __init__(self, attempts: Attempts, database: Database, access: Access) -> None:
        self._attempts = attempts
        self._database = database
        self._access = access
        self._claimed: Record | None = None
        self._gone = 0  # how often the record that a claim lost against was not there
        self._until_ms = 0  # until when the claim may wait for its row
        self._connection: TransactionConnection | AsyncTransactionConnection | None = None
        self._manager: Any = None  # returns the connection when it is left

    @property
    def connection(self) -> Any:  # noqa: ANN401 - of any driver
        """The application's own connection or session."""
        if self._connection is None:
            raise NotCommitted("the transaction of this operation is over")
        return self._connection.handle

    def perform(self, effect: Effect[Any]) -> Flow[Record | None]:
        """Perform an effect of `core/transaction.py`."""
        if isinstance(effect, Begin):
            return (yield from self._begin(effect))
        if isinstance(effect, Commit):
            yield from self._commit(effect.swap)
        else:
            yield from self._roll_back()
        return None

    def abandon(self) -> Flow[None]:
        """Undo what is not committed; does nothing if everything is over."""
        if self._claimed is not None:
            try:
                yield from self._undo()
            finally:
                self._leave()

    def raise_if_repeatable(self, error: Exception, operation: Operation) -> None:
        """Raise `Repeat` if the database asks for another run and the policy allows it."""
        is_collision = error_kind_of(error, self._dialect) is ErrorKind.SERIALIZATION
        if is_collision and operation.repeats < operation.policy.transaction_retries:
            raise Repeat(operation.repeats + 1) from error

    # --- begin and claim ------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> Flow[Record | None]:
        swap, conflict, is_claimed = begin.swap, None, False
        assert swap.record is not None
        self._until_ms = begin.until_ms
        if (current := self._enter(swap.record)) is not None:
            return current
        try:
            while not is_claimed and conflict is None:
                problem = yield from self._claim(begin)
                is_claimed = problem is None
                if problem is not None:
                    read = yield from self._attempts.read(swap.id)
                    conflict = self._conflict_of(begin, problem, read.record)
        finally:
            if not is_claimed:
                try:
                    yield from self._undo()
                finally:
                    self._leave(conflict)
        return conflict

    def _claim(self, begin: Begin) -> Flow[ErrorKind | None]:
        """Make the claim in a new transaction; None: it is made, and the transaction is open."""
        for tries_left in reversed(range(TRIES)):
            try:
                is_claimed = yield from self._try_claim(begin)
            except CoatcheckError as error:
                yield from self._undo(error)
                raise
            except Exception as error:  # noqa: BLE001 - translated, or raised
                yield from self._undo()
                kind = self._kind_of(error, is_last=not tries_left)
                if kind in (ErrorKind.LOCKED, ErrorKind.DUPLICATE):
                    return kind
            else:
                if is_claimed:
                    return None
                yield from self._undo()
                return ErrorKind.DUPLICATE
        raise AssertionError  # the last try has returned or raised

    def _try_claim(self, begin: Begin) -> Flow[bool]:
        connection, self._manager = yield from Call(self._access.acquire, (self._database.source,))
        statements = self._statements_of(begin, connection.dialect)
        first = next(statements)
        self._connection = connection
        affected = yield from Call(connection.begin, (first,))
        while affected != 1 and (statement := next(statements, None)) is not None:
            affected = yield from Call(connection.write, (statement,))
        return bool(affected == 1)

    def _statements_of(self, begin: Begin, dialect: Dialect) -> Iterator[Statement]:
        if dialect != self._dialect:
            raise Misconfigured(
                f"the store is in {self._dialect}, and the connection leads to {dialect}; record "
                "and effect can only commit together in one database"
            )
        wait_ms = begin.until_ms - self._attempts.now_ms()
        # At least 1: some databases take 0 for "no limit".
        return self._database.statements.claim(begin.swap, max(1, wait_ms))

    def _kind_of(self, error: Exception, *, is_last: bool) -> ErrorKind:
        """What the *error* of a claim means; raises if it cannot be made."""
        kind = error_kind_of(error, self._dialect)
        if kind in (ErrorKind.LOCKED, ErrorKind.DUPLICATE):
            return kind
        if kind is None or is_last:
            raise StoreUnavailable(_text_of(error)) from error
        return kind

    def _conflict_of(self, begin: Begin, kind: ErrorKind, current: Record) -> Record | None:
        """
        The record that a claim lost against; *current* is what the store has.

        None: it is gone, so the claim may be made now.
        """
        if kind is ErrorKind.LOCKED:  # by a transaction that is not committed
            assert begin.swap.record is not None
            return begin.swap.record._replace(nonce=_UNCOMMITTED)
        if current.version or begin.swap.expected:
            return current
        self._gone += 1
        if self._gone > _GONE_MAX:
            raise StoreUnavailable(
                "a claim conflicts with a record that the store does not have: does the connection "
                "lead to the store's own database and schema?"
            )
        return None

    # --- complete and commit --------------------------------------------------------------------

    def _commit(self, swap: Swap) -> Flow[None]:
        connection, claim = self._connection, self._claimed
        assert connection is not None
        assert claim is not None
        try:
            if connection.is_closed():
                _raise_closed()
            statement = self._database.statements.change(swap)
            if not (yield from Call(connection.end, (statement,))):
                _raise_ended()
        except Exception as error:
            yield from self.abandon()
            meaning = self._meaning_of(error)
            if not isinstance(meaning, StoreUnavailable):
                yield from self._mark_in_doubt(claim)
            if meaning is None:
                raise
            raise meaning from error
        manager, self._manager, self._connection = self._manager, None, None
        try:
            yield from Call(self._access.leave, (manager, None))
        finally:
            self._claimed = None
            self._attempts.in_transaction.pop(swap.id, None)
            self._attempts.after_write(swap, None)

    def _meaning_of(self, error: Exception) -> CoatcheckError | None:
        """
        What the *error* of a commit means; None: what it says, and nothing is committed.

        `StoreUnavailable`: it is not known whether the commit took place.
        """
        if is_busy(error):
            return NotCommitted("the handler has left a statement running on its connection")
        is_unreachable = error_kind_of(error, self._dialect) is ErrorKind.UNREACHABLE
        if not is_unreachable or is_refused(error, self._dialect):
            return None
        return StoreUnavailable(f"at the commit: {_text_of(error)}", is_ambiguous=True)

    def _roll_back(self) -> Flow[None]:
        """
        Undo; what the handler has committed by itself before it failed is marked in doubt.

        The record is read each time: a handler that has begun another transaction since looks
        like any other.
        """
        claim = self._claimed
        yield from self.abandon()
        if claim is not None:
            yield from self._mark_in_doubt(claim)

    def _mark_in_doubt(self, claim: Record) -> Flow[None]:
        """
        Mark *claim* in doubt if its handler has committed it without its completion.

        Some of the work is done then, and perhaps not all of it. It must not run again by itself
        only because its lease has expired. If the store does not answer, the lease expires.
        """
        with suppress(CoatcheckError):
            current = (yield from self._attempts.read(claim.id)).record
            if current.nonce == claim.nonce and current.state == RUNNING:
                swap = Swap(claim.id, current.version, in_doubt(current))
                self._attempts.after_write(swap, (yield from swap))

    def _undo(self, refusal: CoatcheckError | None = None) -> Flow[None]:
        """Roll back, and return the connection."""
        connection, manager = self._connection, self._manager
        self._connection = self._manager = None
        if isinstance(refusal, InTransaction):
            connection = None  # the open transaction there is its owner's
        if connection is not None or manager is not None:
            wait_s = max(0, self._until_ms - self._attempts.now_ms()) / 1_000
            timeout_s = wait_s + ROLLBACK_S_MAX
            yield from Call(self._access.undo, (connection, manager, refusal, timeout_s))

    # --- which operations this process has transactions for -------------------------------------

    def _enter(self, claim: Record) -> Record | None:
        """Start work on *claim*; else the claim that this process works on already."""
        current = self._attempts.in_transaction.setdefault(claim.id, claim)
        if current is not claim:
            # Held for as long as its transaction is open, whatever its lease says.
            return current._replace(lease_until_ms=claim.lease_until_ms)
        self._claimed = claim
        return None

    def _leave(self, current: Record | None = None) -> None:
        """The work is over and nothing remains of it; waiters go on from the *current* record."""
        claim, self._claimed = self._claimed, None
        if claim is not None:
            self._attempts.in_transaction.pop(claim.id, None)
            # A record that is not committed yet says nothing.
            if current is None or current.nonce == _UNCOMMITTED:
                current = GONE
            self._attempts.waiters.wake(current._replace(id=claim.id))

    @property
    def _dialect(self) -> Dialect:
        return self._database.statements.dialect


def _raise_closed() -> NoReturn:
    raise NotCommitted(
        "the connection was closed before the operation was complete; leave that to the pool or "
        "function that it comes from"
    )


def _raise_ended() -> NoReturn:
    raise NotCommitted(
        "the handler has committed or rolled back by itself; leave that to the operation, or use "
        "a savepoint"
    )


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class ThreadAccess:
    """Connections for threads."""

    def acquire(self, source: ConnectionSource) -> tuple[TransactionConnection, Any]:
        """A connection, and the context manager to leave for it."""
        manager = acquire(source)
        return manager.__enter__(), manager

    def leave(self, manager: Any, failure: BaseException | None) -> None:  # noqa: ANN401 - the application's
        """Return the connection."""
        if manager is not None:
            with suppress(Exception):  # the work is committed or undone already
                manager.__exit__(type(failure) if failure else None, failure, None)

    def undo(
        self,
        connection: TransactionConnection | None,
        manager: Any,  # noqa: ANN401 - the application's
        failure: BaseException | None,
        _timeout_s: float,
    ) -> None:
        """Roll back and return the connection; if even that fails, it is dead."""
        if connection is not None:
            failure = None
            try:
                connection.rollback()
            except Exception as error:  # noqa: BLE001 - its transaction died with it
                failure = error
        self.leave(manager, failure)


class LoopAccess:
    """Connections for event loops."""

    def acquire(self, source: ConnectionSource) -> Any:  # noqa: ANN401 - a coroutine
        """A connection, and the context manager to leave for it."""
        return acquire_async(source)

    async def leave(self, manager: Any, failure: BaseException | None) -> None:  # noqa: ANN401 - the application's
        """Return the connection."""
        if manager is not None:
            with suppress(Exception):  # the work is committed or undone already
                await manager.__aexit__(type(failure) if failure else None, failure, None)

    async def undo(
        self,
        connection: AsyncTransactionConnection | None,
        manager: Any,  # noqa: ANN401 - the application's
        failure: BaseException | None,
        timeout_s: float,
    ) -> None:
        """Roll back and return the connection, also if the caller is cancelled meanwhile."""
        await run_to_end(self._undo(connection, manager, failure), timeout_s)

    async def _undo(
        self,
        connection: AsyncTransactionConnection | None,
        manager: Any,  # noqa: ANN401 - the application's
        failure: BaseException | None,
    ) -> None:
        if connection is not None:
            failure = None
            try:
                await connection.rollback()
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - its transaction died with it, or the loop ends
                failure = error
        await self.leave(manager, failure)
