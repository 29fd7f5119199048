"""The table of an outbox in PostgreSQL."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from coatcheck.client.outbox_store import SCHEMA, Execute, Rows
from coatcheck.errors import Misconfigured, MissingExtra, StoreUnavailable

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
except ImportError as error:
    raise MissingExtra("postgres", "psycopg") from error

# 5 s: thousands of round trips. A server that takes longer is down for all that a client can tell.
_TIMEOUT_S = 5
# 10 s: another process holds the lock of a lane for one insert, unless it is stopped or cut off.
_LOCK_S = 10
_LOCK_LANE = """
select set_config('lock_timeout', :limit, true), pg_advisory_xact_lock(hashtextextended(:lane, 0))
"""
# Locks of the session are numbers; this one is for making the table.
_SCHEMA_LOCK = 7_143_016_201
_NAME = re.compile(r":([a-z_]+)")


class PostgresDatabase:
    """The database that *url* names; its option `schema=` names where the table is."""

    skips_locked = "for update of head skip locked"

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        self._conninfo, schema = _parsed(url)
        self.table = f"{schema}.coatcheck_outbox" if schema else "coatcheck_outbox"
        self._idle: list[psycopg.Connection[Any]] = []
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._inherited: list[psycopg.Connection[Any]] = []
        weakref.finalize(self, _close_all, self._idle, self._pid)
        with self.transaction() as execute:
            # Asked first: a role without the right to create tables may use one that is there.
            if execute("select to_regclass(:name)::text", name=self.table).rows[0][0] is not None:
                return
            if must_exist:
                raise Misconfigured(f"there is no outbox {self.table} in this database")
            execute("select pg_advisory_xact_lock(:number)", number=_SCHEMA_LOCK)
            if schema:
                execute(f"create schema if not exists {schema}")
            made = SCHEMA.format(
                table=self.table,
                index="coatcheck_outbox",
                id="bigint generated always as identity primary key",
                blob="bytea",
            )
            for statement in made.split(";")[:-1]:
                execute(statement)

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Execute]:  # noqa: ARG002 - reads lock nothing
        """On a connection of the pool; one that may be broken is closed."""
        connection: psycopg.Connection[Any] | None = None
        is_whole = False
        try:
            with ExitStack() as stack:
                connection = self._begun(stack)

                def execute(statement: str, **values: object) -> Rows:
                    assert connection is not None
                    text = _NAME.sub(r"%(\1)s", statement.replace("::", "\0")).replace("\0", "::")
                    cursor = connection.execute(text.encode(), values)
                    rows = cursor.fetchall() if cursor.description else []
                    return Rows(rows, cursor.rowcount)

                yield execute
            is_whole = True
        except psycopg.Error as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise StoreUnavailable(f"the outbox in PostgreSQL cannot be used: {words}") from error
        finally:
            if connection is not None:
                self._returned(connection, is_whole=is_whole)

    def _begun(self, stack: ExitStack) -> psycopg.Connection[Any]:
        """A connection in a transaction of *stack*; one that broke while idle is replaced."""
        while (idle := self._taken()) is not None:
            try:
                stack.enter_context(idle.transaction())
            except psycopg.OperationalError:
                idle.close()
            else:
                return idle
        fresh = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        stack.enter_context(fresh.transaction())
        return fresh

    def _taken(self) -> psycopg.Connection[Any] | None:
        if self._pid != os.getpid():  # of a forked process: the connections are its parent's
            self._inherited += self._idle  # closing them would end the sessions of the parent
            self._idle, self._mutex, self._pid = [], threading.Lock(), os.getpid()
            weakref.finalize(self, _close_all, self._idle, self._pid)
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def _returned(self, connection: psycopg.Connection[Any], *, is_whole: bool) -> None:
        if not is_whole:
            connection.close()
            return
        with self._mutex:
            self._idle.append(connection)

    def lock_lane(self, execute: Execute, lane: str) -> None:
        """Ids then grow in the order of commits, so that no action appears before a later one."""
        execute(_LOCK_LANE, lane=lane, limit=f"{_LOCK_S}s")

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._mutex:
            _close_all(self._idle, self._pid)


def _close_all(idle: list[psycopg.Connection[Any]], pid: int) -> None:
    while idle and pid == os.getpid():
        idle.pop().close()


def _parsed(url: str) -> tuple[str, str]:
    """The connection string of libpq in *url*, and the quoted name of the schema."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
    schema = dict(pairs).get("schema", "")
    rest = urlencode([pair for pair in pairs if pair[0] != "schema"], quote_via=quote)
    bare = f"postgresql://{parts.netloc}{parts.path}{'?' if rest else ''}{rest}"
    try:
        given = conninfo_to_dict(bare)
    except psycopg.ProgrammingError as error:
        raise Misconfigured(f"the URL of the outbox: {' '.join(str(error).split())}") from error
    defaults: dict[str, Any] = {
        "application_name": "coatcheck outbox",
        "connect_timeout": _TIMEOUT_S,
        "tcp_user_timeout": _TIMEOUT_S * 1_000,
    }
    # A standby cannot store actions.
    ours = {"client_encoding": "UTF8", "target_session_attrs": "read-write"}
    conninfo = make_conninfo(**{**defaults, **given, **ours})
    return conninfo, '"' + schema.replace('"', '""') + '"' if schema else ""
