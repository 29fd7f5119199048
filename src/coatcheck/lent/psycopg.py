"""Connections of psycopg, for threads and for event loops.

What we say ourselves goes in two journeys: `begin` with the claim, and the end with `commit`. The
driver would make four of them, and a journey costs more than what is said there. So each is a
pipeline, of statements that the session keeps. Whatever the handler says goes the driver's own way;
so does all that we say where the application lets nothing be kept, as behind a pooler.

Invariant: a commit is sent only behind an end that fails unless it finds its claim.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from psycopg import AsyncCursor, Cursor, Pipeline
from psycopg.abc import PQGen
from psycopg.errors import DivisionByZero, Error, InvalidSqlStatementName, error_from_result
from psycopg.generators import execute, send
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from coatcheck.errors import NotCommitted
from coatcheck.lent.asynchronous import with_dollars
from coatcheck.lent.contract import AsyncOneByOne, InTransaction, OneByOne
from coatcheck.lent.psycopg_answers import answered, heard_out
from coatcheck.lent.psycopg_values import encoded, formats_of, in_ascii
from coatcheck.stores.ledger import Dialect, Statement
from coatcheck.stores.postgres_ledger import OwnAsyncConnection, OwnConnection

_HAS_PIPELINES = Pipeline.is_supported()
# 1 s: what was left running is mostly short, and who asked waits for us.
_BUSY_S_MAX = 1.0
_NUMBERS = count(1)
# What a session keeps of ours: texts, and their names there.
_KEPT: WeakKeyDictionary[Any, dict[str, bytes]] = WeakKeyDictionary()


_BUSY = "the handler has left a statement running on its connection, or a stream() half-read"


class _Saying(NamedTuple):
    """A statement as it is sent."""

    text: str
    values: Sequence[bytes | None] = ()
    formats: Sequence[int] = ()
    is_kept: bool = True


_Said: TypeAlias = tuple[list[PGresult], Error | None]

_BEGIN = _Saying("begin")
_COMMIT = _Saying("commit")
# Where to go back to when the session turns out to have forgotten what it kept, and how. When the
# handler rolls back a savepoint, the driver may have the session forget everything.
_MARK = _Saying("savepoint coatcheck", is_kept=False)
_BACK = _Saying("rollback to coatcheck", is_kept=False)


class _Psycopg:
    """What both have in common: all but the waiting."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection of either kind
        self.handle = handle
        self._is_speaking = False  # in a pipeline of our own
        self._is_dropped = False  # its handler wanted to close it

    def _drop(self) -> None:
        """End the session, and all that is open in it: to `close` it may mean to give it back."""
        self.handle.pgconn.finish()

    def is_closed(self) -> bool:
        """Its handler has closed it, or left its block."""
        return self._is_dropped or (self.handle.closed and not self.handle.broken)

    def _stay(self) -> None:
        """
        Have `close` end the session until our end.

        A pool may take it for giving back, and lend to somebody else what we have to roll back.
        """
        if getattr(getattr(self.handle, "_pool", None), "close_returns", False):
            self.handle.close = self._close

    def _close(self) -> Any:  # noqa: ANN401 - awaited in async code
        raise NotImplementedError

    def _closed_by_handler(self) -> None:
        self._is_dropped = True
        self._drop()

    def _go(self) -> None:
        """Be as it was lent."""
        vars(self.handle).pop("close", None)

    def _be_patient(self, statement: Statement) -> None:
        """Limit what a claim may take, and nothing else, on a connection of the store's own."""
        if isinstance(self.handle, (OwnConnection, OwnAsyncConnection)):
            self.handle.patience_s = statement.patience_s

    def _may_begin(self) -> bool:
        """We may begin in the driver's place, which would say no more than that."""
        handle = self.handle
        if handle.pgconn.transaction_status:
            raise InTransaction
        if self._is_in_pipeline():
            raise InTransaction("in a pipeline")
        levels = (handle.isolation_level, handle.read_only, handle.deferrable)
        return self._may_keep() and (handle.autocommit or levels == (None, None, None))

    def _may_end(self) -> bool:
        """We may commit in the driver's place: a transaction is open, and not broken."""
        if self._is_in_pipeline():
            raise NotCommitted("the handler has left a pipeline open; leave it before the end")
        is_open = self.handle.pgconn.transaction_status == TransactionStatus.INTRANS
        return is_open and self._may_keep()

    def _may_keep(self) -> bool:
        """The session may keep what we say."""
        return _HAS_PIPELINES and self.handle.prepare_threshold is not None

    def _is_in_pipeline(self) -> bool:
        """
        Somebody else's pipeline is open, in which no answer can be told from another.

        Nothing is known of a statement before the next sync; and once one has failed, the driver
        may take the answer to one for that to the next.
        """
        is_in_pipeline: bool = self.handle.pgconn.pipeline_status != PipelineStatus.OFF
        return is_in_pipeline and not self._is_speaking

    def _begun(self, claim: Statement) -> PQGen[int]:
        """Begin, and execute *claim*; how many rows it affected."""
        sayings = (_BEGIN, self._saying_of(claim.text, claim))
        answers, fault = yield from self._said(sayings)
        if isinstance(fault, InvalidSqlStatementName):
            if self.handle.pgconn.transaction_status:
                self.handle.pgconn.send_query(b"rollback")
                yield from execute(self.handle.pgconn)
            answers, fault = yield from self._said_anew(sayings)
        if fault is not None:
            raise fault
        return answers[-1].command_tuples or 0

    def _ended(self, end: Statement) -> PQGen[bool]:
        """Execute *end*, and commit where it affected one row; whether it did."""
        saying = self._saying_of(_or_fail(end.text), end)
        answers, fault = yield from self._said((_MARK, saying, _COMMIT))
        if isinstance(fault, InvalidSqlStatementName):
            answers, fault = yield from self._said_anew((_BACK, saying, _COMMIT))
        if fault is None:
            return True
        is_of_end = answers[-1].status == ExecStatus.PIPELINE_ABORTED
        if is_of_end and isinstance(fault, DivisionByZero):
            return False
        raise fault

    def _saying_of(self, text: str, statement: Statement) -> _Saying:
        """*text*, its bytes as they are, and all else as text: no type need be known."""
        try:
            values = encoded(statement.values)
        except UnicodeEncodeError:
            text, spelled = in_ascii(text, statement.values)
            values = encoded(spelled)
        return _Saying(text, values, formats_of(text))

    def _said_anew(self, sayings: Sequence[_Saying]) -> PQGen[_Said]:
        """The same to a session that was told to forget what it kept."""
        _KEPT.pop(self.handle, None)
        return (yield from self._said(sayings))

    def _said(self, sayings: Sequence[_Saying]) -> PQGen[_Said]:
        """Say all that in one journey; the answers to each step of it, and the first error."""
        pgconn = self.handle.pgconn
        pgconn.enter_pipeline_mode()
        self._is_speaking = True
        steps = self._send(sayings)
        pgconn.pipeline_sync()
        yield from send(pgconn)
        answers = yield from _heard(pgconn)
        pgconn.exit_pipeline_mode()
        self._is_speaking = False
        if len(steps) > len(sayings):  # some of it is new to the session
            both = zip(steps, answers, strict=True)
            kept = [step for step, answer in both if step and answer.status in _DONE]
            _KEPT[self.handle].update(kept)
        for answer in answers:
            if answer.status not in _DONE:
                return answers, error_from_result(answer, encoding=self.handle.info.encoding)
        return answers, None

    def _send(self, sayings: Sequence[_Saying]) -> list[tuple[str, bytes] | None]:
        """Send *sayings*; for each step, what the session keeps from then on."""
        pgconn, kept = self.handle.pgconn, _KEPT.get(self.handle)
        if kept is None:
            kept = _KEPT[self.handle] = {}
        steps: list[tuple[str, bytes] | None] = []
        for text, values, formats, is_kept in sayings:
            if not is_kept:
                pgconn.send_query_params(text.encode(), None)
            else:
                name = kept.get(text)
                if name is None:
                    name = _new_name(text)
                    pgconn.send_prepare(name, with_dollars(text).encode(self.handle.info.encoding))
                    steps.append((text, name))
                pgconn.send_query_prepared(name, values, formats)
            steps.append(None)
        return steps


