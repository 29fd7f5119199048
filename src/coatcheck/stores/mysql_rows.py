"""Rows of the MySQL store: how a record becomes one and comes back, and the statements for it.

Beneath `mysql_talk.py`, which says when. Statements are made here as text, values and all, but for
those that claim or change one record alone (`mysql_values.py`). A number is formatted as one or
fails; a text or a blob is written in hexadecimal, or, where that would be long, in base 64. So
nothing is ever escaped, and no `sql_mode` can read it as anything else.

`stamp` is a column for the store alone. A write marks its rows with the negative of a number that
nobody else has, so that one look tells which rows it has written; an equal swap of somebody else
leaves equal traces in every other column.

Invariant: `record_of` of what `row_of` made is the same record, whatever it holds.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.stores.contract import Query
from coatcheck.stores.mysql_packets import Row

# 500 ids in a statement: MariaDB makes a temporary table of more than a thousand.
IDS_MAX = 500

# 1 024: twice as long costs nothing there. A response of megabytes must not be twice as long,
# because the server takes no statement above its `max_allowed_packet` (`mysql_size.py`).
_HEX_BYTES_MAX = 1_024

_FIELDS = tuple("`key`" if name == "key" else name for name in Record._fields)
COLUMNS = (*_FIELDS, "stamp")
_NAMES = ", ".join(COLUMNS)
_STAMP = COLUMNS.index("stamp")

# How each column is written: digests in hexadecimal, what may be null or text as it was spelt.
_MARKS = ("x'%s'", *["%d"] * 3, "x'%s'", *["%d"] * 5, *["%s"] * 5, "%d")
_ROW = f"({','.join(_MARKS)})"
_CHANGES = ",".join(map("{}={}".format, COLUMNS[1:], _MARKS[1:]))
assert len(_MARKS) == len(COLUMNS)

# What a setting says that makes a server read-only, where it does not; some spell it out.
WRITABLE = (b"0", b"OFF")

_IS_OVER = "expires_ms <= {0:d} and version < {0:d} and (state <> 0 or lease_until_ms <= {0:d})"


class Statements:
    """
    The statements of one table.

    Args:
        table: its name, which must need no escaping.
        compact: keep only digests; label, scope and key are stored empty.
    """

    def __init__(self, table: str, *, compact: bool) -> None:
        self._table = f"`{table}`"
        self._compact = compact
        self._select = f"select {_NAMES}, @@read_only from {self._table}"
        self._insert = f"insert into {self._table} ({_NAMES}) values "
        # What is prepared: to claim, and to change. The second cannot be prepared where there is no
        # primary key, and then nothing is claimed either: without one, every claim would win.
        marks, changes = ",".join("?" * len(COLUMNS)), " = ?, ".join(COLUMNS[1:])
        change = f"update {self._table} force index (primary) set {changes} = ?"
        self.kept = (
            f"{self._insert}({marks}){_OR_NOTHING}".encode(),
            f"{change} where id = ? and version = ?".encode(),
        )

    def _values_of(self, record: Record, stamp: int) -> tuple[Any, ...]:
        texts = _NO_TEXTS if self._compact else _texts(*record[10:13])
        digests = record[0].hex(), record[4].hex()
        blobs = _literal(record[13]), _literal(record[14])
        return (digests[0], *record[1:4], digests[1], *record[5:10], *texts, *blobs, stamp)

    def alone(self, swap: Swap, stamp: int) -> bytes:
        """One swap. Atomic; one row is affected where it wins, else none."""
        record = swap.record
        if record is not None and swap.expected == 0:
            return _sent(self._claim((record,), stamp))
        where = f"where id = {_hex(swap.id)} and version = {swap.expected:d}"
        if record is None:
            return _sent(f"delete from {self._table} {where}")
        changes = _CHANGES % self._values_of(record, -stamp)[1:]
        return _sent(f"update {self._table} set {changes} {where}")

    def together(self, swaps: Sequence[Swap], stamp: int) -> bytes:
        """
        Claims and changes, all or none of them. As many rows are affected as win.

        Both in the order in which they are given.
        """
        claims = [swap.record for swap in swaps if swap.record and not swap.expected]
        changes = [swap for swap in swaps if swap.expected]
        if not changes:
            return _sent(self._claim(claims, stamp))
        if not claims:
            return _sent(self._change(changes, stamp))
        both = f"{self._claim(claims, stamp)}; {self._change(changes, stamp)}"
        return _sent(f"begin; {both}; commit")

    def _claim(self, records: Iterable[Record], stamp: int) -> str:
        rows = ",".join([_ROW % self._values_of(record, -stamp) for record in records])
        return f"{self._insert}{rows}{_OR_NOTHING}"

    def _change(self, swaps: Sequence[Swap], stamp: int) -> str:
        """
        One statement for all, column by column.

        The stamp holds the place of a row among *swaps* while the others are assigned: assignments
        are made from left to right, and each sees those before it. A number is compared with a
        text as fractions are, without the last digits; hence the cast.
        """
        values = [self._values_of(swap.record, -stamp) for swap in swaps if swap.record]
        columns = zip(
            COLUMNS[1:-1], _MARKS[1:-1], list(zip(*values, strict=True))[1:-1], strict=True
        )
        changes = ",".join([f"{name}={_one_of(mark, column)}" for name, mark, column in columns])
        ids = _list([swap.id for swap in swaps])
        place = f"field(id,{ids})"
        expected = ",".join([f"{swap.expected:d}" for swap in swaps])
        return (
            f"update {self._table} force index (primary)"
            f" set stamp={place},{changes},stamp={-stamp:d}"
            f" where id in ({ids}) and version = cast(elt({place},{expected}) as signed)"
        )

    def read(self, ids: Sequence[bytes]) -> Iterator[str]:
        """Read the records of *ids*."""
        for start in range(0, len(ids), IDS_MAX):
            yield f"{self._select} where id in ({_list(ids[start : start + IDS_MAX])})"

    def expired(self, now_ms: int, limit: int) -> str:
        """
        The ids that a sweep at *now_ms* may take, without a lock on any of them.

        Along the index, so that what is still kept is never looked at.
        """
        over = _IS_OVER.format(now_ms)
        return (
            f"select id from {self._table} force index (expires) where {over}"
            f" order by expires_ms limit {limit:d}"
        )

    def sweep(self, ids: Iterable[bytes], now_ms: int) -> bytes:
        """
        Delete those of *ids* whose retention is still over. Atomic.

        By the primary key and in its order, like every write: it locks those rows and no others.
        """
        return _sent(
            f"delete r from {self._table} as r force index (primary)"
            f" where id in ({_list(sorted(ids))}) and {_IS_OVER.format(now_ms)}"
        )

    def find(self, query: Query, limit_s: float) -> str:
        """
        Read what *query* asks for, and one more to see if there is more.

        The server ends it after *limit_s*. MariaDB and MySQL have two words for that, and each
        takes the other's for a comment.
        """
        conditions = [f"id >= {_hex(query.id_prefix)}", f"id > {_hex(query.after_id)}"]
        if (above := _above(query.id_prefix)) is not None:
            conditions.append(f"id < {_hex(above)}")
        where = " and ".join((*conditions, *_filters(query)))
        mariadb = f"/*M!100100 set statement max_statement_time={limit_s:f} for */"
        mysql = f"select /*+ MAX_EXECUTION_TIME({limit_s * 1_000:.0f}) */"
        limited = self._select.replace("select", f"{mariadb} {mysql}", 1)
        return f"{limited} where {where} order by id limit {query.limit + 1:d}"


# Not `insert ignore`, which ignores much more than that there is a row already.
_OR_NOTHING = " on duplicate key update id = id"


def record_of(row: Row) -> Record:
    """The record that *row* was made of."""
    id, version, state, attempt, fingerprint, *numbers = row[:10]
    label, scope, key, progress, response = row[10:15]
    return Record._make(
        (
            *(id, int(version), int(state), int(attempt), fingerprint),
            *map(int, numbers),
            *(text_of(label), text_of(scope), text_of(key), progress, response),
        )
    )


def id_in(row: Row) -> bytes:
    """Whose *row* it is."""
    id: bytes = row[0]
    return id


def is_of_replica(row: Row) -> bool:
    """Who has shown *row* only reads, and may not know what has become of it."""
    return row[-1] not in WRITABLE


def stamp_of(row: Row) -> int:
    """Who has written *row*."""
    return int(row[_STAMP])


def bytes_of(text: str) -> bytes:
    """*text* as it is stored, also where it is no proper Unicode: a path may hold any bytes."""
    return text.encode("utf-8", "surrogatepass")


def text_of(stored: bytes) -> str:
    """The text that was *stored*."""
    return stored.decode("utf-8", "surrogatepass")


def _filters(query: Query) -> Iterator[str]:
    if query.key is not None:
        yield f"`key` = {_hex(bytes_of(query.key))}"
    if query.label is not None:
        yield f"label = {_hex(bytes_of(query.label))}"
    if query.state is not None:
        yield f"state = {query.state:d}"
    if query.created_before_ms is not None:
        yield f"created_ms < {query.created_before_ms:d}"
    if query.expired_at_ms is not None:
        yield _IS_OVER.format(query.expired_at_ms)


def _above(prefix: bytes) -> bytes | None:
    """The first bytes that come after all that begin with *prefix*; None where there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _one_of(mark: str, column: Sequence[Any]) -> str:
    """What becomes of a column, given its new value in each row."""
    if column.count(column[0]) == len(column):
        return f"{mark % column[0]}"
    return f"elt(stamp,{','.join([mark % value for value in column])})"


# 1 024: as many as may run at once. What was spelt for a claim is needed when it is completed.
@lru_cache(maxsize=1_024)
def _texts(label: str, scope: str, key: str) -> tuple[str, str, str]:
    return _hex(bytes_of(label)), _hex(bytes_of(scope)), _hex(bytes_of(key))


_NO_TEXTS = ("x''", "x''", "x''")


def _list(ids: Iterable[bytes]) -> str:
    return ",".join(map(_hex, ids))


def _hex(value: bytes) -> str:
    return f"x'{value.hex()}'"


def _literal(value: bytes | None) -> str:
    if value is None:
        return "null"
    if len(value) <= _HEX_BYTES_MAX:
        return _hex(value)
    return f"from_base64('{base64_of(value)}')"


def base64_of(value: bytes) -> str:
    """*value* in letters, digits, "+", "/" and "="."""
    return b2a_base64(value, newline=False).decode("ascii")


def _sent(statement: str) -> bytes:
    return statement.encode("ascii")
