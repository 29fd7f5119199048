"""The PostgreSQL store: records in a table of the application's own database, or of one for them.

One connection writes, one reads, one searches, one is for the doctor and the sweep, so that none of
them waits for another. An event loop has connections of its own (`postgres_wire.py`).

Reads go to the primary: the connection asks for a server that writes, and is dropped when its
server has become one that only reads. What a swap has acknowledged survives what a commit survives
on that server; with `synchronous_commit` and a synchronous standby, the loss of the primary too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from coatcheck.core.record import Record, Swap
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import postgres_rows as rows
from coatcheck.stores import postgres_schema
from coatcheck.stores.contract import SWEEP_BATCH, Bell, Finding, Page, Query, Wire
from coatcheck.stores.declared import POSTGRES
from coatcheck.stores.migration import Migration
from coatcheck.stores.postgres_bell import PostgresBell
from coatcheck.stores.postgres_doctor import findings_of, tried
from coatcheck.stores.postgres_ledger import ledger_for
from coatcheck.stores.postgres_link import Link, searched
from coatcheck.stores.postgres_schema import Names, known_version, prepare
from coatcheck.stores.postgres_talk import Talk
from coatcheck.stores.postgres_wire import PostgresWire
from coatcheck.stores.searching import search_limit_s
from coatcheck.stores.url import seconds_of

logger = logging.getLogger("coatcheck")

# 5 s: thousands of round trips. Who has waited that long is better told so.
TIMEOUT_S = 5.0


class PostgresStore:
    """
    Records in PostgreSQL.

    Args:
        conninfo: where the database is: a URL or what else libpq understands.
        schema: where our tables are; without it, the first one of the search path.
        compact: keep only digests; label, scope and key are stored empty.
        timeout_s: how long to wait for the server, each time.
        create: make our tables where they are missing.
    """

    declared = POSTGRES

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str = "",
        compact: bool = False,
        timeout_s: float = TIMEOUT_S,
        create: bool = True,
    ) -> None:
        self._names = names = Names(schema)
        self._statements = rows.statements_for(names.records)
        self._talk = Talk(names.records, compact=compact)
        self._where = where = _conninfo(conninfo, timeout_s)
        self._timeout_s = timeout_s
        self.ledger = ledger_for(where, names.records, timeout_s, compact=compact)
        self._new_bell = partial(PostgresBell, where, names.records, timeout_s)
        self._writer = Link(where, timeout_s, writes=True, prepares=True)
        self._reader = Link(where, timeout_s, prepares=True)
        self._keeper = Link(where, timeout_s)
        self._search_s = search_limit_s(timeout_s)
        self._finder = Link(where, timeout_s)
        try:
            self._keeper.run(lambda connection: prepare(connection, names, create=create))
            for finding in self._found():  # a store that could forget says so when it is opened
                if finding.level != "ok":
                    logger.warning("postgresql: %s", finding.message)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> PostgresStore:
        """
        The store that *url* names: `postgresql://user@host/database`.

        Options: `?schema=name`, `?compact=1`, `?timeout=5s`; all others are libpq's own, such as
        `sslmode`.
        """
        conninfo, options = _named_by(url)
        return cls(conninfo, create=create, **options)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Make the tables in the database that *url* names, or bring them up to date."""
        conninfo, options = _named_by(url)
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        names = Names(options.get("schema", ""))
        link = Link(_conninfo(conninfo, timeout_s), timeout_s)
        try:
            if only_look:
                found = link.run(lambda connection: known_version(connection, names))
            else:
                found = link.run(lambda connection: prepare(connection, names, create=True))
        finally:
            link.close()
        wanted = len(postgres_schema.MIGRATIONS)
        what = f"postgresql: {names.records}"
        return Migration(what, found, wanted, found < wanted and not only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        if not swaps:
            return []
        return self._writer.talk(self._talk.swap(swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*."""
        return self._reader.talk(self._talk.get(ids))

    def wire(self) -> Wire:
        """Connections for the running event loop, which must be able to watch sockets."""
        return PostgresWire(self._talk, self._where, self._timeout_s)

    def find(self, query: Query) -> Page:
        """Records for operators, in id order."""
        statement, values = rows.find(query, self._statements.select)
        found = self._finder.run(
            lambda connection: searched(connection, statement, values, self._search_s)
        )
        records = [rows.record_of(row) for row in found[: query.limit]]
        return Page(records, records[-1].id if len(found) > query.limit else None)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        values = {"now": now_ms, "limit": limit}
        return self._keeper.run(
            lambda connection: connection.execute(self._statements.sweep, values).rowcount
        )

    def check(self) -> Sequence[Finding]:
        """Whether records can be written, and what is acknowledged stays."""
        findings = self._found()
        if any(finding.level == "error" for finding in findings):
            return findings
        try:
            failed = self._keeper.run(lambda c: tried(c, self._names, self._talk))
        except StoreUnavailable as error:
            failed = [Finding("error", str(error))]
        return [*failed, *(finding for finding in findings if finding.level != "ok" or not failed)]

    def _found(self) -> list[Finding]:
        try:
            return self._keeper.run(lambda connection: findings_of(connection, self._names))
        except StoreUnavailable as error:
            return [Finding("error", str(error))]

    def now_ms(self) -> int:
        """The server's clock."""
        statement = b"select (extract(epoch from clock_timestamp()) * 1000)::bigint"
        (now_ms,) = self._reader.run(lambda c: c.execute(statement).fetchone()) or (0,)
        return int(now_ms)

    def bell(self) -> Bell:
        """A connection that listens; it will say that it cannot, behind a pooler."""
        return self._new_bell()

    def close(self) -> None:
        """Close the connections."""
        self._writer.close()
        self._reader.close()
        self._keeper.close()
        self._finder.close(patience_s=0)


def _conninfo(given: str, timeout_s: float) -> str:
    """*given* with what keeps us from waiting for ever, or from a server that only reads."""
    try:
        chosen = conninfo_to_dict(given)
    except ProgrammingError as error:
        raise Misconfigured(f"postgresql: {' '.join(str(error).split())}") from error
    defaults: dict[str, Any] = {
        "application_name": "coatcheck",
        "connect_timeout": max(2, round(timeout_s)),  # libpq takes 1 for 2
        "tcp_user_timeout": round(timeout_s * 1_000),
    }
    ours = {
        "client_encoding": "UTF8",  # in which we write and read texts
        "target_session_attrs": "read-write",  # a URL may be one with which others only read
    }
    return make_conninfo(**{**defaults, **chosen, **ours})


def _named_by(url: str) -> tuple[str, _Options]:
    """What libpq understands of *url*, and what is ours."""
    parts = urlsplit(url)
    options, others = _options(parts.query.replace("+", "%2B"))  # which is no space in libpq's
    query = urlencode(others, quote_via=quote)
    # By hand, because `urlunsplit` takes away the two strokes where there is no host.
    return f"postgresql://{parts.netloc}{parts.path}{'?' if query else ''}{query}", options


class _Options(TypedDict, total=False):
    schema: str
    compact: bool
    timeout_s: float


def _options(query: str) -> tuple[_Options, list[tuple[str, str]]]:
    """What stands behind the question mark of a URL: ours, and libpq's."""
    options: _Options = {}
    others: list[tuple[str, str]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "schema" and value:
            options["schema"] = value
        elif name == "compact" and value in ("0", "1"):
            options["compact"] = value == "1"
        elif name == "timeout":
            options["timeout_s"] = _seconds(value)
        else:
            others.append((name, value))
    return options, others


def _seconds(value: str) -> float:
    seconds = seconds_of("postgresql: timeout", value)
    if seconds <= 0:
        raise Misconfigured(f"postgresql: timeout={value} leaves no time to answer")
    return seconds
