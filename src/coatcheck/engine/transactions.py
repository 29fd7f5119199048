"""Transaction mode: the record and the handler's writes commit in one transaction.

`OperationTransaction` performs the effects of `core/transaction.py` on a connection of the
application. It is written as flows; what differs between threads and event loops is in the two
classes at the end. Duplicates in the same process do not take a connection each to wait for the
row: they wait for the first one in memory. After any failure the transaction is over and the
connection is given back before the caller gets the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from coatcheck.core.flow import Call, Effect, Flow
from coatcheck.core.messages.event import OutgoingEvent
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.core.record import GONE, RUNNING, Record, Swap, in_doubt
from coatcheck.core.transaction import Begin, Commit
from coatcheck.errors import CoatcheckError, Misconfigured, NotCommitted, StoreUnavailable
from coatcheck.operation import Operation
from coatcheck.stores.event_table import EventTable
from coatcheck.stores.offset_table import OffsetTable
from coatcheck.stores.transaction_statements import Dialect, Statement, TransactionStatements
from coatcheck.telemetry import Claimed, Released
from coatcheck.transactions.contract import (
    InTransaction,
    TransactionConnection,
    call,
    call_async,
)
from coatcheck.transactions.errors import (
    ErrorKind,
    error_kind_of,
    is_busy,
    is_refused,
    is_table_missing,
)
from coatcheck.transactions.run_to_end import run_to_end
from coatcheck.transactions.sources import ConnectionSource, acquire, acquire_async

if TYPE_CHECKING:  # the attempts hold transactions in turn
    from coatcheck.engine.attempts import Attempts

# Nothing has run when a claim fails, so it may be made again: on another connection, if a pool did
# not know yet that the first one is dead.
TRIES = 3
# The record that a claim lost against may be swept before it is read, but not again and again.
_GONE_MAX = 5
# The nonce of a claim that another transaction has not committed yet, so that we cannot read it.
_UNCOMMITTED = -1
NO_EVENTS_TABLE = (
    "there is no table coatcheck_events in the store's database: run `coatcheck migrate --events`, "
    "or start a Relay, which creates it"
)
NO_OFFSETS_TABLE = (
    "there is no table coatcheck_offsets in the store's database: run "
    "`coatcheck migrate --offsets`, or start the consumer again, which creates it"
)
# 5 s: as long as a store waits for its database. A longer rollback goes on in the background.
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
    """What differs between threads and event loops; both methods are awaited in async code."""

    def acquire(self, source: ConnectionSource, /) -> Any:  # noqa: ANN401 - see `sources.acquire`
        """Return a connection, and the function that gives it back."""
        ...

    def run(self, flow: Flow[None], /) -> Any:  # noqa: ANN401 - None, or awaited
        """Run *flow*."""
        ...

    def run_to_end(self, flow: Flow[None], timeout_s: float, /) -> Any:  # noqa: ANN401 - None, or awaited
        """Run *flow*, also if the caller is cancelled meanwhile."""
        ...


class OperationTransaction:
    """The transaction of one operation, and the connection it is open on."""

    def __init__(self, attempts: Attempts, database: Database, access: Access) -> None:
        self._attempts = attempts
        self._database = database
        self._access = access
        self._dialect: Dialect = database.statements.dialect
        self._claimed: Record | None = None
        self._until_ms = 0  # until when the claim may wait for its row
        self._connection: TransactionConnection | None = None
        self._give_back: Callable[..., Any] | None = None

    @property
    def connection(self) -> Any:  # noqa: ANN401 - of any driver
        """The application's own connection or session."""
        if self._connection is None:
            raise NotCommitted("the transaction of this operation is over")
        return self._connection.handle

    def emit(self, event: OutgoingEvent) -> Any:  # noqa: ANN401 - None, or awaited
        """Write *event* in the transaction."""
        return self._write(EventTable(self._database.statements).insertion(event), NO_EVENTS_TABLE)

    def store_offset(self, offset: PartitionOffset) -> Any:  # noqa: ANN401 - as above
        """Write *offset* in the transaction."""
        return self._write(OffsetTable(self._database.statements).storing(offset), NO_OFFSETS_TABLE)

    def _write(self, statement: Statement, no_table: str) -> Any:  # noqa: ANN401 - as above
        if self._connection is None:
            raise NotCommitted("the transaction of this operation is over")
        return self._access.run(self._written(self._connection, statement, no_table))

    def _written(
        self, connection: TransactionConnection, statement: Statement, no_table: str
    ) -> Flow[None]:
        try:
            yield from connection.write(statement)
        except Exception as error:
            if is_table_missing(error, self._dialect):
                raise Misconfigured(no_table) from error
            raise

    def perform(self, effect: Effect[Any]) -> Flow[Record | None]:
        """Perform an effect of `core/transaction.py`."""
        if isinstance(effect, Begin):
            return (yield from self._begin(effect))
        if isinstance(effect, Commit):
            yield from self._commit(effect.swap, undo=effect.undo)
        else:
            yield from self._roll_back()
        return None

    def abandon(self) -> Flow[None]:
        """Undo what is not committed; does nothing if everything is over."""
        claim = self._claimed
        if claim is not None:
            try:
                yield from self._undo()
            finally:
                self._leave()
                self._attempts.telemetry.happened(Released, claim)

    def raise_if_repeatable(self, error: Exception, operation: Operation) -> None:
        """Raise `Repeat` if the database asks for another run and the policy allows it."""
        is_collision = error_kind_of(error, self._dialect) is ErrorKind.SERIALIZATION
        if is_collision and operation.repeats < operation.policy.transaction_retries:
            raise Repeat(operation.repeats + 1) from error

    # --- begin and claim ------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> Flow[Record | None]:
        claim = begin.swap.record
        assert claim is not None
        self._until_ms = begin.until_ms
        conflict = self._enter(claim)
        if conflict is not None:
            return conflict
        is_claimed = False
        try:
            for _ in range(1 + _GONE_MAX):
                kind = yield from self._claim(begin)
                is_claimed = kind is None
                if is_claimed:
                    self._attempts.telemetry.happened(Claimed, claim)
                    return None
                if kind is ErrorKind.LOCKED:
                    conflict = claim._replace(nonce=_UNCOMMITTED)
                    return conflict
                current = (yield from self._attempts.read(claim.id)).record
                if current.version or begin.swap.expected:
                    conflict = current
                    return conflict
            raise StoreUnavailable(
                "a claim conflicts with a record that the store does not have: does the connection "
                "lead to the store's own database and schema?"
            )
        finally:
            if not is_claimed:
                try:
                    yield from self._undo()
                finally:
                    self._leave(conflict)

    def _claim(self, begin: Begin) -> Flow[ErrorKind | None]:
        """
        Write the claim in a new transaction, which stays open, and return None.

        If the row is locked or exists already, roll back and return which of the two.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                if (yield from self._try_claim(begin)):
                    return None
                kind: ErrorKind | None = ErrorKind.DUPLICATE
            except CoatcheckError as error:
                yield from self._undo(error)
                raise
            except Exception as error:
                kind = error_kind_of(error, self._dialect)
                is_conflict = kind in (ErrorKind.LOCKED, ErrorKind.DUPLICATE)
                if kind is None or not (is_conflict or tries_left):
                    raise StoreUnavailable(_text_of(error)) from error
            yield from self._undo()
            if kind in (ErrorKind.LOCKED, ErrorKind.DUPLICATE):
                return kind
        raise AssertionError  # the last try has returned or raised

    def _try_claim(self, begin: Begin) -> Flow[bool]:
        acquired = yield from Call(self._access.acquire, (self._database.source,))
        connection: TransactionConnection
        connection, self._give_back = acquired
        if connection.dialect != self._dialect:
            raise Misconfigured(
                f"the store is in {self._dialect}, and the connection leads to "
                f"{connection.dialect}; record and effect can only commit together in one database"
            )
        # At least 1: some databases take 0 for "no limit".
        wait_ms = max(1, self._until_ms - self._attempts.now_ms())
        self._connection = connection
        claim = self._database.statements.claim(begin.swap, wait_ms)
        try:
            return (yield from connection.begin(claim, can_undo=begin.can_undo))
        except InTransaction:
            self._connection = None  # the open transaction is its owner's: no rollback
            raise

    # --- complete and commit --------------------------------------------------------------------

    def _commit(self, swap: Swap, *, undo: bool) -> Flow[None]:
        connection, claim = self._connection, self._claimed
        assert connection is not None
        assert claim is not None
        try:
            yield from connection.end(self._database.statements.change(swap), undo=undo)
        except Exception as error:
            yield from self.abandon()
            meaning = self._meaning_of(error)
            if not isinstance(meaning, StoreUnavailable):
                yield from self._mark_in_doubt(claim)
            if meaning is None:
                raise
            raise meaning from error
        give_back, self._give_back, self._connection = self._give_back, None, None
        try:
            yield from _returned(give_back, None)
        finally:
            self._claimed = None
            self._attempts.in_transaction.pop(swap.id, None)
            self._attempts.after_write(swap, None)

    def _meaning_of(self, error: Exception) -> CoatcheckError | None:
        """
        Return our error for the *error* of a commit; None if the driver's own is to be raised.

        `StoreUnavailable`: it is not known whether the commit took place. Otherwise nothing is
        committed.
        """
        if is_busy(error):
            return NotCommitted("the handler has left a statement running on its connection")
        is_unreachable = error_kind_of(error, self._dialect) is ErrorKind.UNREACHABLE
        if not is_unreachable or is_refused(error, self._dialect):
            return None
        return StoreUnavailable(f"at the commit: {_text_of(error)}", is_ambiguous=True)

    def _roll_back(self) -> Flow[None]:
        """Undo; if the handler has committed by itself before it failed, mark that in doubt."""
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
                conflict = yield from swap
                self._attempts.after_write(swap, conflict, why="its handler committed by itself")

    def _undo(self, refusal: CoatcheckError | None = None) -> Flow[None]:
        """Roll back, and give the connection back."""
        connection, give_back = self._connection, self._give_back
        self._connection = self._give_back = None
        if give_back is not None:
            wait_s = max(0, self._until_ms - self._attempts.now_ms()) / 1_000
            flow = _rolled_back(connection, give_back, refusal)
            yield from Call(self._access.run_to_end, (flow, wait_s + ROLLBACK_S_MAX))

    # --- which operations this process has transactions for -------------------------------------

    def _enter(self, claim: Record) -> Record | None:
        """Start work on *claim*; returns the claim that this process works on already, if any."""
        current = self._attempts.in_transaction.setdefault(claim.id, claim)
        if current is not claim:
            # Held for as long as its transaction is open, whatever its lease says.
            return current._replace(lease_until_ms=claim.lease_until_ms)
        self._claimed = claim
        return None

    def _leave(self, current: Record | None = None) -> None:
        """End the work, of which nothing remains; waiters go on from the *current* record."""
        claim, self._claimed = self._claimed, None
        if claim is not None:
            self._attempts.in_transaction.pop(claim.id, None)
            if current is None or current.nonce == _UNCOMMITTED:
                current = GONE
            self._attempts.waiters.wake(current._replace(id=claim.id))


def _rolled_back(
    connection: TransactionConnection | None,
    give_back: Callable[..., Any],
    failure: BaseException | None,
) -> Flow[None]:
    """Roll back and give the connection back; if the rollback fails, the connection is dead."""
    if connection is not None:
        failure = None
        try:
            yield from connection.rollback()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - cancelled: the loop ends
            failure = error
    yield from _returned(give_back, failure)


def _returned(give_back: Callable[..., Any] | None, failure: BaseException | None) -> Flow[None]:
    """Give the connection back; the work is committed or undone already, so no error matters."""
    assert give_back is not None
    with suppress(Exception):
        yield from Call(give_back, (type(failure) if failure else None, failure, None))


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class ThreadAccess:
    """Connections for threads."""

    acquire = staticmethod(acquire)
    run = staticmethod(call)

    def run_to_end(self, flow: Flow[None], _timeout_s: float) -> None:
        """Run *flow*."""
        call(flow)


class LoopAccess:
    """Connections for event loops."""

    acquire = staticmethod(acquire_async)
    run = staticmethod(call_async)

    async def run_to_end(self, flow: Flow[None], timeout_s: float) -> None:
        """Run *flow*, also if the caller is cancelled meanwhile."""
        await run_to_end(call_async(flow), timeout_s)
