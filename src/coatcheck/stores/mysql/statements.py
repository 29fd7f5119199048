"""SQL statements of the MySQL store, and how a record becomes a row and comes back.

Statements are complete texts, values included. Numbers are formatted as numbers; texts and bytes
are written in hexadecimal or, if they are long, in base 64. So nothing is ever escaped, and no
`sql_mode` can read a value as anything else.

The claims of a batch are one `insert`, and its changes one `update`. If such a statement affects
fewer rows than it has swaps, the column `stamp` shows which were applied: each batch writes a
random number of its own. No other column shows it, because an equal swap of another caller leaves
the same values in all of them.

Invariants: the record read from a row equals the record that was written; the server accepts every
statement for one swap that `without_oversized_response` lets pass.
"""

from __future__ import annotations

import logging
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Any, NamedTuple

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.key import reference_of
from coatcheck.core.record import Record, State, Swap
from coatcheck.stores.contract import Query, conditions_of
from coatcheck.stores.mysql.connection import Row
from coatcheck.stores.record_counts import RecordCount

logger = logging.getLogger("coatcheck")

# 500 ids in a statement: MariaDB makes a temporary table for more than a thousand. And an `update`
# looks through all of them for each value of each row.
IDS_MAX = 500

# 1,024 bytes: hexadecimal doubles them. A response of megabytes is written in base 64, because the
# server accepts no statement above its `max_allowed_packet`.
_HEX_BYTES_MAX = 1_024

# 2 KiB: column names, numbers, digests and the syntax around them, counted generously.
_FIXED_BYTES = 2_048
# A character takes up to 4 bytes of UTF-8, and each of them 2 hexadecimal digits.
_BYTES_PER_CHARACTER = 8

COLUMNS = tuple("`key`" if name == "key" else name for name in Record._fields)
_COLUMN_LIST = ", ".join(COLUMNS)

# How each column is written: numbers as numbers, digests in hexadecimal, and texts and blobs as the
# literals that they are turned into.
_FORMATS = ("x'%s'", *["%d"] * 3, "x'%s'", *["%d"] * 5, *["%s"] * 5)
_SET_FORMAT = ",".join(map("{}={}".format, COLUMNS[1:], _FORMATS[1:]))
INSERT = f"insert into `{{}}` ({_COLUMN_LIST}, stamp) values "
_ROW_FORMAT = f"({','.join(_FORMATS)},%d)"
assert len(_FORMATS) == len(COLUMNS)

_RETENTION_OVER = (
    "expires_ms <= {0:d} and version < {0:d} and (state <> 0 or lease_until_ms <= {0:d})"
)
# Not `insert ignore`, which ignores far more errors than a duplicate key.
_UNLESS_EXISTS = " on duplicate key update id = id"


class Write(NamedTuple):
    """A statement, and the swaps that it applies."""

    text: str
    swaps: Sequence[Swap]