def _heard(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """The answers to each step of what was said; all of them mostly come at once."""
    answers: list[PGresult] = []
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):  # else only some time has passed
                pgconn.consume_input()
        answer = pgconn.get_result()
        if answer is not None:  # as between two steps
            if answer.status == _OVER:
                return answers
            answers.append(answer)


# Numbers, because that is what an answer has.
_OVER = int(ExecStatus.PIPELINE_SYNC)
_DONE = (int(ExecStatus.COMMAND_OK), int(ExecStatus.TUPLES_OK))


def _new_name(text: str) -> bytes:
    """A name for *text* that no session has given to anything else, whoever it was shared with."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"coatcheck_{digest}_{next(_NUMBERS)}".encode()


@lru_cache(maxsize=64)
def _or_fail(update: str) -> str:
    """What executes *update*, and fails by a division where it affects no row."""
    return f"with ended as ({update} returning 1) select 1 / count(*) from ended"  # noqa: S608 - a store's own


class PsycopgLent(_Psycopg, OneByOne):
    """A `psycopg.Connection`."""

    def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        may_begin = self._may_begin()
        self._stay()
        if not may_begin:
            return super().begin(claim)
        with self.handle.lock:
            self._be_patient(claim)
            affected: int = self.handle.wait(self._begun(claim))
            return affected

    def start(self) -> None:
        """Begin; the first statement does it by itself, unless it commits by itself, too."""
        if self.handle.autocommit:
            self.handle.execute("begin")

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        self._be_patient(statement)
        with Cursor(self.handle) as cursor:  # the application's own may have other marks
            text, values = in_ascii(statement.text, statement.values)
            cursor.execute(text.encode(), values)
            return cursor.rowcount

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if self._is_busy():
            raise NotCommitted(_BUSY)
        if not self._may_end():
            is_ended = super().end(statement)
        else:
            with self.handle.lock:
                is_ended = self.handle.wait(self._ended(statement))
        if is_ended:
            self._go()
        return is_ended

    def _close(self) -> None:
        self._closed_by_handler()

    def commit(self) -> None:
        """Commit."""
        self.handle.commit()

    def rollback(self) -> None:
        """Undo; where a pipeline or a statement was left open, by ending the connection."""
        self._go()
        if self._is_in_pipeline() or self._is_busy():
            self._drop()
        else:
            self.handle.rollback()

    def _is_busy(self) -> bool:
        """Somebody is still on it; a `stream()` that is half-read is, until it is forgotten."""
        lock = self.handle.lock
        if not lock.locked():
            return False
        if is_free := lock.acquire(timeout=_BUSY_S_MAX):
            lock.release()
        return not is_free


class PsycopgAsyncLent(_Psycopg, AsyncOneByOne):
    """A `psycopg.AsyncConnection`; differs from the other in the words that wait."""

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        may_begin = self._may_begin()
        self._stay()
        if not may_begin:
            return await super().begin(claim)
        async with self.handle.lock:
            self._be_patient(claim)
            return await answered(self.handle, self._begun(claim))

    async def start(self) -> None:
        """Begin; the first statement does it by itself, unless it commits by itself, too."""
        if self.handle.autocommit:
            await self.handle.execute("begin")

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        self._be_patient(statement)
        async with AsyncCursor(self.handle) as cursor:  # as above
            text, values = in_ascii(statement.text, statement.values)
            await cursor.execute(text.encode(), values)
            return cursor.rowcount

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        if await self._is_busy():
            raise NotCommitted(_BUSY)
        if not self._may_end():
            is_ended = await super().end(statement)
        else:
            async with self.handle.lock:
                is_ended = await answered(self.handle, self._ended(statement))
        if is_ended:
            self._go()
        return is_ended

    async def _close(self) -> None:
        self._closed_by_handler()

    async def commit(self) -> None:
        """Commit."""
        await self.handle.commit()

    async def rollback(self) -> None:
        """Undo; as above."""
        self._go()
        if self._is_in_pipeline() or await self._is_busy():
            self._drop()
        else:
            await heard_out(self.handle)
            await self.handle.rollback()

    async def _is_busy(self) -> bool:
        """As above; one that nobody knows any more is ended by the event loop, a little later."""
        lock = self.handle.lock
        if not lock.locked():
            return False
        try:
            await asyncio.wait_for(lock.acquire(), _BUSY_S_MAX)
        except TimeoutError:
            return True
        lock.release()
        return False
