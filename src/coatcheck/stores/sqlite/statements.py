"""The SQL of the SQLite store, and how a record becomes a row.

The parameters of a row are the fields of `Record` in their order; the statements do all arithmetic.
Only the three texts for people are encoded here: a UUID as its 16 bytes, a digest of 16 hexadecimal
characters as 8 bytes. Without that a record takes about 40 bytes more. A blob is an encoded text, a
text is stored unchanged, so the column's type tells them apart.

Invariant: `record_of(row_of(record)) == record`, whatever the texts contain.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias, TypeVar

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import Record, State, Swap
from coatcheck.stores.contract import Query, conditions_of
from coatcheck.stores.record_counts import RecordCount

T = TypeVar("T")
Row: TypeAlias = list[Any]

# At most 128 rows in one statement, below that a multiple of 16 and a rest. So any batch takes two
# or three statements, and there are 23 texts of each kind, which all stay compiled (5 MB).
_ROWS_MAX = 128
_ROWS_STEP = 16

_COLUMNS = (
    *("id", "version", "state", "attempt", "fingerprint"),
    *("age_ms", "lease_until_ms", "margin_ms", "expires_ms", "nonce"),
    *("label", "scope", "key", "progress", "response"),
)
_INTO = f"coatcheck_records ({', '.join(_COLUMNS)})"
_ROW_FIELDS = len(Record._fields)
_ROW = "(?{0},?{1},?{2},?{3},?{4},?{1}-?{5},?{6},?{8}-?{7},?{8},?{9},?{10},?{11},?{12},?{13},?{14}"

_CREATED_MS = "version - age_ms"
_SELECT = (
    f"select id, version, state, attempt, fingerprint, {_CREATED_MS}, lease_until_ms,"
    " expires_ms - margin_ms, expires_ms, nonce, label, scope, key, progress, response"
    " from coatcheck_records"
)

# Counts records by state and label; see `record_count_of`. `length` does not read a blob.
COUNT = (
    f"select state, label, count(*), min({_CREATED_MS}),"
    " sum(ifnull(length(progress), 0) + ifnull(length(response), 0))"
    " from coatcheck_records group by state, label"
)

# Change a record. `expires_ms` stays as it is, so no index is touched. A key that starts over after
# its window has another expiry; this statement then changes no row, and REPLACE_ONE does it.
_SET = (
    "version = ?2, state = ?3, attempt = ?4, fingerprint = ?5, age_ms = ?2 - ?6,"
    " lease_until_ms = ?7, margin_ms = ?9 - ?8, nonce = ?10, label = ?11, scope = ?12, key = ?13,"
    " progress = ?14, response = ?15"
)
_WHERE = "id = ?1 and version = ?16"
CHANGE_ONE = f"update coatcheck_records set {_SET} where {_WHERE} and expires_ms = ?9"
REPLACE_ONE = f"update coatcheck_records set {_SET}, expires_ms = ?9 where {_WHERE}"
DELETE_ONE = "delete from coatcheck_records where id = ? and version = ?"

# Uses the index on `expires_ms`, so records within their retention are not visited.
SWEEP = (
    "delete from coatcheck_records where n in ("
    "select n from coatcheck_records indexed by coatcheck_records_expires"
    " where expires_ms <= ?1 and version < ?1 and (state <> 0 or lease_until_ms <= ?1) limit ?2)"
)


def _row_marks(first: int) -> str:
    """Return the marks of one row (without its closing parenthesis), counting from *first*."""
    return _ROW.format(*range(first, first + _ROW_FIELDS))


@cache
def claim_many(rows: int) -> str:
    """Insert *rows* records, each if there is none with its id. Atomic as a whole."""
    values = ",".join(_row_marks(1 + n * _ROW_FIELDS) + ")" for n in range(rows))
    # "or rollback": without it SQLite copies every page that it changes, to be able to undo this
    # one statement. "on conflict (id)" names the index: if it is missing, SQLite refuses the
    # statement, and otherwise every claim of one key would succeed.
    return f"insert or rollback into {_INTO} values {values} on conflict (id) do nothing"


CLAIM_ONE = claim_many(1)


@cache
def change_many(rows: int) -> str:
    """Change *rows* records, each if it has the expected version. Atomic as a whole."""
    width = _ROW_FIELDS + 1
    values = ",".join(_row_marks(1 + n * width) + f",?{(n + 1) * width})" for n in range(rows))
    changes = ", ".join(
        f"{name} = v.column{number}"
        for number, name in enumerate(_COLUMNS, 1)
        if name not in ("id", "expires_ms")  # the indexed columns; see CHANGE_ONE
    )
    return (
        f"update or rollback coatcheck_records as r set {changes} from (values {values}) as v"
        " where r.id = v.column1 and r.version = v.column16 and r.expires_ms = v.column9"
    )


@cache
def read_many(rows: int) -> str:
    """Read the records of *rows* ids."""
    return f"{_SELECT} where id in ({','.join('?' * rows)})"


def chunks(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split *things* into the sizes for which there are statements."""
    start = 0
    while (left := len(things) - start) > 0:
        size = min(_ROWS_MAX, left - left % _ROWS_STEP or left)
        yield things[start : start + size]
        start += size


def read(connection: sqlite3.Connection, ids: Sequence[bytes]) -> dict[bytes, Record]:
    """Return the records of *ids* by id, without those that do not exist."""
    records: dict[bytes, Record] = {}
    for some in chunks(ids):
        for row in connection.execute(read_many(len(some)), some).fetchall():
            records[row[0]] = record_of(row)
    return records


