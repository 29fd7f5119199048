"""Rows of the SQLite store: how a record becomes one and comes back, and the statements for it.

Between `sqlite.py`, which says when, and the file. All arithmetic is in the statements, so that a
record goes to the driver nearly as it is; only the texts for people are packed here: a canonical
UUID as its 16 bytes, a digest of 16 hexadecimal characters as 8. What is packed is a blob and what
is not is text, so nothing else has to tell them apart.

Invariant: `record_of` of what `row_of` made is the same record, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias, TypeVar

from coatcheck.core.record import RUNNING, Record
from coatcheck.stores.contract import Query

T = TypeVar("T")
Row: TypeAlias = list[Any]

# 128 rows in a statement at most, and below that whole sixteens and a rest: two or three statements
# for any batch, and 23 texts of each kind, which all stay compiled and take 5 MB if all are used.
_ROWS_MAX = 128
_ROWS_STEP = 16

_COLUMNS = (
    *("id", "version", "state", "attempt", "fingerprint"),
    *("age_ms", "lease_until_ms", "margin_ms", "expires_ms", "nonce"),
    *("label", "scope", "key", "progress", "response"),
)
_INTO = f"coatcheck_records ({', '.join(_COLUMNS)})"
# The parameters of one row are the fields of a record in their order, and the expected version.
_ROW_FIELDS = len(Record._fields)
_ID, _FINGERPRINT, _PROGRESS, _RESPONSE = map(
    Record._fields.index, ("id", "fingerprint", "progress", "response")
)
_TEXTS = slice(Record._fields.index("label"), Record._fields.index("key") + 1)
_ROW = "(?{0},?{1},?{2},?{3},?{4},?{1}-?{5},?{6},?{8}-?{7},?{8},?{9},?{10},?{11},?{12},?{13},?{14}"

_SELECT = (
    "select id, version, state, attempt, fingerprint, version - age_ms, lease_until_ms,"
    " expires_ms - margin_ms, expires_ms, nonce, label, scope, key, progress, response"
    " from coatcheck_records"
)

# One plain statement for whoever is alone; the row is that of a batch. It leaves `expires_ms` as
# it is, so that no index is touched; a new life changes it, and is told apart by losing here.
CHANGE_ONE = (
    "update coatcheck_records set version = ?2, state = ?3, attempt = ?4, fingerprint = ?5,"
    " age_ms = ?2 - ?6, lease_until_ms = ?7, margin_ms = ?9 - ?8, nonce = ?10, label = ?11,"
    " scope = ?12, key = ?13, progress = ?14, response = ?15"
    " where id = ?1 and version = ?16 and expires_ms = ?9"
)
REPLACE_ONE = (
    "update coatcheck_records set version = ?2, state = ?3, attempt = ?4, fingerprint = ?5,"
    " age_ms = ?2 - ?6, lease_until_ms = ?7, margin_ms = ?9 - ?8, expires_ms = ?9, nonce = ?10,"
    " label = ?11, scope = ?12, key = ?13, progress = ?14, response = ?15"
    " where id = ?1 and version = ?16"
)
DELETE_ONE = "delete from coatcheck_records where id = ? and version = ?"

# Along the index on `expires_ms`, so that what is still kept is never looked at.
SWEEP = (
    "delete from coatcheck_records where n in ("
    "select n from coatcheck_records indexed by coatcheck_records_expires"
    " where expires_ms <= ?1 and version < ?1 and (state <> 0 or lease_until_ms <= ?1) limit ?2)"
)


def _row(before: int) -> str:
    """One row of values, after *before* parameters that belong to others."""
    return _ROW.format(*range(before + 1, before + _ROW_FIELDS + 1))


@cache
def claim_many(rows: int) -> str:
    """Insert *rows* records, each where there is none with its id. Atomic as a whole."""
    values = ",".join(_row(n * _ROW_FIELDS) + ")" for n in range(rows))
    # "or rollback" is for what cannot happen (a missing value). Without it SQLite would keep a
    # copy of every page it changes, to be able to undo the one statement alone. The index is named,
    # because where it is missing every claim would win; so none is made.
    return f"insert or rollback into {_INTO} values {values} on conflict (id) do nothing"


CLAIM_ONE = claim_many(1)


@cache
def change_many(rows: int) -> str:
    """Change *rows* records, each where the expected version stands. Atomic as a whole."""
    width = _ROW_FIELDS + 1
    values = ",".join(_row(n * width) + f",?{(n + 1) * width})" for n in range(rows))
    changes = ", ".join(
        f"{name} = v.column{number}"
        for number, name in enumerate(_COLUMNS, 1)
        if name not in ("id", "expires_ms")  # the indexed ones; see CHANGE_ONE
    )
    return (
        f"update or rollback coatcheck_records as r set {changes} from (values {values}) as v"
        " where r.id = v.column1 and r.version = v.column16 and r.expires_ms = v.column9"
    )


@cache
def read_many(rows: int) -> str:
    """Read the records of *rows* ids."""
    return f"{_SELECT} where id in ({_marks(rows)})"


@cache
def number_many(rows: int) -> str:
    """Read under which number each of *rows* ids was inserted."""
    return f"select id, n from coatcheck_records where id in ({_marks(rows)})"


def _marks(rows: int) -> str:
    return ",".join("?" * rows)


def portions(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """*things* in portions of the sizes that there are statements for."""
    start = 0
    while (left := len(things) - start) > 0:
        size = min(_ROWS_MAX, left - left % _ROWS_STEP or left)
        yield things[start : start + size]
        start += size


def find(query: Query) -> tuple[str, list[object]]:
    """The statement that finds what *query* asks for, and one more to see if there is more."""
    filters = list(_filters(query))
    # A "+" keeps SQLite from walking along the ids. With other conditions that would visit every
    # row at a random place: 8 s and more in a million; reading them in a row takes half of one.
    id = "+id" if filters and not query.id_prefix else "id"
    conditions = [(f"{id} >= ?", query.id_prefix), (f"{id} > ?", query.after_id), *filters]
    if (above := _above(query.id_prefix)) is not None:
        conditions.append((f"{id} < ?", above))
    where = " and ".join(text for text, _ in conditions)
    values = [value for _, value in conditions]
    return f"{_SELECT} where {where} order by {id} limit ?", [*values, query.limit + 1]


def _filters(query: Query) -> Iterator[tuple[str, object]]:
    if query.key is not None:
        yield "key = ?", pack_key(query.key)
    if query.label is not None:
        yield "label = ?", pack_label(query.label)
    if query.state is not None:
        yield "state = ?", query.state
    if query.created_before_ms is not None:
        yield "version - age_ms < ?", query.created_before_ms
    if query.expired_at_ms is not None:
        yield "expires_ms <= ?", query.expired_at_ms
        yield "version < ?", query.expired_at_ms
        yield "(state <> 0 or lease_until_ms <= ?)", query.expired_at_ms


def _above(prefix: bytes) -> bytes | None:
    """The first bytes that come after all that begin with *prefix*; None where there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def row_of(record: Record, *, compact: bool) -> Row:
    """The parameters that write *record* by itself, on whatever driver the application has."""
    texts = _nothing("", "", "") if compact else _packed(record.label, record.scope, record.key)
    plain = [text if isinstance(text, str) else bytes(text) for text in texts]
    return [*record[:10], *plain, record.progress, record.response]


