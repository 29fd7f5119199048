"""The PostgreSQL store: records in a table of the application's own database, or of another one.

Threads share four connections (write, read, search, maintenance), so that none of these waits for
another. An event loop has connections of its own (`async_backend.py`).

Reads go to the primary as well: connections are opened only to a server that accepts writes, and
closed when it has become read-only. An acknowledged swap survives what a commit survives on that
server; with `synchronous_commit` and a synchronous standby, that includes the loss of the primary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import (
    SWEEP_BATCH,
    AsyncBackend,
    Finding,
    Page,
    Query,
    compact_swap,
    page_of,
)
from coatcheck.stores.migration import Migration, migration_of
from coatcheck.stores.postgres import schema as schemas
from coatcheck.stores.postgres import statements
from coatcheck.stores.postgres.async_backend import PostgresBackend
from coatcheck.stores.postgres.connection import (
    PLAN_WITH_INDEX,
    PostgresConnection,
    is_direct,
    search,
)
from coatcheck.stores.postgres.doctor import check_settings, try_writes
from coatcheck.stores.postgres.schema import Names
from coatcheck.stores.postgres.swap import RecordTable
from coatcheck.stores.postgres.transaction import transaction_statements_for
from coatcheck.stores.postgres.url import TIMEOUT_S, asyncpg_options, conninfo_of, parse_url
from coatcheck.stores.record_counts import RecordCount
from coatcheck.stores.registry import POSTGRES
from coatcheck.stores.search_timeout import search_limit_s

logger = logging.getLogger("coatcheck")

_NOW_MS = "select (extract(epoch from clock_timestamp()) * 1000)::bigint"


class PostgresStore:
    """
    Records in PostgreSQL.

    *conninfo* is a URL or connection string of libpq. Without *schema*, our tables are in the
    first schema of the search path. *timeout_s* limits connecting, and each statement.
    """

    info = POSTGRES

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
        self.is_compact = compact
        self._table = RecordTable(names.records, compact=compact)
        self._timeout_s = timeout_s
        conninfo = conninfo_of(conninfo, timeout_s)
        self._maintenance = PostgresConnection(conninfo, timeout_s)
        try:
            self._maintenance.run(
                lambda connection: schemas.migrate(connection, names, create=create)
            )
            for finding in self._check_settings():
                if finding.level != "ok":
                    logger.warning("coatcheck: postgresql: %s", finding.message)
            prepares = self._maintenance.run(is_direct)
        except BaseException:
            self._maintenance.close()
            raise
        self._async_options = asyncpg_options(conninfo, PLAN_WITH_INDEX if prepares else None)
        self._writer = PostgresConnection(conninfo, timeout_s, writes=True, prepares=prepares)
        self._reader = PostgresConnection(conninfo, timeout_s, prepares=prepares)
        self._searcher = PostgresConnection(conninfo, timeout_s)
        plain = transaction_statements_for(
            conninfo, names, timeout_s, prepares=prepares, may_create=create
        )
        self.transaction_statements = plain.over(compact_swap) if compact else plain

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> PostgresStore:
        """Open `postgresql://user@host/database`; `url.py` has the options beside libpq's."""
        conninfo, options = parse_url(url)
        return cls(conninfo, create=create, **options)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Create the tables in the database at *url*, or upgrade them."""
        conninfo, options = parse_url(url)
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        names = Names(options.get("schema", ""))
        with closing(PostgresConnection(conninfo_of(conninfo, timeout_s), timeout_s)) as shared:
            if only_look:
                found = shared.run(lambda connection: schemas.known_version(connection, names))
            else:
                found = shared.run(
                    lambda connection: schemas.migrate(connection, names, create=True)
                )
        what = f"postgresql: {names.records}"
        return migration_of(what, found, len(schemas.MIGRATIONS), only_look=only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        if not swaps:
            return []
        return self._writer.run_flow(self._table.swap(swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Read records, in the order of *ids*."""
        return self._reader.run_flow(self._table.get(ids))

    def async_backend(self) -> AsyncBackend:
        """
        Return access for the running event loop.

        Raises NotImplementedError if the URL demands something that only libpq can do.
        """
        if self._async_options is None:
            raise NotImplementedError
        return PostgresBackend(self._table, self._async_options, self._timeout_s)

    def find(self, query: Query) -> Page:
        """Find records for operators."""
        rows = self._search(*statements.find(query, self._table.statements.select))
        return page_of(map(statements.record_of, rows), query)

    def count_records(self) -> Sequence[RecordCount]:
        """Count records by state and label, in one statement that reads no response."""
        return [
            *map(statements.record_count_of, self._search(self._table.statements.count_all, ()))
        ]

    def _search(self, statement: str, values: Sequence[object]) -> Sequence[statements.Row]:
        limit_s = search_limit_s(self._timeout_s)
        return self._searcher.run(lambda c: search(c, statement, values, limit_s))

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        statement = self._table.statements.sweep.encode()
        return self._maintenance.run(lambda c: c.execute(statement, (now_ms, limit)).rowcount)

    def check(self) -> Sequence[Finding]:
        """Check the settings of server and table, and try to write a record."""
        findings = self._check_settings()
        if any(finding.level == "error" for finding in findings):
            return findings
        try:
            failed = self._maintenance.run(lambda c: try_writes(c, self._names, self._table))
        except StoreUnavailable as error:
            failed = [Finding("error", str(error))]
        return [*failed, *(finding for finding in findings if finding.level != "ok" or not failed)]

    def _check_settings(self) -> list[Finding]:
        try:
            return self._maintenance.run(lambda c: check_settings(c, self._names))
        except StoreUnavailable as error:
            return [Finding("error", str(error))]

    def now_ms(self) -> int:
        """Read the server's clock."""
        ((now_ms,),) = self._reader.run(lambda connection: connection.fetch(_NOW_MS))
        return int(now_ms)

    def close(self) -> None:
        """Close the connections."""
        self._writer.close()
        self._reader.close()
        self._maintenance.close()
        self._searcher.close()