def write_all(connection: sqlite3.Connection, swaps: Sequence[Swap]) -> bool:
    """Write *swaps* in a few statements; return False if any was not applied, or deletes."""
    writes = [(swap, row_of(swap.record)) for swap in swaps if swap.record is not None]
    claims = [row for swap, row in writes if not swap.expected]
    changes = [[*row, swap.expected] for swap, row in writes if swap.expected]
    applied = 0
    for statement_of, rows in ((claim_many, claims), (change_many, changes)):
        for some in chunks(rows):
            values = [value for row in some for value in row]
            applied += connection.execute(statement_of(len(some)), values).rowcount
    return applied == len(swaps)


def write_one(swap: Swap, *, change: str = CHANGE_ONE) -> tuple[str, Row]:
    """Return the statement and the parameters for *swap* alone; it is applied if a row changes."""
    if swap.record is None:
        return DELETE_ONE, [swap.id, swap.expected]
    row = row_of(swap.record)
    return (change, [*row, swap.expected]) if swap.expected else (CLAIM_ONE, row)


def is_applied(connection: sqlite3.Connection, swap: Swap) -> bool:
    """Execute *swap*, also one that changes the expiry; return whether it was applied."""
    return connection.execute(*write_one(swap, change=REPLACE_ONE)).rowcount == 1


def find(query: Query) -> tuple[str, list[object]]:
    """Return the statement and the parameters for *query*, with one row more than its limit."""
    filters = list(_filters(query))
    # "+id" keeps SQLite from using the index on `id`. With other conditions it would visit every
    # row in random order: 8 s for a million rows, where reading them in order takes half a second.
    id = "+id" if filters and not query.id_prefix else "id"
    conditions = [
        (f"{id} > ?", query.after_id),
        (f"{id} >= ?", query.id_prefix),
        (f"{id} <= ?", query.id_prefix.ljust(ID_BYTES, b"\xff")),
        *filters,
    ]
    where = " and ".join(text for text, _ in conditions)
    values = [value for _, value in conditions]
    order = f"{_CREATED_MS} desc, id desc" if query.newest_first else id
    return f"{_SELECT} where {where} order by {order} limit ?", [*values, query.limit + 1]


def _filters(query: Query) -> Iterator[tuple[str, object]]:
    encoders = {"key": _encode_key, "scope": _encode_scope, "label": _encode_text}
    for field, operator, value in conditions_of(query):
        column = _CREATED_MS if field == "created_ms" else field
        yield f"{column} {operator} ?", encoders[field](value) if field in encoders else value
    if query.expired_at_ms is not None:
        yield "expires_ms <= ?", query.expired_at_ms
        yield "version < ?", query.expired_at_ms
        yield "(state <> 0 or lease_until_ms <= ?)", query.expired_at_ms


def row_of(record: Record) -> Row:
    """Return the parameters that write *record*."""
    row: Row = list(record)
    row[10] = _encode_text(record.label)
    row[11] = _encode_scope(record.scope)
    row[12] = _encode_key(record.key)
    return row


def record_of(row: Sequence[Any]) -> Record:
    """Return the record in *row*."""
    label, scope, key, progress, response = row[10:]
    if type(label) is bytes:
        label = _unescape(label)
    if type(scope) is bytes:
        scope = scope.hex() if len(scope) == _SCOPE_BYTES else _unescape(scope)
    if type(key) is bytes:
        key = _uuid_text(key) if len(key) == _UUID_BYTES else _unescape(key)
    # Earlier releases wrote an empty or padded text where there was no progress or response.
    if type(progress) is str:
        progress = None
    if type(response) is str:
        response = None
    return Record._make((*row[:10], label, scope, key, progress, response))


def record_count_of(row: Sequence[Any]) -> RecordCount:
    """Return what a *row* of `COUNT` says."""
    state, label, *rest = row
    return RecordCount(State(state), _unescape(label) if type(label) is bytes else label, *rest)


_UUID_CHARS, _UUID_BYTES = 36, 16
_SCOPE_CHARS, _SCOPE_BYTES = 16, 8


def _encode_scope(scope: str) -> str | bytes:
    if len(scope) == _SCOPE_CHARS and (packed := _pack_hex(scope)):
        return packed
    return _encode_text(scope)


def _encode_key(key: str) -> str | bytes:
    if len(key) == _UUID_CHARS:
        packed = _pack_hex(key.replace("-", ""))
        if packed and _uuid_text(packed) == key:  # lower case, dashes in the usual places
            return packed
    return _encode_text(key)


def _pack_hex(digits: str) -> bytes | None:
    """Return the bytes that *digits* spell, if exactly these digits come back from them."""
    try:
        packed = bytes.fromhex(digits)
    except ValueError:
        return None
    return packed if packed.hex() == digits else None


def _uuid_text(packed: bytes) -> str:
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _encode_text(text: str) -> str | bytes:
    """
    Return *text*, or its escaped bytes if it is not valid Unicode (a path may hold any bytes).

    They begin with 0xff, which UTF-8 never contains, and never have the length of a packed text.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        escaped = b"\xff" + text.encode("utf-8", "surrogatepass")
        while len(escaped) in (_SCOPE_BYTES, _UUID_BYTES):
            escaped = b"\xff" + escaped
        return escaped
    return text


def _unescape(escaped: bytes) -> str:
    return escaped.lstrip(b"\xff").decode("utf-8", "surrogatepass")
