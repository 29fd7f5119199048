"""Rows of the PostgreSQL store: how a record becomes one and comes back, and the statements for it.

A batch is one statement, whatever its size: the columns go as arrays, `unnest` makes rows of them,
and what comes back is whoever lost, with the record that stood when the statement began. Rows are
sorted by id, so that two batches meet in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.record import Record, Swap, new_record
from coatcheck.core.scope import ID_BYTES
from coatcheck.stores.contract import Query
from coatcheck.stores.postgres_arrays import PACKED

Row: TypeAlias = tuple[Any, ...]

# For each field of a record: its column, the type in which it is given, and what is kept of it.
_COLUMNS = (
    ("id", "uuid", "{}"),
    ("version", "bigint", "{}"),
    ("state", "smallint", "{}"),
    ("attempt", "integer", "nullif({}, 1)"),
    ("fingerprint", "uuid", "{}"),
    ("age_ms", "bigint", "nullif({}, 1)"),
    ("lease_until_ms", "bigint", "nullif({}, 0)"),
    ("margin_ms", "bigint", "nullif({}, 3600000)"),
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
# The fields in their order, as numbers, bytes and texts.
_FIELDS = """
    uuid_send(id), version, state, coalesce(attempt, 1), coalesce(uuid_send(fingerprint), ''),
    (version - coalesce(age_ms, 1))::bigint, coalesce(lease_until_ms, 0),
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
    """What is said to the server, for one table; in bytes, for the driver takes no other."""

    claim_one: bytes
    change_one: bytes
    delete_one: bytes
    read_one: bytes
    swap_many: bytes
    read_many: bytes
    select: bytes
    sweep: bytes


def statements_for(table: str) -> Statements:
    """The statements for *table*, a name that is quoted already."""
    texts = {
        **_alone(table),
        "swap_many": _swap_many(table),
        "read_many": f"select {_FIELDS} from {table} where id = any(%s)",
        "select": f"select {_FIELDS} from {table}",
        "sweep": _sweep(table),
    }
    return Statements(**{name: text.encode() for name, text in texts.items()})


def _alone(table: str) -> dict[str, str]:
    """Plain statements about one record, whose values any driver can send and fetch."""
    marks = {name: kept.format(_mark(type)) for name, type, kept in _COLUMNS}
    values = ", ".join(marks.values())
    changes = ", ".join(f"{name} = {mark}" for name, mark in marks.items() if name != "id")
    return {
        "claim_one": f"insert into {table} ({_NAMES}) values ({values}) on conflict do nothing",
        "change_one": f"update {table} set {changes} where id = {_ID} and version = %s",
        "delete_one": f"delete from {table} where id = {_ID} and version = %s",
        "read_one": f"select {_FIELDS} from {table} where id = {_ID}",
    }


def _mark(type: str) -> str:
    """Where a value goes; a digest goes as its bytes, or as none."""
    return "nullif(encode(%s::bytea, 'hex'), '')::uuid" if type == "uuid" else f"%s::{type}"


_ID = _mark("uuid")


def _swap_many(table: str) -> str:
    """One statement for a batch; each of its swaps is atomic."""
    arrays = ", ".join(["%s"] * (1 + len(_COLUMNS)))
    kept = ", ".join(kept.format(name) for name, _, kept in _COLUMNS)
    changes = ", ".join(
        f"{name} = {kept.format(f'g.{name}')}" for name, _, kept in _COLUMNS if name != "id"
    )
    return f"""
        with given as materialized (
          select * from unnest({arrays}) as g (expected, {_NAMES})
        ), claimed as (
          insert into {table} ({_NAMES}) select {kept} from given
          where expected = 0 order by id on conflict (id) do nothing returning id
        ), changed as (
          update {table} as r set {changes} from given as g
          where r.id = g.id and r.version = g.expected and g.expected <> 0 returning r.id
        ), lost as materialized (
          select id from given where id not in (
            select id from claimed union all select id from changed)
        )
        select uuid_send(lost.id), r.* from lost left join lateral (
          select {_FIELDS} from {table} as r where r.id = lost.id
        ) as r on true
    """


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
    texts = _NO_TEXTS if compact else map(pack_text, record[10:13])
    created_ms, lease_until_ms, window_until_ms, expires_ms = record[5:9]
    times_ms = (record[1] - created_ms, lease_until_ms, expires_ms - window_until_ms)
    return (*record[:5], *times_ms, *record[8:10], *texts, *record[13:])


_NO_TEXTS = ("", "", "")


def columns_of(swaps: Sequence[Swap], *, compact: bool) -> list[bytes]:
    """The arrays that write *swaps*, which are sorted by id and delete nothing."""
    rows = [
        (swap.expected, *row_of(swap.record, compact=compact))
        for swap in swaps
        if swap.record is not None
    ]
    columns = zip(*rows, strict=True)
    return [pack(column) for pack, column in zip(_PACKED, columns, strict=True)]


_PACKED = [PACKED[type] for type in ("bigint", *(type for _, type, _ in _COLUMNS))]


def ids_of(ids: Sequence[bytes]) -> bytes:
    """The array that asks for *ids*."""
    return PACKED["uuid"](ids)


def record_of(row: Row) -> Record:
    """The record whose fields *row* has."""
    return new_record((*row[:10], *map(unpack_text, row[10:13]), *row[13:]))


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
    values = [value for _, value in conditions]
    text = b"%b where %b order by id limit %%s" % (select, where.encode())
    return text, [*values, query.limit + 1]


def _conditions(query: Query) -> Iterator[tuple[str, object]]:
    if query.after_id:
        yield f"id > {_ID}", query.after_id
    if query.id_prefix:
        yield f"id >= {_ID}", query.id_prefix.ljust(ID_BYTES, b"\x00")
        yield f"id <= {_ID}", query.id_prefix.ljust(ID_BYTES, b"\xff")
    if query.key is not None:
        yield "coalesce(key, '') = %s", pack_text(query.key)
    if query.label is not None:
        yield "coalesce(label, '') = %s", pack_text(query.label)
    if query.state is not None:
        yield "state = %s", query.state
    if query.created_before_ms is not None:
        yield "version - coalesce(age_ms, 1) < %s", query.created_before_ms
    if query.expired_at_ms is not None:
        yield from ((text.format("%s"), query.expired_at_ms) for text in _IS_OVER)