class Packer:
    """
    Makes rows of records, for one caller at a time.

    What is short and in every record goes as a `bytearray`, and None as an empty text: for `bytes`
    and None the driver first asks whether anybody would like to adapt them, which fails, and was
    a quarter of all instructions of a batch of 64.

    A claim leaves room for the answer that will come. A row that grows splits its page and leaves
    half-empty ones, a twentieth of the file at 64 at a time; one that keeps its size is completed
    where it stands. The room is a text in `response`, where an answer is a blob.
    """

    def __init__(self, *, compact: bool) -> None:
        self._packed = _nothing if compact else _packed
        # Of the answers so far, the later ones counting more: how long, and how far from that.
        self._typical_bytes = 0.0
        self._spread_bytes = 0.0
        self._room = ""

    def rows_of(self, records: Sequence[Record]) -> list[Row]:
        """The parameters that write *records*."""
        answer = records[0].response
        if answer is not None:  # one of a batch stands for all of it
            self._learn(len(answer), min(len(records), _WEIGHT_MAX))
        return [self._row(record) for record in records]

    def row_of(self, record: Record) -> Row:
        """The parameters that write *record*."""
        if record.response is not None:
            self._learn(len(record.response), 1)
        return self._row(record)

    def _row(self, record: Record) -> Row:
        row: Row = list(record)
        row[_ID] = bytearray(record.id)
        row[_FINGERPRINT] = bytearray(record.fingerprint)
        row[_TEXTS] = self._packed(record.label, record.scope, record.key)
        if record.progress is None:
            row[_PROGRESS] = ""
        if record.response is None:
            row[_RESPONSE] = self._room if record.state == RUNNING else ""
        return row

    def _learn(self, response_bytes: int, weight: int) -> None:
        off_bytes = response_bytes - self._typical_bytes
        self._typical_bytes += off_bytes * weight / _MEMORY
        self._spread_bytes += (abs(off_bytes) - self._spread_bytes) * weight / _MEMORY
        # Less where answers differ in length: room that stays empty is lost, too.
        room_bytes = round(self._typical_bytes - 3 * self._spread_bytes) - _LEASE_BYTES
        self._room = _ROOM[: max(0, room_bytes)]


