"""Rows of the PostgreSQL store: how a record becomes one and comes back, and the statements for it.

A batch is one statement, whatever its size: the columns go as arrays, `unnest` makes rows of them,
and what comes back is whoever lost, with the record that stood when the statement began. Rows are
sorted by id, so that two batches meet in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import sub
from typing import Any, NamedTuple, TypeAlias

from psycopg.adapt import Transformer
from psycopg.pq.abc import PGresult

from coatcheck.core.record import Record, Swap, new_record
from coatcheck.core.scope import ID_BYTES
from coatcheck.stores.contract import Query
from coatcheck.stores.postgres_arrays import PACKED, UUID_BYTES

Row: TypeAlias = tuple[Any, ...]

# What is kept as null: the published window ends an hour before the record may be swept.
_MARGIN_MS = 3_600_000
# For each field of a record: its column, the type in which it is given, and what is kept of it.
_COLUMNS = (
    ("id", "uuid", "{}"),
    ("version", "bigint", "{}"),
    ("state", "smallint", "{}"),
    ("attempt", "integer", "nullif({}, 1)"),
    ("fingerprint", "uuid", "{}"),
    ("age_ms", "bigint", "nullif({}, 1)"),
    ("lease_until_ms", "bigint", "nullif({}, 0)"),
    ("margin_ms", "bigint", f"nullif({{}}, {_MARGIN_MS})"),
    ("expires_ms", "bigint", "{}"),
    ("nonce", "bigint", "{}"),
    ("label", "text", "nullif({}, '')"),
    ("scope", "text", "nullif({}, '')"),
    ("key", "text", "nullif({}, '')"),
    ("progress", "bytea", "{}"),
    ("response", "bytea", "{}"),
)
assert len(_COLUMNS) == len(Record._fields)
_NAMES = ", ".join(name for name, _, _ in _COLUMNS)
# The server keeps statistics of it in this form, and knows it in no other (`postgres_schema.py`).
CREATED_MS = "version - coalesce(age_ms, 1)"
# The fields in their order, as numbers, bytes and texts.
_FIELDS = f"""
    uuid_send(id), version, state, coalesce(attempt, 1), coalesce(uuid_send(fingerprint), ''),
    ({CREATED_MS})::bigint, coalesce(lease_until_ms, 0),
    (expires_ms - coalesce(margin_ms, 3600000))::bigint, expires_ms, nonce,
    coalesce(label, ''), coalesce(scope, ''), coalesce(key, ''), progress, response
"""
# What a sweep may take; the first is what the index knows.
_IS_OVER = (
    "expires_ms / 1000 <= {}::bigint / 1000",
    "expires_ms <= {}",
    "version < {}",
    "(state <> 0 or coalesce(lease_until_ms, 0) <= {})",
)


class Statements(NamedTuple):
    """What is said through a driver, for one table; in bytes, for ours takes no other."""

    select: bytes
    sweep: bytes


def statements_for(table: str) -> Statements:
    """The statements for *table*, a name that is quoted already."""
    texts = {
        "select": f"select {_FIELDS} from {table}",
        "sweep": _sweep(table),
    }
    return Statements(**{name: text.encode() for name, text in texts.items()})


# For each column, in their order, where a value goes that any driver can send; see `kept_of`.
MARKS = {name: f"%s::{type}" for name, type, _ in _COLUMNS}


def _claim_one(table: str, marks: dict[str, str]) -> str:
    values = ", ".join(marks.values())
    return f"insert into {table} ({_NAMES}) values ({values}) on conflict (id) do nothing"


def _change_one(table: str, marks: dict[str, str]) -> str:
    changes = ", ".join(f"{name} = {mark}" for name, mark in marks.items() if name != "id")
    return f"update {table} set {changes}"


class Prepared(NamedTuple):
    """A statement that is said so often that the server may keep it, under a name."""

    name: bytes
    text: bytes


class Sayings(NamedTuple):
    """What is said all the time about one table, with values in the server's binary format."""

    claim_one: Prepared  # values: `values_of`
    change_one: Prepared  # the same, and the version that is expected
    delete_one: Prepared
    claim_many: Prepared  # values: `columns_of`, as for the next two
    change_many: Prepared
    swap_many: Prepared  # some of each
    read_many: Prepared


def sayings_for(table: str) -> Sayings:
    """What is said about *table*, a name that is quoted already."""
    marks = {name: f"${number}::{type}" for number, (name, type, _) in enumerate(_COLUMNS, 1)}
    expected = f"${len(_COLUMNS) + 1}"
    texts = {
        "claim_one": _claim_one(table, marks),
        "change_one": f"{_change_one(table, marks)} where id = $1 and version = {expected}",
        "delete_one": f"delete from {table} where id = $1 and version = $2",
        **_many(table),
        "read_many": f"select {_FIELDS} from {table} where id = any($1)",
    }
    return Sayings(
        **{
            name: Prepared(f"coatcheck_{name}".encode(), text.encode())
            for name, text in texts.items()
        }
    )


