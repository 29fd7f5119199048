"""Rows of the PostgreSQL store: how a record becomes one and comes back, and the statements for it.

A batch is one statement, whatever its size: the columns go as arrays, `unnest` makes rows of them,
and what comes back is whoever lost, with the record that stood when the statement began. Rows are
sorted by id, so that two batches meet in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.record import Record, Swap
from coatcheck.core.scope import ID_BYTES
from coatcheck.stores.contract import Query
from coatcheck.stores.postgres_arrays import PACKED

Row: TypeAlias = tuple[Any, ...]

_TYPES = {
    "id": "bytea",
    "version": "bigint",
    "state": "smallint",
    "attempt": "integer",
    "fingerprint": "bytea",
    "created_ms": "bigint",
    "lease_until_ms": "bigint",
    "window_until_ms": "bigint",
    "expires_ms": "bigint",
    "nonce": "bigint",
    "label": "text",
    "scope": "text",
    "key": "text",
    "progress": "bytea",
    "response": "bytea",
}
assert tuple(_TYPES) == Record._fields
_COLUMNS = ", ".join(_TYPES)
_CHANGEABLE = [name for name in _TYPES if name != "id"]


class Statements(NamedTuple):
    """What is said to the server, for one table; in bytes, for the driver takes no other."""

    claim_one: bytes
    change_one: bytes
    delete_one: bytes
    swap_many: bytes
    read: bytes
    select: bytes
    sweep: bytes


def statements_for(table: str) -> Statements:
    """The statements for *table*, a name that is quoted already."""
    marks = ", ".join(f"%s::{type}" for type in _TYPES.values())
    arrays = ", ".join(["%s"] * (1 + len(_TYPES)))
    changes = ", ".join(f"{name} = g.{name}" for name in _CHANGEABLE)
    assignments = ", ".join(f"{name} = %s::{_TYPES[name]}" for name in _CHANGEABLE)
    texts = {
        "claim_one": f"insert into {table} ({_COLUMNS}) values ({marks}) on conflict do nothing",
        "change_one": f"update {table} set {assignments} where id = %s and version = %s",
        "delete_one": f"delete from {table} where id = %s and version = %s",
        "swap_many": f"""
            with given as materialized (
              select * from unnest({arrays}) as g (expected, {_COLUMNS})
            ), claimed as (
              insert into {table} ({_COLUMNS}) select {_COLUMNS} from given
              where expected = 0 order by id on conflict (id) do nothing returning id
            ), changed as (
              update {table} as r set {changes} from given as g
              where r.id = g.id and r.version = g.expected and g.expected <> 0 returning r.id
            ), lost as materialized (
              select id from given where id not in (
                select id from claimed union all select id from changed)
            )
            select lost.id, r.* from lost left join lateral (
              select {_COLUMNS} from {table} as r where r.id = lost.id
            ) as r on true
        """,
        "read": f"select {_COLUMNS} from {table} where id = any(%s::bytea[])",
        "select": f"select {_COLUMNS} from {table}",
        # Along the index on `expires_ms`; what somebody else holds is left for the next time.
        "sweep": f"""
            delete from {table} where id in (
              select id from {table} where expires_ms <= %(now)s and version < %(now)s
              and (state <> 0 or lease_until_ms <= %(now)s)
              order by expires_ms limit %(limit)s for update skip locked)
        """,
    }
    return Statements(**{name: text.encode() for name, text in texts.items()})


def row_of(record: Record, *, compact: bool) -> Row:
    """The values that write *record*."""
    if compact:
        return (*record[:10], "", "", "", *record[13:])
    label, scope, key = record[10:13]
    return (*record[:10], pack_text(label), pack_text(scope), pack_text(key), *record[13:])


def columns_of(swaps: Sequence[Swap], *, compact: bool) -> list[bytes]:
    """The arrays that write *swaps*, which are sorted by id and delete nothing."""
    rows = [
        (swap.expected, *row_of(swap.record, compact=compact))
        for swap in swaps
        if swap.record is not None
    ]
    columns = zip(*rows, strict=True)
    return [pack(column) for pack, column in zip(_PACKED, columns, strict=True)]


_PACKED = [PACKED[type] for type in ("bigint", *_TYPES.values())]


def record_of(row: Row) -> Record:
    """The record that *row* was made of."""
    label, scope, key = row[10:13]
    return Record._make(
        (*row[:10], unpack_text(label), unpack_text(scope), unpack_text(key), *row[13:])
    )


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
    where = " and ".join(text for text, _ in conditions)
    values = [value for _, value in conditions]
    text = b"%b where %b order by id limit %%s" % (select, where.encode())
    return text, [*values, query.limit + 1]


def _conditions(query: Query) -> Iterator[tuple[str, object]]:
    yield "id > %s", query.after_id
    if query.id_prefix:
        yield "id >= %s", query.id_prefix
        yield "id <= %s", query.id_prefix.ljust(ID_BYTES, b"\xff")
    if query.key is not None:
        yield "key = %s", pack_text(query.key)
    if query.label is not None:
        yield "label = %s", pack_text(query.label)
    if query.state is not None:
        yield "state = %s", query.state
    if query.created_before_ms is not None:
        yield "created_ms < %s", query.created_before_ms
    if query.expired_at_ms is not None:
        yield "expires_ms <= %s", query.expired_at_ms
        yield "version < %s", query.expired_at_ms
        yield "(state <> 0 or lease_until_ms <= %s)", query.expired_at_ms
