"""The actions of an outbox, in a database that several processes may share.

An action is committed before `add` returns. A process takes an action by a lease; if it dies,
another process takes the action when the lease has expired. To send an action twice is harmless:
the server recognises its key. `outbox_sqlite.py` and `outbox_postgres.py` are the databases.

Invariant: `calls` grows with every lease, so a process whose lease has expired changes nothing
unless it has a definite answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

from coatcheck.core.client.outbox import Entry, State, Verdict, latest_ms
from coatcheck.core.key import redacted
from coatcheck.core.response import SEALED, Response
from coatcheck.errors import Misconfigured, Unreadable
from coatcheck.keyring import KeyRing

logger = logging.getLogger("coatcheck")

Row: TypeAlias = Sequence[Any]


class Rows(NamedTuple):
    """What a statement returned, and how many rows it changed."""

    rows: list[Row]
    changed: int


# Executes a statement, with values for its names such as `:key`.
Execute: TypeAlias = Callable[..., Rows]


class Database(Protocol):
    """Where the table is; *table* and *skips_locked* go into the statements."""

    table: str
    skips_locked: str  # at the end of a query: rows that another process has locked are left out

    def transaction(self, *, writes: bool = True) -> AbstractContextManager[Execute]:
        """A durable transaction; failures of the database are raised as `StoreUnavailable`."""
        ...

    def lock_lane(self, execute: Execute, lane: str) -> None:
        """Until the end of the transaction, no other process adds an action to *lane*."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


SCHEMA = """
create table if not exists {table} (
    id {id},
    key text not null unique,
    sent_key text not null,
    lane text not null,
    method text not null,
    url text not null,
    request {blob} not null,
    memo {blob},
    state text not null default 'pending',
    reason text not null default '',
    submitted_ms bigint not null,
    first_sent_ms bigint,
    due_ms bigint not null,
    lease_until_ms bigint not null default 0,
    hold_until_ms bigint not null default 0,
    calls bigint not null default 0,
    status bigint,
    answer {blob},
    ended_ms bigint
);
create index if not exists {index}_open on {table} (id) where state in ('pending', 'unknown');
create index if not exists {index}_lanes on {table} (lane, id)
    where state in ('pending', 'unknown');
create index if not exists {index}_memos on {table} (id) where memo is not null;
"""

# The next action: the first of its lane, because the actions of a lane are sent in their order. An
# action whose outcome is unknown holds its lane back, for a limited time: the distance from its end
# counts, so that a clock that was set back does not make it years.
_NEXT = """
select id, key, sent_key, lane, method, url, request, state, submitted_ms, first_sent_ms, calls + 1
from {table} as head
where state in ('pending', 'unknown')
  and (due_ms <= :now_ms or due_ms > :latest_ms)
  and (lease_until_ms <= :now_ms or lease_until_ms > :latest_ms)
  and (
    (state = 'unknown' and :probes)
    or (state = 'pending' and not exists (
      select 1 from {table} as earlier
      where earlier.state in ('pending', 'unknown')
        and earlier.lane = head.lane and earlier.id < head.id
        and (earlier.state = 'pending'
          or earlier.hold_until_ms - earlier.ended_ms > abs(:now_ms - earlier.ended_ms))
    ))
  )
order by id limit 1 {skips_locked}
"""
_LEASE = """
update {table} set lease_until_ms = :until_ms, calls = calls + 1,
  first_sent_ms = case when state = 'pending' then coalesce(first_sent_ms, :now_ms)
                       else first_sent_ms end
where id = :id
"""
_ADD = """
insert into {table} (key, sent_key, lane, method, url, request, memo, submitted_ms, due_ms)
values (:key, :key, :lane, :method, :url, :request, :memo, :now_ms, :now_ms)
on conflict (key) do nothing
"""
_END = """
update {table} set state = :state, reason = :reason, status = :status, answer = :answer,
  due_ms = :now_ms, ended_ms = :now_ms, lease_until_ms = 0, hold_until_ms = :hold_until_ms
where id = :id and sent_key = :sent_key and state in ('pending', 'unknown')
  and (:is_definite or calls = :calls)
"""
_PUT_OFF = """
update {table} set due_ms = :due_ms, reason = :reason, lease_until_ms = 0,
  first_sent_ms = case when :was_sent then first_sent_ms end
where id = :id and state = :state and calls = :calls
"""
_SEND_AGAIN = """
update {table} set state = 'pending', reason = '', sent_key = :sent_key, first_sent_ms = null,
  due_ms = :due_ms, lease_until_ms = 0, status = null, answer = null, ended_ms = null
where id = :id and state in ('pending', 'unknown') and calls = :calls
"""
_RETRY = """
update {table} set state = 'pending', reason = '', sent_key = coalesce(:sent_key, sent_key),
  first_sent_ms = case when :is_new then null else first_sent_ms end,
  due_ms = :now_ms, lease_until_ms = 0, status = null, answer = null, ended_ms = null
where key = :key and state in ('refused', 'unknown') and lease_until_ms <= :now_ms
"""
_DISCARD = """
delete from {table} where key = :key and state <> 'done' and lease_until_ms <= :now_ms
"""
_FORGET = "delete from {table} where state = 'done' and memo is null and ended_ms < :before_ms"
_LISTED = """
select key, state, reason, status, method, url, lane, submitted_ms, calls from {table}
"""
_STORED = """
select key, state, reason, status, method, url, lane, submitted_ms, calls, request, answer, memo
from {table}
"""


