"""Connections of transaction mode: what a driver does, on the simulated database (L9).

Which transaction an operation has, and what its errors mean, is production's: `OperationTransaction`
in `engine/transactions.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, cast

from coatcheck.core.flow import Call, Flow
from coatcheck.core.record import Record, Swap
from coatcheck.engine.transactions import Database
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.transaction_statements import Statement, TransactionStatements
from coatcheck.transactions.contract import call
from coatcheck.transactions.errors import ErrorKind

from .database import Transaction
from .runner import Doing
from .world import Pause

if TYPE_CHECKING:
    from .served import ServedRequest

# How often a claim tries its row anew while another holds it: a lock that is waited for, without
# a queue.
LOOKS_PER_WAIT = 8


class RowLocked(Exception):
    """Another transaction holds the row."""

    sqlstate = "55P03"


def _claim_statements(swap: Swap, wait_ms: int) -> Any:
    return iter([Statement("claim", (swap, wait_ms))])


STATEMENTS = TransactionStatements(
    dialect="postgresql",
    claim=_claim_statements,
    change=lambda swap: Statement("change", (swap,)),
    connect=lambda: None,
    connect_async=lambda: None,
)


class SimulatedConnection:
    """A connection with one transaction; also what the handler writes with."""

    dialect = "postgresql"

    def __init__(self, served: ServedRequest) -> None:
        self.handle = self
        self._process = served.process
        self._policy = served.policy
        self._database = served.process.setting.database
        self._store = served.process.setting.store
        self.transaction = Transaction(served, served.process)

    def begin(self, claim: Iterable[Statement], *, can_undo: bool) -> Flow[bool]:
        """Begin, and make the claim."""
        assert not can_undo  # its requests have no caller, like those of functions
        (statement,) = claim
        return (yield from Call(self._begin, tuple(statement.values)))

    def _begin(self, swap: Swap, wait_ms: int) -> Doing[bool]:
        return Doing(self._claim(swap, wait_ms))

    def _claim(self, swap: Swap, wait_ms: int) -> Generator[Pause, Any, bool]:
        until_ms = self._process.now_ms() + wait_ms
        pause_ms = max(1.0, self._policy.wait_ms / LOOKS_PER_WAIT)
        claim = functools.partial(self._database.claim, self.transaction, swap)
        kind = yield from self._asked(claim)
        while kind is ErrorKind.LOCKED and self._process.now_ms() < until_ms:
            yield pause_ms
            kind = yield from self._asked(claim)
        if kind is ErrorKind.LOCKED:
            raise RowLocked
        return kind is None

    def end(self, completion: Statement, *, undo: bool) -> Flow[None]:
        """Complete the claim, and commit."""
        assert not undo
        yield from Call(self._end, tuple(completion.values))

    def _end(self, swap: Swap) -> Doing[None]:
        return Doing(self._commit(swap))

    def _commit(self, swap: Swap) -> Generator[Pause, Any, None]:
        commit = functools.partial(self._database.commit, self.transaction, swap)
        if not (yield from self._asked(commit)):
            raise ConnectionResetError("the connection is lost")

    def rollback(self) -> Flow[None]:
        """Roll back; the message to the database takes its time."""
        yield from Call(self._abort)

    def _abort(self) -> None:
        if self._process.is_alive:  # the database notices a dead process by itself
            delay_ms = self._store.delay_ms()
            self._process.world.later(delay_ms, self._database.abort, self.transaction)

    def charge(self, _claim: Record, response: bytes) -> Generator[Pause, Any, bytes]:
        """The handler's effect: a write in the same transaction."""
        write = functools.partial(self._database.write, self.transaction, response)
        is_written = yield self._store.ask(write, is_repeatable=False)
        if not is_written:
            raise StoreUnavailable("the connection is lost")
        return response

    def _asked(self, act: Any) -> Generator[Pause, Any, Any]:
        try:
            return (yield self._store.ask(act, is_repeatable=False))
        except StoreUnavailable as error:
            raise ConnectionResetError(str(error)) from None


class SimulatedAccess:
    """Connections for the tasks of one process."""

    def __init__(self, served: ServedRequest) -> None:
        self._served = served
        self.database = Database(cast("Any", None), STATEMENTS)

    def acquire(self, _source: object) -> tuple[SimulatedConnection, Callable[..., None]]:
        """A new connection, which goes back to no pool."""
        return SimulatedConnection(self._served), lambda *_failure: None

    def run_to_end(self, flow: Flow[None], _timeout_s: float) -> None:
        """Run *flow*, which sends a rollback and does not wait."""
        call(flow)
