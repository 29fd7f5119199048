"""The MySQL store: MySQL or MariaDB, shared by any number of servers.

How durable an acknowledged write is depends on the server's settings; `check` reads them. Two
connections write, so that the next batch is sent while the server executes the last one. One
reads, one searches for operators, and one is for the sweep and the doctor. A read-only server is
neither written to nor read from. Event loops use the store through threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, compact_swap, page_of
from coatcheck.stores.migration import Migration, migration_of
from coatcheck.stores.mysql import doctor, schema
from coatcheck.stores.mysql import swap as operations
from coatcheck.stores.mysql.connection import Connection, Row, Server, Session, free_one
from coatcheck.stores.mysql.statements import Statements, record_count_of, record_of
from coatcheck.stores.mysql.transaction import transaction_statements_for
from coatcheck.stores.mysql.url import TABLE, parse_url
from coatcheck.stores.record_counts import RecordCount
from coatcheck.stores.registry import MYSQL
from coatcheck.stores.search_timeout import search_limit_s

logger = logging.getLogger("coatcheck")


class MysqlStore:
    """Records in a table of a MySQL or MariaDB database, which may be the application's own."""

    info = MYSQL
    # 32: larger ones cost little less per swap, and the other connection idles while one fills.
    batch_max = 32
    # 2: while the server executes one batch we prepare the next. More would make them smaller.
    in_flight = 2

    def __init__(
        self, server: Server, *, table: str = TABLE, compact: bool = False, create: bool = True
    ) -> None:
        self._server = server
        self._table = table
        self.is_compact = compact
        self._statements = Statements(table)
        statement_bytes_max, is_encrypted = self._open(create=create)
        plain = transaction_statements_for(
            server,
            table,
            statement_bytes_max=statement_bytes_max,
            is_encrypted=is_encrypted,
            may_create=create,
        )
        self.transaction_statements = plain.over(compact_swap) if compact else plain
        key = self._statements.require_primary_key
        self._writers = [Connection(server, on_connect=key) for _ in range(self.in_flight)]
        self._reader = Connection(server)
        self._maintenance = Connection(server)
        self._search_limit_s = search_limit_s(server.timeout_s)
        # Longer than the server's own limit, so that the server ends a search first.
        reply_timeout_s = self._search_limit_s + server.timeout_s
        self._searcher = Connection(server, reply_timeout_s=reply_timeout_s)

    def _open(self, *, create: bool) -> tuple[int, bool]:
        """Check the server and create what is missing; return what transaction mode must know."""
        # Closed again, so that a process that opens a store and then forks has none to pass on.
        with closing(Connection(self._server, is_opening=True)) as connection:
            schema.prepare(connection, self._server, self._table, create=create)
            for level, message in connection.run(self._settings_findings):
                if level != "ok":
                    logger.warning("coatcheck: %s: %s", self._server, message)
            return connection.run(lambda s: (s.statement_bytes_max, s.is_encrypted()))

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> MysqlStore:
        """Open `mysql://user:password@host:3306/database`; `url.py` has the options."""
        server, table, compact = parse_url(url)
        return cls(server, table=table, compact=compact, create=create)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Create or upgrade the tables of the database at *url*."""
        server, table, _ = parse_url(url)
        with closing(Connection(server, is_opening=True)) as connection:
            if only_look:
                found = connection.run(lambda session: schema.known_version(session, table))
            else:
                found = schema.prepare(connection, server, table, create=True)
        return migration_of(
            f"{server}: {table}", found, len(schema.MIGRATIONS), only_look=only_look
        )

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        if not swaps:
            return []
        if self.is_compact:
            swaps = [compact_swap(swap) for swap in swaps]
        return free_one(self._writers).run(lambda s: operations.swap(s, self._statements, swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the records in the order of *ids*; never waits for a lock."""
        return self._reader.run(lambda s: operations.get(s, self._statements, ids))

    def find(self, query: Query) -> Page:
        """Return records for operators."""
        rows = self._search(self._statements.search(query, self._search_limit_s))
        return page_of(map(record_of, rows), query)

    def count_records(self) -> Sequence[RecordCount]:
        """Count records by state and label, in one statement."""
        return [*map(record_count_of, self._search(self._statements.count(self._search_limit_s)))]

    def _search(self, statement: str) -> Sequence[Row]:
        """Return the rows of *statement*, on a connection of its own."""
        # A search may take a minute, and so may the wait for a server that has stopped. So ask it
        # for something simple first, with the usual timeout.
        self._maintenance.run(lambda s: s.read("select 1"))
        limit_s = self._search_limit_s
        return self._searcher.run(lambda s: operations.search(s, statement, limit_s))

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        return self._maintenance.run(
            lambda session: operations.sweep(session, self._statements, now_ms, limit)
        )

    def check(self) -> Sequence[Finding]:
        """Check whether records can be written, and would survive a crash."""
        try:
            findings = self._maintenance.run(self._settings_findings)
            if all(level != "error" for level, _ in findings):
                findings += self._maintenance.run(
                    lambda s: doctor.trial_findings(s, self._statements, self._table)
                )
        except StoreUnavailable as error:
            return [Finding("error", str(error))]
        return [Finding(level, f"{self._server}: {message}") for level, message in findings]

    def _settings_findings(self, session: Session) -> list[Finding]:
        return doctor.settings_findings(session, self._table)

    def now_ms(self) -> int:
        """Return the server's clock."""
        return self._reader.run(doctor.now_ms)

    def close(self) -> None:
        """Close the connections; one that is in use is closed by the thread that uses it."""
        for connection in (*self._writers, self._reader, self._maintenance, self._searcher):
            connection.close()
