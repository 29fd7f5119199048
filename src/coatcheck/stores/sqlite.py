"""The SQLite store: the embedded default. One file, durable, shared by any number of processes.

What a swap has acknowledged survives `kill -9` and a power cut (write-ahead log, one fsync for
each commit). One connection writes, one reads beside it, one is for operators, and one writes for
an event loop that is alone; SQLite lets one of them write at a time, and the others wait for it.

A batch is a few statements, whatever its size. The writing thread shares the interpreter lock with
an event loop, and every statement gives that lock away and has to get it back; so claims go in as
one `insert` of many rows and changes as one `update` from many rows. That all of them won is seen
from the number of rows that changed; only if not is anything read.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import TypedDict
from urllib.parse import parse_qsl, unquote, urlsplit

from coatcheck.core.record import COMPLETED, GONE, RUNNING, Record, Swap
from coatcheck.core.scope import ID_BYTES
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import sqlite_file as file
from coatcheck.stores import sqlite_rows as rows
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query
from coatcheck.stores.declared import SQLITE
from coatcheck.stores.migration import Migration
from coatcheck.stores.sqlite_file import findings_about, identity_of, in_turn
from coatcheck.stores.sqlite_ledger import ledger_for
from coatcheck.stores.sqlite_line import Line
from coatcheck.stores.url import no_option, seconds_of, shown

_GONE = "it was deleted or replaced while in use; restart whoever uses it"
# 5 s: thousands of commits of others. Who has waited that long for a lock is better told so.
BUSY_TIMEOUT_S = 5.0
# 16 KiB: about four pages. An event loop does not stand still for more than that is worth.
_AT_ONCE_BYTES_MAX = 16_384


class SqliteStore:
    """
    Records in an SQLite file, which may be the application's own database.

    Args:
        path: the file; created where there is none, in a directory that must exist.
        compact: keep only digests; label, scope and key are stored empty.
        busy_timeout_s: how long to wait while other processes write.
        create: make the file, or our tables in it, where they are missing.
    """

    declared = SQLITE

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compact: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        create: bool = True,
    ) -> None:
        # Absolute, because a server may change its directory before the first request.
        self.path = os.path.abspath(path)  # noqa: PTH100 - no pathlib word says only that
        file.prepare(self.path, busy_timeout_s, create=create)
        self._identity = identity_of(self.path)
        self._packer = rows.Packer(compact=compact)  # used by who holds the writer
        self._prompt_packer = rows.Packer(compact=compact)  # by who holds the prompt one
        self._busy_timeout_s = busy_timeout_s
        self.ledger = ledger_for(self.path, busy_timeout_s, compact=compact)
        self._writer = Line(self.path, busy_timeout_s, writes=True)
        self._prompt = Line(self.path, busy_timeout_s, writes=True, waits=False)
        self._reader = Line(self.path, busy_timeout_s)
        self._finder = Line(self.path, busy_timeout_s)

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> SqliteStore:
        """
        The store that *url* names: `sqlite:///relative.db` or `sqlite:////absolute.db`.

        Options: `?compact=1`, `?busy_timeout=5s`.
        """
        path, options = _named_by(url)
        return cls(path, create=create, **options)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Make the file and the tables in it, or bring them up to date."""
        path, options = _named_by(url)
        busy_timeout_s = options.get("busy_timeout_s", BUSY_TIMEOUT_S)
        found = file.version_at(path, busy_timeout_s)
        if not only_look:
            file.prepare(path, busy_timeout_s, create=True)
        wanted = len(file.MIGRATIONS)
        return Migration(path, found, wanted, found < wanted and not only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        if not swaps:
            return []
        with self._writer as connection:
            self._refuse_if_gone()
            if len(swaps) == 1:
                return [self._swap_alone(connection, swaps[0])]
            return self._swap_together(connection, swaps)

    def swap_at_once(self, swap: Swap) -> bool:
        """
        Write a short record without waiting for anybody but the disk; whether that was all.

        Whatever was in the way, `swap` will meet it again. If it was not, because an error came
        when the record was already written, then `swap` finds this record, and its caller knows it.
        """
        if swap.record is None or len(swap.record.response or b"") > _AT_ONCE_BYTES_MAX:
            return False
        try:
            with self._prompt as connection:
                self._refuse_if_gone()
                statement, row = _statement_of(swap, swap.record, self._prompt_packer)
                return connection.execute(statement, row).rowcount == 1
        except Exception:  # noqa: BLE001 - told by `swap`
            return False

    def _refuse_if_gone(self) -> None:
        """What is written into a file that nobody else can see would be executed again there."""
        if identity_of(self.path) != self._identity:
            raise StoreUnavailable(f"{self.path}: {_GONE}")

    def _swap_alone(self, connection: sqlite3.Connection, swap: Swap) -> Record | None:
        """One plain statement where it wins, one more where it loses, and no transaction."""
        if self._write_alone(connection, swap):
            return None
        standing = _read(connection, (swap.id,)).get(swap.id)
        if swap.expected != (0 if standing is None else standing.version):
            return GONE if standing is None else standing
        # It lost, and yet it should win: a new life, whose expiry is another one; or the record
        # went or came between the two statements. In a transaction nothing can.
        return self._swap_together(connection, (swap,))[0]

    def _write_alone(self, connection: sqlite3.Connection, swap: Swap) -> bool:
        if swap.record is None:
            statement, row = rows.DELETE_ONE, [swap.id, swap.expected]
        else:
            statement, row = _statement_of(swap, swap.record, self._packer)
        return in_turn(connection, self._busy_timeout_s, statement, row).rowcount == 1

    def _swap_together(
        self, connection: sqlite3.Connection, swaps: Sequence[Swap]
    ) -> Sequence[Record | None]:
        """One transaction, and in it one answer for each; see `Line` for what an error does."""
        writes = [swap for swap in swaps if swap.record is not None]
        claims = [swap for swap in writes if swap.expected == 0]
        changes = writes if not claims else [swap for swap in writes if swap.expected]
        deletes = [] if len(writes) == len(swaps) else [s for s in swaps if s.record is None]
        in_turn(connection, self._busy_timeout_s, "begin immediate")
        lost = [
            *self._change(connection, changes),  # first, because it may begin anew
            *self._claim(connection, claims),
            *self._delete(connection, deletes),
        ]
        standing = _read(connection, [swap.id for swap in lost]) if lost else {}
        connection.execute("commit")
        if not lost:
            return [None] * len(swaps)
        losers = {swap.id for swap in lost}
        return [
            standing.get(swap.id, GONE if swap.expected else None) if swap.id in losers else None
            for swap in swaps
        ]

    def _change(self, connection: sqlite3.Connection, changes: list[Swap]) -> list[Swap]:
        """Write *changes*; whoever lost."""
        if not changes:
            return []
        written = self._packer.rows_of(_records(changes))
        for row, swap in zip(written, changes, strict=True):
            row.append(swap.expected)
        won = 0
        for some in rows.portions(written):
            won += connection.execute(rows.change_many(len(some)), _flat(some)).rowcount
        if won == len(changes):
            return []
        # Who lost cannot be seen from what stands now, for an equal swap of somebody else leaves
        # equal traces; and a new life has not lost at all. So once more, one by one.
        connection.execute("rollback")
        in_turn(connection, self._busy_timeout_s, "begin immediate")
        return [
            swap
            for swap, row in zip(changes, written, strict=True)
            if connection.execute(rows.REPLACE_ONE, row).rowcount == 0
        ]

    def _claim(self, connection: sqlite3.Connection, claims: list[Swap]) -> list[Swap]:
        """Write *claims*; whoever lost."""
        if not claims:
            return []
        won = last = 0
        for some in rows.portions(self._packer.rows_of(_records(claims))):
            cursor = connection.execute(rows.claim_many(len(some)), _flat(some))
            won += cursor.rowcount
            last = cursor.lastrowid or 0
        if won == len(claims) or won == 0:
            return claims if won == 0 else []
        # Rows are numbered as they come, so those we have just written are the last *won* ones.
        numbers: dict[bytes, int] = {}
        for some_ids in rows.portions([swap.id for swap in claims]):
            numbers.update(connection.execute(rows.number_many(len(some_ids)), some_ids))
        return [swap for swap in claims if numbers[swap.id] <= last - won]

    def _delete(self, connection: sqlite3.Connection, deletes: list[Swap]) -> list[Swap]:
        """Delete one by one, because it is rare; whoever lost, or had nothing to delete."""
        return [
            swap
            for swap in deletes
            if connection.execute(rows.DELETE_ONE, (swap.id, swap.expected)).rowcount == 0
        ]

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; never waits for a commit."""
        with self._reader as connection:
            standing = _read(connection, ids)
        return [standing.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Records for operators, in id order; on a connection where nobody else has to wait."""
        statement, values = rows.find(query)
        with self._finder as connection:
            found = connection.execute(statement, values).fetchall()
        records = [rows.record_of(row) for row in found[: query.limit]]
        return Page(records, records[-1].id if len(found) > query.limit else None)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        with self._writer as connection:
            swept = in_turn(connection, self._busy_timeout_s, rows.SWEEP, (now_ms, limit))
            return swept.rowcount

    def check(self) -> Sequence[Finding]:
        """Whether the file is whole, can be written, and will be found again."""
        findings: list[Finding] = []
        try:
            with self._writer as connection:
                in_turn(connection, self._busy_timeout_s, "begin immediate")
                if failed := self._failed(connection):
                    findings.append(Finding("error", f"{self.path}: {failed}"))
                connection.execute("rollback")
            self._finder.hang_up()  # what it remembers of the file is not what is to be checked
            with self._finder as connection:
                findings += [Finding(*about) for about in findings_about(connection, self.path)]
        except StoreUnavailable as error:
            findings.append(Finding("error", str(error)))
        except sqlite3.IntegrityError as error:  # of a trigger, say
            findings.append(Finding("error", f"{self.path}: no record can be written: {error}"))
        if identity_of(self.path) != self._identity:
            findings.append(Finding("error", f"{self.path}: {_GONE}"))
        return findings

    def _failed(self, connection: sqlite3.Connection) -> str:
        """What cannot be done with a record; it is done in a transaction that is undone."""
        id = os.urandom(ID_BYTES)
        claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
        ended = claim._replace(version=2, state=COMPLETED)
        for swap, said in (
            (Swap(id, 0, claim), "nothing can be claimed"),
            (Swap(id, 1, ended), "what is claimed can never be ended"),
        ):
            if not self._write_alone(connection, swap):
                return said
        if _read(connection, (id,)) != {id: ended}:
            return "how it ended is not seen by a retry"
        connection.execute(rows.SWEEP, (0, 1))
        return "" if self._write_alone(connection, Swap(id, 2, None)) else "nothing can be deleted"

    def now_ms(self) -> int:
        """This machine's clock."""
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Close the file; whoever closes it last moves the log into it."""
        self._reader.close()
        self._finder.close()
        self._prompt.close()
        self._writer.close()


def _statement_of(swap: Swap, record: Record, packer: rows.Packer) -> tuple[str, rows.Row]:
    """What writes *record*, if it is no new life."""
    row = packer.row_of(record)
    if swap.expected == 0:
        return rows.CLAIM_ONE, row
    row.append(swap.expected)
    return rows.CHANGE_ONE, row


def _read(connection: sqlite3.Connection, ids: Sequence[bytes]) -> dict[bytes, Record]:
    standing: dict[bytes, Record] = {}
    for some in rows.portions(ids):
        for row in connection.execute(rows.read_many(len(some)), some).fetchall():
            standing[row[0]] = rows.record_of(row)
    return standing


def _records(swaps: Sequence[Swap]) -> list[Record]:
    return [swap.record for swap in swaps if swap.record is not None]


def _flat(written: Iterable[rows.Row]) -> list[object]:
    flat: list[object] = []
    for row in written:
        flat += row
    return flat


def _named_by(url: str) -> tuple[str, _Options]:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.fragment or path in ("", ":memory:") or not _can_name(path):
        raise Misconfigured(
            f"{shown(url)} names no file; write sqlite:///relative.db or sqlite:////absolute.db "
            "('#' as %23), or memory:// for a store that may forget"
        )
    return path, _options(parts.query)


def _can_name(path: str) -> bool:
    """The system could have a file of this name."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


class _Options(TypedDict, total=False):
    compact: bool
    busy_timeout_s: float


def _options(query: str) -> _Options:
    """What stands behind the question mark of a URL."""
    options: _Options = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "compact" and value in ("0", "1"):
            options["compact"] = value == "1"
        elif name == "busy_timeout":
            options["busy_timeout_s"] = seconds_of(f"sqlite: {name}", value)
        else:
            told = no_option("sqlite", name, value, ("compact",))
            raise Misconfigured(
                f"{told}; there are compact=0 or 1 (keep only digests) and busy_timeout=5s (how "
                "long to wait while others write)"
            )
    return options