class Statements:
    """The statements of one table, whose name must need no escaping."""

    def __init__(self, table: str) -> None:
        self._table = f"`{table}`"
        self._insert = INSERT.format(table)
        self._select = f"select {_COLUMN_LIST}, @@read_only from {self._table}"
        self._update = f"update {self._table} force index (primary) set "
        # Fails if the table has no primary key. Without one, every claim of a key would succeed.
        self.require_primary_key = f"select id from {self._table} force index (primary) limit 0"

    def swap(self, swap: Swap) -> str:
        """Return the statement for one swap. Atomic; it affects one row if the swap is applied."""
        record = swap.record
        if record is not None and swap.expected == 0:
            return self._insert_all((swap,), stamp=0)
        where = f"where id = {_hex(swap.id)} and version = {swap.expected:d}"
        if record is None:
            return f"delete from {self._table} {where}"
        return f"{self._update}{_SET_FORMAT % _values_of(record)[1:]} {where}"

    def batch(self, swaps: Sequence[Swap], stamp: int) -> Iterator[Write]:
        """
        Yield the statements for swaps, at most `IDS_MAX`, which the caller has sorted by id.

        Each affects as many rows as it applies swaps. A row that it writes gets the *stamp*.
        """
        if len(swaps) == 1:
            yield Write(self.swap(swaps[0]), swaps)
            return
        claims = [swap for swap in swaps if swap.record is not None and not swap.expected]
        changes = [swap for swap in swaps if swap.record is not None and swap.expected]
        if claims:
            yield Write(self._insert_all(claims, stamp), claims)
        if changes:
            yield Write(self._update_all(changes, stamp), changes)
        for swap in swaps:
            if swap.record is None:  # nothing of a deleted row could be stamped
                yield Write(self.swap(swap), (swap,))

    def _insert_all(self, claims: Sequence[Swap], stamp: int) -> str:
        values = [_values_of(swap.record) for swap in claims if swap.record is not None]
        rows = ",".join([_ROW_FORMAT % (*row, stamp) for row in values])
        return f"{self._insert}{rows}{_UNLESS_EXISTS}"

    def _update_all(self, changes: Sequence[Swap], stamp: int) -> str:
        values = [_values_of(swap.record) for swap in changes if swap.record is not None]
        columns = zip(*values, strict=True)
        whens = [f" when {_hex(swap.id)} then " for swap in changes]
        assignments = [
            f"{name}={_case(whens, [format % value for value in column])}"
            for name, format, column in zip(COLUMNS, _FORMATS, columns, strict=True)
            if name != "id"
        ]
        expected = _case(whens, [f"{swap.expected:d}" for swap in changes])
        ids = _id_list(swap.id for swap in changes)
        return (
            f"{self._update}{','.join(assignments)},stamp={stamp:d}"
            f" where id in ({ids}) and version = {expected}"
        )

    def select_stamped(self, ids: Sequence[bytes], stamp: int) -> str:
        """Return the statement that reads which of *ids* have the *stamp*."""
        return f"select id from {self._table} where id in ({_id_list(ids)}) and stamp = {stamp:d}"

    def select(self, ids: Sequence[bytes]) -> Iterator[str]:
        """Yield the statements that read the records of *ids*."""
        for start in range(0, len(ids), IDS_MAX):
            yield f"{self._select} where id in ({_id_list(ids[start : start + IDS_MAX])})"

    def select_expired(self, now_ms: int, limit: int) -> str:
        """
        Return the statement that reads the ids which a sweep at *now_ms* may delete.

        It takes no lock. It reads along the index, so records that are kept cost nothing.
        """
        return (
            f"select id from {self._table} force index (expires)"
            f" where {_RETENTION_OVER.format(now_ms)} order by expires_ms limit {limit:d}"
        )

    def delete_expired(self, ids: Iterable[bytes], now_ms: int) -> str:
        """
        Return the statement that deletes those of *ids* whose retention is still over. Atomic.

        It reads by primary key and in its order, like every write, and so locks no other rows.
        """
        return (
            f"delete r from {self._table} as r force index (primary)"
            f" where id in ({_id_list(sorted(ids))}) and {_RETENTION_OVER.format(now_ms)}"
        )

    def search(self, query: Query, limit_s: float) -> str:
        """
        Return the statement that reads a page of *query*, and one record more to see if it goes on.

        The server ends it after *limit_s*.
        """
        where = " and ".join(_conditions(query))
        order = "created_ms desc, id desc" if query.newest_first else "id"
        select = f"{self._select} where {where} order by {order} limit {query.limit + 1:d}"
        return _with_time_limit(select, limit_s)

    def count(self, limit_s: float) -> str:
        """Return the statement that counts records by state and label; see `record_count_of`."""
        select = (
            "select state, label, count(*), min(created_ms),"
            " cast(sum(ifnull(length(progress), 0) + ifnull(length(response), 0)) as signed),"
            f" @@read_only from {self._table} group by state, label"
        )
        return _with_time_limit(select, limit_s)


def _with_time_limit(select: str, limit_s: float) -> str:
    """
    Return *select*, which the server ends after *limit_s*.

    MariaDB and MySQL spell that differently, and each reads the other's spelling as a comment.
    """
    mariadb = f"/*M!100100 set statement max_statement_time={limit_s:f} for */"
    mysql = f"select /*+ MAX_EXECUTION_TIME({limit_s * 1_000:.0f}) */"
    return select.replace("select", f"{mariadb} {mysql}", 1)