def _many(table: str) -> dict[str, str]:
    """One statement for a batch; each of its swaps is atomic. Most batches are of one kind."""
    types = ["bigint", *(type for _, type, _ in _COLUMNS)]
    arrays = ", ".join(f"${number}::{type}[]" for number, type in enumerate(types, 1))
    given = f"unnest({arrays}) as g (expected, {_NAMES})"
    kept = ", ".join(kept.format(name) for name, _, kept in _COLUMNS)
    marks = {name: kept.format(f"g.{name}") for name, _, kept in _COLUMNS}
    claim = f"insert into {table} ({_NAMES}) select {kept} from"
    claimed = "on conflict (id) do nothing returning id"
    change = f"{_change_one(f'{table} as r', marks)} from"
    changed = "where r.id = g.id and r.version = g.expected"
    lost = f"""
        select r.*, uuid_send(lost.id) from unnest($2::uuid[]) as lost (id) left join lateral (
          select {_FIELDS} from {table} as r where r.id = lost.id
        ) as r on true where lost.id not in"""
    return {
        "claim_many": f"with won as ({claim} {given} {claimed}) {lost} (select id from won)",
        "change_many": f"""
            with won as ({change} {given} {changed} returning r.id) {lost} (select id from won)""",
        "swap_many": f"""
            with given as materialized (
              select * from {given}
            ), claimed as (
              {claim} given where expected = 0 order by id {claimed}
            ), changed as (
              {change} given as g {changed} and g.expected <> 0 returning r.id
            )
            {lost} (select id from claimed union all select id from changed)""",
    }


def _sweep(table: str) -> str:
    """
    Along the index; what somebody else holds is left for the next time.

    It waits for no disk, so that no claim waits for it there: what a crash brings back is swept
    again, and whatever is acknowledged later stands behind it in the log.
    """
    is_over = " and ".join(_IS_OVER).replace("{}", "%(now)s")
    return f"""
        with lazily as materialized (
          select set_config('synchronous_commit', 'off', true) as said
        )
        delete from {table} where (select said from lazily) is not null and ctid = any(array(
          select ctid from {table} where {is_over}
          order by expires_ms / 1000 limit %(limit)s for update skip locked))
    """


def row_of(record: Record, *, compact: bool) -> Row:
    """The values that write *record*."""
    texts = _NO_TEXTS if compact else _texts(record[10:13])
    created_ms, lease_until_ms, window_until_ms, expires_ms = record[5:9]
    times_ms = (record[1] - created_ms, lease_until_ms, expires_ms - window_until_ms)
    return (*record[:5], *times_ms, *record[8:10], *texts, *record[13:])


_NO_TEXTS = ("", "", "")


def kept_of(record: Record, *, compact: bool) -> Row:
    """
    The same as it is kept, in what any driver can send: digests in hex, null where it is usual.

    Where the server is to make it so, it prepares a function for each value, each time.
    """
    row = row_of(record, compact=compact)
    id, version, state, attempt, fingerprint, age_ms, lease_until_ms, margin_ms = row[:8]
    expires_ms, nonce, label, scope, key, progress, response = row[8:]
    return (
        id.hex(),
        version,
        state,
        None if attempt == 1 else attempt,
        fingerprint.hex() or None,
        None if age_ms == 1 else age_ms,
        lease_until_ms or None,
        None if margin_ms == _MARGIN_MS else margin_ms,
        expires_ms,
        nonce,
        label or None,
        scope or None,
        key or None,
        progress,
        response,
    )


def values_of(record: Record, *, compact: bool) -> list[bytes | None]:
    """The same in the binary format."""
    row = row_of(record, compact=compact)
    id, version, state, attempt, fingerprint, age_ms, lease_until_ms, margin_ms = row[:8]
    expires_ms, nonce, label, scope, key, progress, response = row[8:]
    return [
        _digest(id),
        bigint(version),
        _smallint(state),
        None if attempt == 1 else _integer(attempt),
        _digest(fingerprint),
        None if age_ms == 1 else bigint(age_ms),
        bigint(lease_until_ms) if lease_until_ms else None,
        None if margin_ms == _MARGIN_MS else bigint(margin_ms),
        bigint(expires_ms),
        bigint(nonce),
        label.encode() or None,
        scope.encode() or None,
        key.encode() or None,
        progress,
        response,
    ]


def bound_for(id: bytes, expected: int) -> list[bytes | None]:
    """An id and a version."""
    return [_digest(id), bigint(expected)]


