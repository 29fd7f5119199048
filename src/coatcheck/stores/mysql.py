"""The MySQL store: MySQL or MariaDB, shared by any number of servers.

What a swap has acknowledged survives what the server's settings let it survive; `check` reads
them. Two connections write, so that the next batch is on its way while the server is busy with the
last one; one reads beside them, one searches for operators, one is for the doctor and the sweep. An
event loop has connections of its own (`mysql_wire.py`). A server that is read-only is neither
written to nor read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coatcheck.core.flow import Flow
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import mysql_schema as schema
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Wire
from coatcheck.stores.declared import MYSQL
from coatcheck.stores.migration import Migration
from coatcheck.stores.mysql_flow import Terms
from coatcheck.stores.mysql_ledger import ledger_for
from coatcheck.stores.mysql_line import Address, Line, Lines
from coatcheck.stores.mysql_talk import Talk
from coatcheck.stores.mysql_url import TABLE, named_by
from coatcheck.stores.mysql_wire import MysqlWire
from coatcheck.stores.searching import search_limit_s


class MysqlStore:
    """
    Records in a table of a MySQL or MariaDB database, which may be the application's own.

    Args:
        address: the server, the database in it, and who we are there.
        table: the name of our table in it.
        compact: keep only digests; label, scope and key are stored empty.
        create: make our tables where they are missing.
    """

    declared = MYSQL

    def __init__(
        self, address: Address, *, table: str = TABLE, compact: bool = False, create: bool = True
    ) -> None:
        terms = schema.prepare(address, table, create=create).terms
        self._address = address
        self._table = table
        self._talk = Talk(table, str(address), compact=compact)
        self.ledger = ledger_for(address, table, terms, compact=compact)
        self._writer = Lines(address, self._talk.statements.kept)
        self._reader = Line(address)
        self._keeper = Line(address)
        self._search_s = search_limit_s(address.timeout_s)
        # The server gives up first.
        self._finder = Line(address, reply_s=self._search_s + address.timeout_s)

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> MysqlStore:
        """
        The store that *url* names: `mysql://user:password@host:3306/database`.

        Options: `?table=coatcheck_records`, `?compact=1`, `?timeout=5s`, `?ssl=1` (demand TLS and
        verify it; 0: none), `?ssl_ca=FILE`.
        """
        address, table, compact = named_by(url)
        return cls(address, table=table, compact=compact, create=create)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Make the tables in the database that *url* names, or bring them up to date."""
        address, table, _ = named_by(url)
        if only_look:
            found = schema.version_at(address, table)
        else:
            found, _ = schema.prepare(address, table, create=True)
        wanted = len(schema.MIGRATIONS)
        what = f"{address}: {table}"
        return Migration(what, found, wanted, found < wanted and not only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        if not swaps:
            return []
        return self._writer.run(lambda terms: self._talk.swap(terms, swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; never waits for a lock."""
        return self._reader.run(lambda _: self._talk.get(ids))

    def find(self, query: Query) -> Page:
        """Records for operators, in id order; on a connection where nobody else has to wait."""
        return self._finder.run(lambda _: self._talk.find(query, self._search_s))

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over, some hundreds at a time."""
        taken = 0
        while taken < limit:
            portion = min(limit - taken, SWEEP_BATCH)
            count = self._keeper.run(partial(self._sweep, now_ms, portion))
            taken += count
            if count < portion:
                break
        return taken

    def _sweep(self, now_ms: int, limit: int, _: Terms) -> Flow[int]:
        return self._talk.sweep(now_ms, limit)

    def check(self) -> Sequence[Finding]:
        """Whether records can be written, and would survive a crash."""
        try:
            told = self._keeper.run(lambda _: schema.findings_about(self._table))
            if all(level != "error" for level, _ in told):
                statements = self._talk.statements
                told += self._keeper.run(
                    lambda _: schema.findings_about_trial(statements, self._table)
                )
        except StoreUnavailable as error:
            return [Finding("error", str(error))]
        return [Finding(level, f"{self._address}: {text}") for level, text in told]

    def now_ms(self) -> int:
        """The server's clock."""
        return self._reader.run(lambda _: schema.clock_ms())

    def wire(self) -> Wire:
        """Connections for the running event loop, which must be able to watch sockets."""
        return MysqlWire(self._talk, self._address)

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self._keeper.close()
        self._writer.close()
        self._finder.close(patience_s=0)
