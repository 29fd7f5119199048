"""The ledger of the PostgreSQL store: records written in the application's own transaction (L9).

Beside `postgres.py`. Whoever claims holds a lock by the record's name, for as long as its
transaction is open. Nearly always nobody else has it, and then nothing can be in the way of the
claim. Else it waits for that lock, but not for ever: the limit is set and, where the claim was
made, taken back by the same statement, so that the handler's own statements wait as they always
did; where it was not made, the transaction is rolled back and the limit with it. A server that
does not answer to a claim is given up, on connections of the store's own.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any

import psycopg
from psycopg import BaseConnection

from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.ledger import Ledger, Statement
from coatcheck.stores.postgres_link import NoAnswer, until
from coatcheck.stores.postgres_rows import MARKS, kept_of

# Each is referred to by what it is put before, because PostgreSQL leaves out what nobody refers to.
_LIMITED = """\
with limited as materialized (
  select 0 * length(set_config('coatcheck.lock_timeout', current_setting('lock_timeout'), true))
       + 0 * length(set_config('lock_timeout', %s::text, true)) as zero
), locked as materialized (
  select 1 as one, pg_advisory_xact_lock({}) from limited where zero = 0
) """
_UNLIMITED = (
    " returning set_config('lock_timeout', current_setting('coatcheck.lock_timeout'), true)"
)
# A claim of a new key runs, is the first attempt, and has nothing to show yet.
_NEW = [name for name in MARKS if name not in ("state", "attempt", "progress", "response")]
_new_of = itemgetter(*map([*MARKS].index, _NEW))
# The row is as this transaction, or a savepoint of it, has written it: whatever others have written
# before is older than this transaction. Else the handler has committed, and is in a new one.
_OURS = "age(xmin) <= 0"
_CHANGED = ", ".join(f"{name} = {mark}" for name, mark in MARKS.items() if name != "id")
_WHERE = "id = %s::uuid and version = %s::bigint"
# What else an end changes of its claim; its progress stands already.
_ENDED = ", ".join(f"{name} = {MARKS[name]}" for name in ("version", "age_ms", "response"))
_END = f"state = {COMPLETED}, lease_until_ms = null, {_ENDED}"

_WHO_ANSWERS = b"select pg_backend_pid()"
# 5 times: what psycopg does by itself.
_PREPARED_AFTER = 5


def ledger_for(conninfo: str, table: str, timeout_s: float, *, compact: bool) -> Ledger:
    """The ledger of the store that *conninfo* leads to; *table* is quoted already."""
    writing = _Writing(table, timeout_s, compact=compact)
    return Ledger(
        dialect="postgresql",
        claim=writing.claim,
        change=writing.change,
        connect=partial(_connect, conninfo, timeout_s),
        connect_async=partial(_connect_async, conninfo, timeout_s),
    )


class _Writing:
    """The statements of one table."""

    def __init__(self, table: str, timeout_s: float, *, compact: bool) -> None:
        # Another table's record of the same name has another lock.
        quoted = table.replace("'", "''")
        name = f"%s::bigint # '{quoted}'::regclass::oid::bigint"
        limited = _LIMITED.format(name)
        values = ", ".join(MARKS[name] for name in _NEW)
        insert = f"insert into {table} (state, {', '.join(_NEW)}) select {RUNNING}, {values}"
        self._compact = compact
        self._timeout_s = timeout_s
        self._insert_at_once = (
            f"{insert} where pg_try_advisory_xact_lock({name}) on conflict (id) do nothing"
        )
        self._insert = f"{limited}{insert} from locked on conflict (id) do nothing{_UNLIMITED}"
        replace = f"update {table} set {_CHANGED} where {_WHERE} and (select one from locked) = 1"
        self._replace = f"{limited}{replace}{_UNLIMITED}"
        self._end = f"update {table} set {_END} where {_WHERE} and {_OURS}"

    def claim(self, swap: Swap, wait_ms: int) -> Iterator[Statement]:
        """A claim, of a key that is new or of a record that stands."""
        row = kept_of(_record_of(swap), compact=self._compact)
        name = int.from_bytes(swap.id[:8], "big", signed=True)
        patience_s = self._timeout_s + wait_ms / 1_000
        if swap.expected:
            values = (f"{wait_ms:d}ms", name, *row[1:], row[0], swap.expected)
            yield Statement(self._replace, values, patience_s)
            return
        new = _new_of(row)
        yield Statement(self._insert_at_once, (*new, name), patience_s)
        yield Statement(self._insert, (f"{wait_ms:d}ms", name, *new), patience_s)

    def change(self, swap: Swap) -> Statement:
        """The end of a claim that this transaction has made: nobody else can hold it."""
        record = _record_of(swap)
        assert record.state == COMPLETED
        age_ms = record.version - record.created_ms
        kept = (record.version, None if age_ms == 1 else age_ms, record.response)
        return Statement(self._end, (*kept, swap.id.hex(), swap.expected))


def _record_of(swap: Swap) -> Record:
    assert swap.record is not None
    return swap.record


class _Patient(BaseConnection[Any]):
    """What gives up where an answer takes longer than *patience_s*: it is closed, and of no use."""

    # Of what is waited for next, and of that alone.
    patience_s = inf

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        patience_s, self.patience_s = self.patience_s, inf
        return gen if patience_s == inf else in_time(self, gen, patience_s)


def in_time(
    connection: BaseConnection[Any], gen: Generator[Any, Any, Any], patience_s: float
) -> Generator[Any, Any, Any]:
    """*gen*, but *connection* is closed where it takes longer."""
    try:
        return (yield from until(gen, time.monotonic() + patience_s))
    except NoAnswer as error:
        connection.pgconn.finish()
        raise StoreUnavailable(str(error)) from error


class OwnConnection(_Patient, psycopg.Connection[Any]):
    """A connection of the store's own, to be lent."""

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Do what *gen* does, for a while."""
        return super().wait(self._limited(gen), *args, **kwargs)


class OwnAsyncConnection(_Patient, psycopg.AsyncConnection[Any]):
    """The same for event loops."""

    async def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Do what *gen* does, for a while."""
        return await super().wait(self._limited(gen), *args, **kwargs)


def _connect(conninfo: str, timeout_s: float) -> OwnConnection:
    """A connection that prepares what it sends often, unless there is a pooler in between."""
    connection = OwnConnection.connect(conninfo, prepare_threshold=None)
    try:
        connection.patience_s = timeout_s
        answering = connection.execute(_WHO_ANSWERS).fetchone()
        connection.patience_s = timeout_s
        connection.rollback()
    except BaseException:
        connection.close()
        raise
    connection.prepare_threshold = _threshold(connection.info.backend_pid, answering)
    return connection


async def _connect_async(conninfo: str, timeout_s: float) -> OwnAsyncConnection:
    """The same for event loops."""
    connection = await OwnAsyncConnection.connect(conninfo, prepare_threshold=None)
    try:
        connection.patience_s = timeout_s
        answering = await (await connection.execute(_WHO_ANSWERS)).fetchone()
        connection.patience_s = timeout_s
        await connection.rollback()
    except BaseException:
        await connection.close()
        raise
    connection.prepare_threshold = _threshold(connection.info.backend_pid, answering)
    return connection


def _threshold(greeted_by: int, answering: tuple[Any, ...] | None) -> int | None:
    """Behind a pooler the next transaction may meet a session where the name is not ours."""
    return _PREPARED_AFTER if answering == (greeted_by,) else None
