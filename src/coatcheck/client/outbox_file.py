"""The file of an outbox: a SQLite database that several processes may share.

An action is committed, with `synchronous=full`, before `add` returns. A process takes an action by
a lease; if it dies, another takes the action when the lease has expired. To send an action twice is
harmless: the server recognises its key.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from coatcheck.core.client.outbox import Entry, State, Verdict
from coatcheck.core.response import Response
from coatcheck.errors import Misconfigured

_SCHEMA = """
create table if not exists outbox (
    id integer primary key autoincrement,
    key text not null unique,
    lane text not null,
    method text not null,
    url text not null,
    headers text not null,
    body blob not null,
    state text not null default 'pending',
    reason text not null default '',
    submitted_ms integer not null,
    first_sent_ms integer,
    due_ms integer not null,
    lease_until_ms integer not null default 0,
    calls integer not null default 0,
    status integer,
    answer_headers text,
    answer_body blob,
    ended_ms integer
);
create index if not exists outbox_lanes on outbox (lane, id) where state in ('pending', 'unknown');
"""
# The next action: the first of its lane, because the actions of a lane are sent in their order. An
# action whose outcome is unknown holds its lane back until an operator decides.
_NEXT = """
select id, key, lane, method, url, headers, body, first_sent_ms, calls + 1
from outbox as head
where state = 'pending' and due_ms <= :now_ms and lease_until_ms <= :now_ms
  and not exists (
    select 1 from outbox as earlier
    where earlier.lane = head.lane and earlier.id < head.id
      and earlier.state in ('pending', 'unknown')
  )
order by id limit 1
"""
_LEASE = """
update outbox set lease_until_ms = :until_ms, calls = calls + 1,
    first_sent_ms = coalesce(first_sent_ms, :now_ms)
where id = :id
"""
# 10 s: a commit takes milliseconds, also with a hundred processes.
_BUSY_S = 10.0


class Stored(NamedTuple):
    """What the file has of one action."""

    key: str
    state: State
    reason: str
    answer: Response | None
    method: str
    url: str
    lane: str


class OutboxFile:
    """The actions in the file that *url* names: `sqlite:///outbox.db`."""

    def __init__(self, url: str) -> None:
        self.path = self.path_of(url)
        with self._connection() as connection:
            connection.execute("pragma journal_mode = wal")
            connection.executescript(_SCHEMA)

    @staticmethod
    def path_of(url: str) -> str:
        """The path of the file; nothing is opened."""
        parts = urlsplit(url)
        path = unquote(parts.path.removeprefix("/"))
        if parts.scheme != "sqlite" or parts.netloc or parts.query or not path:
            raise Misconfigured(f"an outbox is a file: write sqlite:///outbox.db, not {url!r}")
        return path

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # One for each operation: threads and forked processes then share nothing.
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            connection.execute("pragma synchronous = full")
            yield connection
        finally:
            connection.close()

    def add(self, entry: Entry, now_ms: int) -> None:
        """Store an action; one with the same key, which is the same action, stays as it is."""
        with self._connection() as connection:
            connection.execute(
                "insert into outbox (key, lane, method, url, headers, body, submitted_ms, due_ms)"
                " values (?, ?, ?, ?, ?, ?, ?, ?) on conflict (key) do nothing",
                (
                    *(entry.key, entry.lane, entry.method, entry.url),
                    *(json.dumps(entry.headers), entry.body, now_ms, now_ms),
                ),
            )

    def take(self, now_ms: int, lease_ms: int) -> Entry | None:
        """The next action that is due, with a lease; None if there is none."""
        with self._connection() as connection:
            connection.execute("begin immediate")
            row = connection.execute(_NEXT, {"now_ms": now_ms}).fetchone()
            if row is not None:
                values = {"id": row[0], "now_ms": now_ms, "until_ms": now_ms + lease_ms}
                connection.execute(_LEASE, values)
            connection.execute("commit")
        if row is None:
            return None
        id, key, lane, method, url, headers, body, first_sent_ms, calls = row
        pairs = tuple((str(name), str(value)) for name, value in json.loads(headers))
        return Entry(id, key, lane, method, url, pairs, body, first_sent_ms, calls)

    def end(self, entry: Entry, verdict: Verdict, answer: Response | None, now_ms: int) -> None:
        """Store a definite outcome; whichever process has one first."""
        headers = None
        if answer is not None:
            pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in answer.headers]
            headers = json.dumps(pairs)
        with self._connection() as connection:
            connection.execute(
                "update outbox set state = ?, reason = ?, status = ?, answer_headers = ?,"
                " answer_body = ?, ended_ms = ?, lease_until_ms = 0"
                " where id = ? and state = 'pending'",
                (
                    *(verdict.state, verdict.reason, answer and answer.status, headers),
                    *(answer and answer.body, now_ms, entry.id),
                ),
            )

    def put_off(self, entry: Entry, verdict: Verdict, due_ms: int) -> None:
        """Give the lease back; the action is sent again at *due_ms*."""
        with self._connection() as connection:
            connection.execute(
                "update outbox set due_ms = ?, reason = ?, lease_until_ms = 0,"
                " first_sent_ms = case when ? then first_sent_ms end"
                " where id = ? and state = 'pending'",
                (due_ms, verdict.reason, verdict.was_sent, entry.id),
            )

    def get(self, key: str) -> Stored | None:
        """What is known of the action with this *key*."""
        with self._connection() as connection:
            row = connection.execute(f"{_STORED} where key = ?", (key,)).fetchone()
        return None if row is None else _stored(row)

    def dead(self) -> list[Stored]:
        """The actions that ended otherwise than done, the oldest first."""
        where = "where state in ('refused', 'unknown') order by id"
        with self._connection() as connection:
            return [_stored(row) for row in connection.execute(f"{_STORED} {where}")]

    def all(self) -> list[Stored]:
        """All actions, the oldest first."""
        with self._connection() as connection:
            return [_stored(row) for row in connection.execute(f"{_STORED} order by id")]

    def again(self, key: str, now_ms: int) -> bool:
        """Send a dead action again, with its key; False if there is none."""
        with self._connection() as connection:
            done = connection.execute(
                "update outbox set state = 'pending', reason = '', due_ms = ?, status = null,"
                " answer_headers = null, answer_body = null, ended_ms = null"
                " where key = ? and state in ('refused', 'unknown')",
                (now_ms, key),
            )
            return done.rowcount > 0

    def discard(self, key: str) -> bool:
        """Delete a dead action, so that its lane continues; False if there is none."""
        with self._connection() as connection:
            done = connection.execute(
                "delete from outbox where key = ? and state in ('refused', 'unknown')", (key,)
            )
            return done.rowcount > 0

    def forget(self, before_ms: int) -> int:
        """Delete the actions that were done before *before_ms*; returns their number."""
        with self._connection() as connection:
            done = connection.execute(
                "delete from outbox where state = 'done' and ended_ms < ?", (before_ms,)
            )
            return done.rowcount


_STORED = (
    "select key, state, reason, status, answer_headers, answer_body, method, url, lane from outbox"
)


def _stored(row: tuple[str, State, str, int | None, str, bytes, str, str, str]) -> Stored:
    key, state, reason, status, headers, body, method, url, lane = row
    answer = None
    if status is not None:
        pairs = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in json.loads(headers)]
        answer = Response(status, pairs, body)
    return Stored(key, state, reason, answer, method, url, lane)