def _values_of(record: Record) -> tuple[Any, ...]:
    """Return what `_FORMATS` takes for *record*, column by column."""
    return (
        *(record.id.hex(), *record[1:4], record.fingerprint.hex(), *record[5:10]),
        *(_hex(bytes_of(text)) for text in record[10:13]),
        *(_literal(record.progress), _literal(record.response)),
    )


def record_of(row: Row) -> Record:
    """Return the record that is stored in *row*."""
    label, scope, key = map(_text_of, row[10:13])
    return Record._make((*row[:10], label, scope, key, row[13], row[14]))


def record_count_of(row: Row) -> RecordCount:
    """Return what a *row* of `Statements.count` says."""
    state, label, records, oldest_ms, body_bytes, _ = row
    return RecordCount(State(state), _text_of(label), records, oldest_ms, body_bytes)


def _text_of(stored: bytes) -> str:
    return stored.decode("utf-8", "surrogatepass")


def bytes_of(text: str) -> bytes:
    """Return *text* as it is stored; also invalid Unicode, because a path may hold any bytes."""
    return text.encode("utf-8", "surrogatepass")


def without_oversized_response(swap: Swap, statement_bytes_max: int) -> Swap:
    """
    Return *swap*, without its response if the statement would be too long with it.

    Work that was done must be recorded as done even if its response cannot be kept. If the write
    failed instead, every retry would run the work again. Raises `ValueError` if the statement would
    be too long even then, because the server would close the connection.
    """
    record = swap.record
    if record is None or _bytes_max(record) <= statement_bytes_max:
        return swap
    shorter = record._replace(response=None)
    if _bytes_max(shorter) > statement_bytes_max:
        raise ValueError(
            f"a record takes a statement of up to {_bytes_max(shorter)} bytes, and the server "
            f"accepts at most {statement_bytes_max}; raise its max_allowed_packet, or store less "
            "in the steps and notes of the operation"
        )
    return Swap(swap.id, swap.expected, shorter)


def _bytes_max(record: Record) -> int:
    """Return how long the statement for *record* can be; base 64 makes 4 bytes of 3."""
    texts = len(record.label) + len(record.scope) + len(record.key)
    blobs = len(record.progress or b"") + len(record.response or b"")
    return _FIXED_BYTES + texts * _BYTES_PER_CHARACTER + blobs * 4 // 3


def warn_response_dropped(record: Record) -> None:
    """Log that the response of *record* is not kept."""
    logger.warning(
        "coatcheck: operation %s: its response of %d bytes exceeds the server's max_allowed_packet "
        "and is not kept; a retry gets 409 result-unavailable; raise max_allowed_packet",
        reference_of(record.id),
        len(record.response or b""),
    )


def _conditions(query: Query) -> Iterator[str]:
    yield f"id >= {_hex(query.id_prefix)}"
    yield f"id > {_hex(query.after_id)}"
    yield f"id <= {_hex(query.id_prefix.ljust(ID_BYTES, bytes([255])))}"
    for field, operator, value in conditions_of(query):
        literal = _hex(bytes_of(value)) if isinstance(value, str) else f"{value:d}"
        yield f"`{field}` {operator} {literal}"
    if query.expired_at_ms is not None:
        yield _RETENTION_OVER.format(query.expired_at_ms)


def _id_list(ids: Iterable[bytes]) -> str:
    return ",".join(map(_hex, ids))


def _case(whens: Sequence[str], literals: Sequence[str]) -> str:
    """Return the literal that belongs to the id of a row; often it is the same for all."""
    if len(set(literals)) == 1:
        return literals[0]
    return f"case id{''.join(map(add, whens, literals))} end"


def _hex(value: bytes) -> str:
    return f"x'{value.hex()}'"


def _literal(value: bytes | None) -> str:
    if value is None:
        return "null"
    if len(value) <= _HEX_BYTES_MAX:
        return _hex(value)
    return f"from_base64('{base64_of(value)}')"


def base64_of(value: bytes) -> str:
    """Return *value* in letters, digits, "+", "/" and "="."""
    return b2a_base64(value, newline=False).decode("ascii")
