"""The MySQL store: MySQL or MariaDB, shared by any number of servers.

What a swap has acknowledged survives what the server's settings let it survive; `check` reads
them. Two connections write, so that the next batch is on its way while the server is busy with the
last one; one reads beside them, one is for operators and for the sweep.

A swap alone is one statement, which commits by itself. A batch is one statement, too, whatever its
size, in the order of the ids, so that two batches never wait for each other crosswise; if it
changes anything it is a transaction of its own. That all of them won is seen from the number of
affected rows. Only if not is anything read, and the stamps of the rows tell who won
(`mysql_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

from coatcheck.core.record import GONE, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import mysql_schema as schema
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Wire
from coatcheck.stores.declared import MYSQL
from coatcheck.stores.migration import Migration
from coatcheck.stores.mysql_ledger import ledger_for
from coatcheck.stores.mysql_line import Address, Line, Lines, Row, Session, new_stamp
from coatcheck.stores.mysql_rows import Statements, record_of, stamp_of
from coatcheck.stores.mysql_url import TABLE, named_by
from coatcheck.stores.thread_wire import ThreadWire

# 2: while the server writes one batch, we make and read the other. More would be smaller ones.
LANES = 2

# 5 times: nobody else claims and deletes one record, or sweeps the same ones, so often in a row.
_LOOKS_MAX = 5

_by_id = attrgetter("id")


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
        schema.prepare(address, table, create=create)
        self._address = address
        self._table = table
        self._statements = Statements(table, compact=compact)
        self.ledger = ledger_for(address, table, compact=compact)
        self._writer = Lines(address, LANES)
        self._reader = Line(address)
        self._finder = Line(address)

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
            found = schema.prepare(address, table, create=True)
        wanted = len(schema.MIGRATIONS)
        what = f"{address}: {table}"
        return Migration(what, found, wanted, found < wanted and not only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        if not swaps:
            return []
        if len(swaps) == 1:
            return [self._writer.run(lambda session: self._swap_alone(session, swaps[0]))]
        in_order = sorted(swaps, key=_by_id)
        lost = self._writer.run(lambda session: self._swap_together(session, in_order))
        return [lost.get(swap.id) for swap in swaps]

    def _swap_alone(self, session: Session, swap: Swap) -> Record | None:
        """One plain statement where it wins, one more where it loses, and no transaction."""
        for _ in range(_LOOKS_MAX):
            if session.write(self._statements.alone(swap, new_stamp())) == 1:
                return None
            standing = self._read(session, (swap.id,)).get(swap.id)
            if standing is None and (swap.expected or swap.record is None):
                return GONE if swap.expected else None
            if standing is not None and standing.version != swap.expected:
                return standing
            # It lost, and yet it should win: what it lost against came or went in between.
        raise StoreUnavailable(f"{self._address}: a record came and went, again and again")

    def _swap_together(self, session: Session, swaps: Sequence[Swap]) -> dict[bytes, Record]:
        """What stands instead, for each of *swaps* that lost."""
        stamp = new_stamp()
        writes = [swap for swap in swaps if swap.record is not None]
        rows = [
            self._statements.row_of(swap.record, swap.expected or -stamp)
            for swap in writes
            if swap.record is not None
        ]
        if len(writes) == len(swaps) and not any(swap.expected for swap in swaps):
            claims = list(self._statements.claim(rows, session.statement_bytes_max))
            if len(claims) == 1:  # else a part of them would be committed before the rest
                return self._claim(session, swaps, stamp, claims[0])
        statements = list(self._statements.write(rows, stamp, session.statement_bytes_max))
        session.refuse_if_too_large(*statements)
        session.begin()
        lost = self._write(session, writes, stamp, statements)
        for swap in swaps:
            if swap.record is None:
                lost.update(self._delete(session, swap))
        session.commit()
        return lost

    def _claim(
        self, session: Session, claims: Sequence[Swap], stamp: int, statement: bytes
    ) -> dict[bytes, Record]:
        """Claims only: one statement, which commits by itself."""
        won = session.write(statement)
        if won == len(claims):
            return {}
        rows = self._rows(session, claims)
        lost = {row[0]: record_of(row) for row in rows if stamp_of(row) != -stamp}
        if len(rows) != len(claims) or won + len(lost) != len(claims):
            # Somebody was between the two statements, and who has won cannot be told any more.
            # Whoever tries again finds the own claim, or wins.
            message = f"{self._address}: records came or went while they were claimed"
            raise StoreUnavailable(message, is_ambiguous=True)
        return lost

    def _write(
        self, session: Session, writes: Sequence[Swap], stamp: int, statements: Sequence[bytes]
    ) -> dict[bytes, Record]:
        """Claims and changes, in a transaction: what a statement has looked at stays locked."""
        wins = {swap.id: 2 if swap.expected else 1 for swap in writes}
        affected = session.write(*statements) if writes else 0
        if affected == sum(wins.values()):
            return {}
        rows = self._rows(session, writes, but_stamp=-stamp)
        missing = [row[0] for row in rows if stamp_of(row) > 0]
        if missing:
            session.write(self._statements.discard(missing))
        lost = {row[0]: GONE if stamp_of(row) > 0 else record_of(row) for row in rows}
        assert affected - len(missing) == sum(wins[id] for id in wins.keys() - lost.keys())
        return lost

    def _delete(self, session: Session, swap: Swap) -> dict[bytes, Record]:
        """One by one, because it is rare."""
        if session.write(self._statements.alone(swap, 0)) == 1:
            return {}
        standing = self._read(session, (swap.id,))
        return standing or ({swap.id: GONE} if swap.expected else {})

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; never waits for a lock."""
        standing = self._reader.run(lambda session: self._read(session, ids))
        return [standing.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Records for operators, in id order; on a connection where nobody else has to wait."""
        statement = self._statements.find(query)
        rows = self._finder.run(lambda session: session.read(statement))
        records = [record_of(row) for row in rows[: query.limit]]
        return Page(records, records[-1].id if len(rows) > query.limit else None)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over, some hundreds at a time."""
        taken = 0
        while taken < limit:
            portion = min(limit - taken, SWEEP_BATCH)
            count = self._finder.run(partial(self._sweep, now_ms=now_ms, limit=portion))
            taken += count
            if count < portion:
                break
        return taken

    def _sweep(self, session: Session, now_ms: int, limit: int) -> int:
        for _ in range(_LOOKS_MAX):
            rows = session.read(self._statements.expired(now_ms, limit))
            if not rows:
                return 0
            taken = session.write(self._statements.sweep([row[0] for row in rows], now_ms))
            if taken:
                return taken
            # Another node has just swept them all, but perhaps there are more.
        return 0

    def check(self) -> Sequence[Finding]:
        """Whether records can be written, and would survive a crash."""
        try:
            told = self._finder.run(lambda s: list(schema.findings_about(s, self._table)))
        except StoreUnavailable as error:
            return [Finding("error", str(error))]
        return [Finding(level, f"{self._address}: {text}") for level, text in told]

    def now_ms(self) -> int:
        """The server's clock."""
        return self._reader.run(schema.clock_ms)

    def wire(self) -> Wire:
        """Threads for an event loop, one for each line that writes and one that reads."""
        return ThreadWire(self, LANES)

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self._finder.close()
        self._writer.close()

    def _read(self, session: Session, ids: Sequence[bytes]) -> dict[bytes, Record]:
        rows = chain.from_iterable(map(session.read, self._statements.read(ids)))
        return {row[0]: record_of(row) for row in rows}

    def _rows(
        self, session: Session, swaps: Sequence[Swap], *, but_stamp: int | None = None
    ) -> list[Row]:
        statements = self._statements.read([swap.id for swap in swaps], but_stamp=but_stamp)
        return list(chain.from_iterable(map(session.read, statements)))