# 512: with longer answers a page has room for few rows, and empty room would cost more.
_ROOM = " " * 512
# 16: what is typical follows a change within some dozens of answers.
_MEMORY = 16
# 8: of a large batch one answer is looked at, and counts like this many.
_WEIGHT_MAX = 8
# What the lease takes in a claim, and leaves to the answer.
_LEASE_BYTES = 6


def record_of(row: Sequence[Any]) -> Record:
    """The record that *row* was made of."""
    label, scope, key = row[10:13]
    if type(label) is bytes:
        label = _unescaped(label)
    if type(scope) is bytes:
        scope = scope.hex() if len(scope) == _SCOPE_BYTES else _unescaped(scope)
    if type(key) is bytes:
        key = _uuid_text(key) if len(key) == _UUID_BYTES else _unescaped(key)
    progress, response = row[13:]
    if type(progress) is str:
        progress = None
    if type(response) is str:
        response = None
    return Record._make((*row[:10], label, scope, key, progress, response))


_UUID_CHARS, _UUID_BYTES = 36, 16
_SCOPE_CHARS, _SCOPE_BYTES = 16, 8


# What is stored of a text that people read. Bytes are packed, or escaped because they must be.
Packed: TypeAlias = str | bytearray


def _packed(label: str, scope: str, key: str) -> tuple[Packed, Packed, Packed]:
    return pack_label(label), _pack_scope(scope), pack_key(key)


def _nothing(_label: str, _scope: str, _key: str) -> tuple[Packed, Packed, Packed]:
    return "", "", ""


def pack_label(label: str) -> Packed:
    """*label* as it is stored."""
    return label if label.isascii() else _encodable(label)


def _pack_scope(scope: str) -> Packed:
    if len(scope) == _SCOPE_CHARS:
        return _pack_hex(scope) or _encodable(scope)
    return scope if scope.isascii() else _encodable(scope)


def pack_key(key: str) -> Packed:
    """*key* as it is stored; only a UUID that is spelt the usual way is packed."""
    if len(key) == _UUID_CHARS and key[8:24:5] == "----":
        bare = key.replace("-", "")
        if len(bare) == 2 * _UUID_BYTES and (packed := _pack_hex(bare)):
            return packed
    return key if key.isascii() else _encodable(key)


def _pack_hex(digits: str) -> bytearray | None:
    """The bytes that *digits* spell, if no other digits would come back from them."""
    try:
        packed = bytearray.fromhex(digits)
    except ValueError:
        return None
    return packed if packed.hex() == digits else None


def _uuid_text(packed: bytes) -> str:
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _encodable(text: str) -> Packed:
    """
    *text*, or where it is not proper Unicode (a path may hold any bytes) its escaped bytes.

    They begin with 0xff, which UTF-8 never does, and never have the length of something packed.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        escaped = b"\xff" + text.encode("utf-8", "surrogatepass")
        while len(escaped) in (_SCOPE_BYTES, _UUID_BYTES):
            escaped = b"\xff" + escaped
        return bytearray(escaped)
    return text


def _unescaped(escaped: bytes) -> str:
    return escaped.lstrip(b"\xff").decode("utf-8", "surrogatepass")