class Stored(NamedTuple):
    """What the outbox has of one action; listings have no *headers*, *body* and *answer*."""

    key: str
    state: State
    reason: str
    status: int | None  # of the last answer
    method: str
    url: str
    lane: str
    submitted_ms: int
    calls: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    answer: Response | None = None
    memo: Any = None  # of an optimistic action


class OutboxStore:
    """The actions in *database*; with a *keyring* their requests and answers are encrypted."""

    def __init__(self, database: Database, keyring: KeyRing | None = None) -> None:
        self._database = database
        self._keyring = keyring
        self.close = database.close

    def _statement(self, text: str) -> str:
        database = self._database
        return text.format(table=database.table, skips_locked=database.skips_locked)

    def _run(self, text: str, **values: object) -> Rows:
        with self._database.transaction() as execute:
            return execute(self._statement(text), **values)

    def _rows(self, text: str, **values: object) -> list[Row]:
        with self._database.transaction(writes=False) as execute:
            return execute(self._statement(text), **values).rows

    def add(self, entry: Entry, memo: object = None) -> None:
        """
        Store an action; one with the same key, which is the same action, stays as it is.

        Raises `Misconfigured` if the action with that key is another one.
        """
        values = {
            "key": entry.key,
            "lane": entry.lane,
            "method": entry.method,
            "url": entry.url,
            "request": self._packed(entry.key, "request", entry.headers, entry.body),
            "memo": None if memo is None else self._packed(entry.key, "memo", memo, b""),
        }
        with self._database.transaction() as execute:
            self._database.lock_lane(execute, entry.lane)
            statement = self._statement(_ADD)
            is_new = execute(statement, **values, now_ms=entry.submitted_ms).changed > 0
        if is_new:
            return
        known = self.get(entry.key)
        if known is not None and (known.method, known.url, known.body) != (
            *(entry.method, entry.url),
            entry.body,
        ):
            raise Misconfigured(
                f"the outbox has another action with this key or reference: {known.method} "
                f"{known.url}; give each action a reference of its own"
            )

    def take(self, now_ms: int, lease_ms: int, *, probes: bool) -> Entry | None:
        """The next action that is due, with a lease; *probes*: also one that is unknown."""
        until_ms = now_ms + lease_ms
        times = {"now_ms": now_ms, "latest_ms": latest_ms(now_ms, lease_ms)}
        while True:
            with self._database.transaction() as execute:
                found = execute(self._statement(_NEXT), **times, probes=probes).rows
                if not found:
                    return None
                execute(self._statement(_LEASE), id=found[0][0], now_ms=now_ms, until_ms=until_ms)
            id, key, sent_key, lane, method, url, request, *rest = found[0]
            entry = Entry(id, key, sent_key, lane, method, url, (), b"", *rest)
            try:
                pairs, body = self._unpacked(key, "request", request)
            except Unreadable as error:  # it waits for the right key ring; the others do not
                logger.warning("coatcheck: the action %s is not sent: %s", redacted(key), error)
                was_sent = entry.first_sent_ms is not None
                self.put_off(entry, Verdict(entry.state, str(error), was_sent), until_ms)
                continue
            return entry._replace(headers=_pairs(pairs), body=body)

    def end(
        self,
        entry: Entry,
        verdict: Verdict,
        answer: Response | None,
        *,
        now_ms: int,
        hold_until_ms: int,
    ) -> None:
        """Store an outcome: a definite one from any process, another with the lease only."""
        packed = None
        if answer is not None:
            pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in answer.headers]
            packed = self._packed(entry.key, "answer", pairs, answer.body)
        self._run(
            _END,
            **_of(entry, "id", "sent_key", "calls"),
            state=verdict.state,
            reason=_storable(verdict.reason),
            answer=packed,
            status=None if answer is None else answer.status,
            is_definite=verdict.state in ("done", "refused"),
            now_ms=now_ms,
            hold_until_ms=hold_until_ms,
        )

    def put_off(self, entry: Entry, verdict: Verdict, due_ms: int) -> None:
        """Return the lease; the action is sent again, or looked for again, at *due_ms*."""
        values = _of(entry, "id", "state", "calls")
        reason, was_sent = _storable(verdict.reason), verdict.was_sent
        self._run(_PUT_OFF, **values, due_ms=due_ms, reason=reason, was_sent=was_sent)

    def send_again(self, entry: Entry, sent_key: str, due_ms: int) -> None:
        """Return the lease of an action that has not happened; it is sent with *sent_key*."""
        self._run(_SEND_AGAIN, **_of(entry, "id", "calls"), sent_key=sent_key, due_ms=due_ms)

    def get(self, key: str) -> Stored | None:
        """What is known of the action with this *key*."""
        rows = self._rows(f"{_STORED} where key = :key", key=key)
        return self._stored(rows[0]) if rows else None

    def state_of(self, key: str) -> State | None:
        """The state of the action with this *key*; None if there is none."""
        rows = self._rows("select state from {table} where key = :key", key=key)
        return rows[0][0] if rows else None

    def dead(self) -> list[Stored]:
        """The actions that ended otherwise than done, the oldest first."""
        where = "where state in ('refused', 'unknown') order by id"
        rows = self._rows(f"{_STORED} {where}")
        return [self._stored(row) for row in rows]

    def listed(self, *, with_all: bool) -> list[Stored]:
        """The same, or *with_all* actions, without what may be encrypted."""
        where = "" if with_all else "where state in ('refused', 'unknown')"
        rows = self._rows(f"{_LISTED} {where} order by id")
        return [Stored(*row) for row in rows]

    def retry(
        self, key: str, now_ms: int, *, sent_key: str | None = None, is_new: bool = False
    ) -> bool:
        """
        Send a dead action again; False if there is none.

        With *sent_key*, if there is one; *is_new*: it has not happened, so its age does not count.
        """
        changed = self._run(_RETRY, key=key, now_ms=now_ms, sent_key=sent_key, is_new=is_new)
        return changed.changed > 0

    def discard(self, key: str, now_ms: int) -> bool:
        """Delete an action that is neither done nor being sent; False if there is none."""
        return self._run(_DISCARD, key=key, now_ms=now_ms).changed > 0

    def forget(self, before_ms: int) -> int:
        """Delete the actions that were done before *before_ms*; returns their number."""
        return self._run(_FORGET, before_ms=before_ms).changed

    def with_memo(self) -> list[Stored]:
        """The optimistic actions that are not settled, the oldest first."""
        rows = self._rows(f"{_STORED} where memo is not null order by id")
        return [self._stored(row) for row in rows]

    def clear_memo(self, key: str) -> None:
        """The optimistic action with this *key* is settled."""
        self._run("update {table} set memo = null where key = :key", key=key)

    # ------------------------------------------------------------------------------ the values

    def _stored(self, row: Row) -> Stored:
        *columns, request, packed, packed_memo = row
        plain = Stored(*columns)
        key, answer, memo = plain.key, None, None
        pairs, body = self._unpacked(key, "request", request)
        if packed is not None:
            headers, content = self._unpacked(key, "answer", packed)
            encoded = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
            answer = Response(plain.status or 0, encoded, content)
        if packed_memo is not None:
            memo, _ = self._unpacked(key, "memo", packed_memo)
        return plain._replace(headers=_pairs(pairs), body=body, answer=answer, memo=memo)

    def _packed(self, key: str, name: str, head: object, body: bytes) -> bytes:
        """A line of JSON, which never begins like an encrypted value, and *body*."""
        packed = json.dumps(head).encode() + b"\n" + body
        return (
            packed if self._keyring is None else self._keyring.encrypt(packed, _context(key, name))
        )

    def _unpacked(self, key: str, name: str, packed: bytes) -> tuple[Any, bytes]:
        if packed[:1] == b"%c" % SEALED:
            if self._keyring is None:
                raise Unreadable("the outbox is encrypted: open it with keyring=")
            packed = self._keyring.decrypt(packed, _context(key, name))
        head, _, body = bytes(packed).partition(b"\n")
        return json.loads(head), body


def _of(entry: Entry, *names: str) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in names}


def _storable(text: str) -> str:
    """*text* without what no database stores: surrogates, and the character 0."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")


def _pairs(pairs: Iterable[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in pairs)


def _context(key: str, name: str) -> bytes:
    """What is authenticated with an encrypted value: it cannot be copied to another action."""
    return f"outbox {name} {key}".encode()


def open_outbox(
    url: str, keyring: KeyRing | None = None, *, must_exist: bool = False
) -> OutboxStore:
    """The outbox that *url* names: `sqlite:///outbox.db` or `postgresql://host/database`."""
    # Imported when needed: each has a driver of its own.
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from coatcheck.client.outbox_sqlite import SqliteDatabase  # noqa: PLC0415 - see above

        return OutboxStore(SqliteDatabase(url, must_exist=must_exist), keyring)
    if scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        from coatcheck.client.outbox_postgres import PostgresDatabase  # noqa: PLC0415 - see above

        return OutboxStore(PostgresDatabase(url, must_exist=must_exist), keyring)
    raise Misconfigured(
        f"an outbox is sqlite:///outbox.db or postgresql://host/database, not {scheme}:"
    )