def _digest(value: bytes) -> bytes | None:
    if len(value) not in (UUID_BYTES, 0):
        raise ValueError(f"{len(value)} bytes, where PostgreSQL keeps {UUID_BYTES}")
    return value or None


bigint = struct.Struct(">q").pack
_integer = struct.Struct(">i").pack
_smallint = struct.Struct(">h").pack


def columns_of(swaps: Sequence[Swap], *, compact: bool) -> list[bytes]:
    """The arrays that write *swaps*, which are sorted by id and delete nothing."""
    # Column by column: of most of them there is little to be done for each record.
    records = [swap.record for swap in swaps if swap.record is not None]
    fields: list[Sequence[Any]] = [*zip(*records, strict=True)]
    versions, created_ms, window_until_ms, expires_ms = (fields[n] for n in (1, 5, 7, 8))
    fields[5] = [*map(sub, versions, created_ms)]
    fields[7] = [*map(sub, expires_ms, window_until_ms)]
    for number in (10, 11, 12):
        fields[number] = [""] * len(swaps) if compact else _texts(fields[number])
    fields.insert(0, [swap.expected for swap in swaps])
    return [pack(column) for pack, column in zip(_PACKED, fields, strict=True)]


def _texts(texts: Sequence[str]) -> Sequence[str]:
    together = "".join(texts)
    is_plain = together.isascii() and "\0" not in together and _ESCAPE not in together
    return texts if is_plain else [*map(pack_text, texts)]


_PACKED = [PACKED[type] for type in ("bigint", *(type for _, type, _ in _COLUMNS))]


def ids_of(ids: Sequence[bytes]) -> bytes:
    """The array that asks for *ids*."""
    return PACKED["uuid"](ids)


def record_of(row: Row) -> Record:
    """The record whose fields *row* has."""
    record = new_record(row)
    if _ESCAPE in record[10] or _ESCAPE in record[11] or _ESCAPE in record[12]:
        return new_record((*row[:10], *map(unpack_text, row[10:13]), *row[13:]))
    return record


def records_of(result: PGresult) -> list[Record]:
    """The records whose fields are in *result*."""
    return [record_of(row) for row in _rows_of(result)]


def stood_of(result: PGresult) -> dict[bytes, Record | None]:
    """Of whoever lost in a batch, by its id: what stood when the statement began."""
    return {row[-1]: None if row[0] is None else record_of(row[:-1]) for row in _rows_of(result)}


def _rows_of(result: PGresult) -> list[Row]:
    count = result.ntuples
    if not count:
        return []
    reading = Transformer()
    reading.set_pgresult(result)
    return reading.load_rows(0, count, tuple)


_ESCAPE = "\x1b"


def pack_text(text: str) -> str:
    """*text* as PostgreSQL can hold it: it knows no NUL and nothing but proper Unicode."""
    if text.isascii() and "\0" not in text and not text.startswith(_ESCAPE):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        if "\0" not in text and not text.startswith(_ESCAPE):
            return text
    return _ESCAPE + text.encode("utf-8", "surrogatepass").hex()


def unpack_text(packed: str) -> str:
    """What `pack_text` made *packed* of."""
    if not packed.startswith(_ESCAPE):
        return packed
    return bytes.fromhex(packed[1:]).decode("utf-8", "surrogatepass")


def find(query: Query, select: bytes) -> tuple[bytes, list[object]]:
    """The statement that finds what *query* asks for, and one more to see if there is more."""
    conditions = list(_conditions(query))
    where = " and ".join(["true", *(text for text, _ in conditions)])
    values = [value for _, given in conditions for value in given]
    text = b"%b where %b order by id limit %%s" % (select, where.encode())
    return text, [*values, query.limit + 1]


def _conditions(query: Query) -> Iterator[tuple[str, Sequence[object]]]:
    """
    Each in a form of which the planner knows how rare it is, from its statistics.

    There is no index for most of them, because completing would have to touch it. So it is either
    all of the table, or along the ids until there are enough; who takes the rare for frequent goes
    through all of them in that order, which takes many times as long.
    """
    if query.after_id:
        yield "id > %s::uuid", (query.after_id.hex(),)
    if query.id_prefix:
        yield "id >= %s::uuid", (query.id_prefix.ljust(ID_BYTES, b"\x00").hex(),)
        yield "id <= %s::uuid", (query.id_prefix.ljust(ID_BYTES, b"\xff").hex(),)
    for name, text in (("key", query.key), ("label", query.label)):
        if text is not None:
            yield (f"{name} = %s", (pack_text(text),)) if text else (f"{name} is null", ())
    if query.state is not None:
        yield "state = %s", (query.state,)
    if query.created_before_ms is not None:
        yield f"{CREATED_MS} < %s", (query.created_before_ms,)
    if query.expired_at_ms is not None:
        yield from ((text.format("%s"), (query.expired_at_ms,)) for text in _IS_OVER)
