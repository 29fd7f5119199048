"""The SQL of the PostgreSQL store, and how a record becomes a row and comes back.

A batch of any size is one statement: the columns are sent as arrays, `unnest` makes rows of them,
and the conflicts come back with the record as of the statement's snapshot. A single swap has a
simpler statement, because one with arrays takes a quarter more time. Parameters are `$1`, `$2` …,
which psycopg's `RawCursor` and asyncpg both understand. Every statement that swaps or reads returns
rows, so that neither driver needs a row count.

Invariant: default values are stored as NULL, which takes no space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import GONE, Record, State, Swap, new_record
from coatcheck.stores.contract import Query, conditions_of
from coatcheck.stores.record_counts import RecordCount

Row: TypeAlias = Sequence[Any]

# For each field of a record, in its order: the column, and the type of its parameter.
_TYPES = {
    "id": "uuid",
    "version": "bigint",
    "state": "smallint",
    "attempt": "integer",
    "fingerprint": "uuid",
    "age_ms": "bigint",
    "lease_until_ms": "bigint",
    "margin_ms": "bigint",
    "expires_ms": "bigint",
    "nonce": "bigint",
    "label": "text",
    "scope": "text",
    "key": "text",
    "progress": "bytea",
    "response": "bytea",
}
assert len(_TYPES) == len(Record._fields)
_NAMES = ", ".join(_TYPES)
# 1 h, the default of a policy: how long before its deletion the published window of a record ends.
_MARGIN_MS = 3_600_000
# `schema.py` has the server keep statistics of exactly this expression.
CREATED_MS = "version - coalesce(age_ms, 1)"
# The fields of a record, in their order.
_FIELDS = f"""
    uuid_send(id), version, state, coalesce(attempt, 1), coalesce(uuid_send(fingerprint), ''),
    ({CREATED_MS})::bigint, coalesce(lease_until_ms, 0),
    (expires_ms - coalesce(margin_ms, {_MARGIN_MS}))::bigint, expires_ms, nonce,
    coalesce(label, ''), coalesce(scope, ''), coalesce(key, ''), progress, response
"""
# Retention is over; the first condition is the expression of the index. {0} is the time.
_RETENTION_IS_OVER = (
    "expires_ms / 1000 <= {0}::bigint / 1000 and expires_ms <= {0}::bigint"
    " and version < {0}::bigint and (state <> 0 or coalesce(lease_until_ms, 0) <= {0}::bigint)"
)

# Each column with a placeholder that any driver of an application understands (`transaction.py`).
PLACEHOLDERS = {name: f"%s::{type}" for name, type in _TYPES.items()}


class Statements(NamedTuple):
    """The SQL for one table."""

    swap_many: str  # parameters: `columns_of`
    claim_one: str  # `row_of`
    change_one: str  # `row_of`, and the expected version
    delete_one: str  # an id and the expected version
    read_many: str  # an array of ids
    select: str
    count_all: str  # by state and label; see `record_count_of`
    sweep: str


def statements_for(table: str) -> Statements:
    """Return the statements for *table*, a name that is already quoted."""
    marks = {name: f"${number}::{type}" for number, (name, type) in enumerate(_TYPES.items(), 1)}
    claim = f"insert into {table} ({_NAMES}) values ({', '.join(marks.values())})"
    change = f"update {table} set {_assignments(marks)}"
    expected = f"${len(marks) + 1}::bigint"
    return Statements(
        swap_many=_swap_many(table),
        claim_one=_swap_one(table, f"{claim} on conflict (id) do nothing"),
        change_one=_swap_one(table, f"{change} where id = $1 and version = {expected}"),
        delete_one=f"delete from {table} where id = $1::uuid and version = $2::bigint returning 1",
        read_many=f"select {_FIELDS} from {table} where id = any($1::uuid[])",
        select=f"select {_FIELDS} from {table}",
        count_all=_count(table),
        sweep=_sweep(table),
    )


def _assignments(values: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items() if name != "id")


def _swap_many(table: str) -> str:
    """
    Return the statement that claims and changes records, each of them atomically.

    It returns the conflicts: the record as of the statement's snapshot, and the id.
    """
    types = ["bigint", *_TYPES.values()]
    arrays = ", ".join(f"${number}::{type}[]" for number, type in enumerate(types, 1))
    return f"""
        with given as materialized (
          select * from unnest({arrays}) as g (expected, {_NAMES})
        ), claimed as (
          insert into {table} ({_NAMES}) select {_NAMES} from given where expected = 0 order by id
          on conflict (id) do nothing returning id
        ), changed as (
          update {table} as r set {_assignments({name: f"g.{name}" for name in _TYPES})}
          from given as g
          where r.id = g.id and r.version = g.expected and g.expected <> 0 returning r.id
        )
        {_conflicts(table, "given as g")} (select id from claimed union all select id from changed)
    """


def _swap_one(table: str, write: str) -> str:
    """Return *write*, which claims or changes the record $1, with the same result."""
    return f"""
        with written as ({write} returning id)
        {_conflicts(table, "(values ($1)) as g (id)")} (select id from written)
    """


def _conflicts(table: str, given: str) -> str:
    return f"""
        select r.*, uuid_send(g.id) from {given} left join lateral (
          select {_FIELDS} from {table} as r where r.id = g.id
        ) as r on true
        where g.id not in"""


def _count(table: str) -> str:
    """Return the statement that counts records; `length` does not read a stored value."""
    return f"""
        select state, coalesce(label, ''), count(*), min({CREATED_MS})::bigint,
          sum(coalesce(length(progress), 0) + coalesce(length(response), 0))::bigint
        from {table} group by state, label
    """


def _sweep(table: str) -> str:
    """
    Return the statement that deletes $2 records whose retention is over at $1.

    It skips locked rows, and commits without waiting for the disk, so no claim waits for it. A
    deletion that a crash undoes is repeated by a later sweep; every acknowledged write comes later
    in the log and is not affected.
    """
    return f"""
        with asynchronous as materialized (
          select set_config('synchronous_commit', 'off', true) as setting
        )
        delete from {table} where (select setting from asynchronous) is not null and ctid = any(
          array(select ctid from {table} where {_RETENTION_IS_OVER.format("$1")}
                order by expires_ms / 1000 limit $2 for update skip locked))
    """


def row_of(record: Record) -> tuple[Any, ...]:
    """
    Return the column values of *record*, in the order of `PLACEHOLDERS`.

    They are of types that every driver can send: digests in hex, and None for defaults.
    """
    version, lease_until_ms, expires_ms = record.version, record.lease_until_ms, record.expires_ms
    age_ms, margin_ms = version - record.created_ms, expires_ms - record.window_until_ms
    return (
        uuid_of(record.id),
        version,
        record.state,
        None if record.attempt == 1 else record.attempt,
        uuid_of(record.fingerprint) if record.fingerprint else None,
        None if age_ms == 1 else age_ms,
        lease_until_ms or None,
        None if margin_ms == _MARGIN_MS else margin_ms,
        expires_ms,
        record.nonce,
        escape_text(record.label) or None,
        escape_text(record.scope) or None,
        escape_text(record.key) or None,
        record.progress,
        record.response,
    )


def columns_of(swaps: Sequence[Swap]) -> list[list[Any] | None]:
    """
    Return the arrays that write *swaps*, none of which deletes.

    None for a column of only NULLs: `unnest` fills it up, and a third of the columns are like that.
    """
    rows = ((swap.expected, *row_of(swap.record)) for swap in swaps if swap.record is not None)
    return [
        None if column.count(None) == len(column) else list(column)
        for column in zip(*rows, strict=True)
    ]


def uuid_of(digest: bytes) -> str:
    """Return *digest* in hex, which every driver takes for a `uuid`."""
    if len(digest) != ID_BYTES:
        raise ValueError(f"an id or fingerprint of {len(digest)} bytes; it must have {ID_BYTES}")
    return digest.hex()


def record_of(row: Row) -> Record:
    """Return the record whose fields are in *row*."""
    record = new_record(tuple(row))
    if _ESCAPE in record.label or _ESCAPE in record.scope or _ESCAPE in record.key:
        return record._replace(
            label=unescape_text(record.label),
            scope=unescape_text(record.scope),
            key=unescape_text(record.key),
        )
    return record


def record_count_of(row: Row) -> RecordCount:
    """Return what a *row* of the statement `count_all` says."""
    state, label, *rest = row
    return RecordCount(State(state), unescape_text(label), *rest)


def conflicts_of(rows: Sequence[Row]) -> dict[bytes, Record]:
    """Return for each conflict of a batch, by id, the record as of the statement's snapshot."""
    return {row[-1]: GONE if row[0] is None else record_of(row[:-1]) for row in rows}


_ESCAPE = "\x1b"


def escape_text(text: str) -> str:
    """Return *text* as PostgreSQL can store it: it accepts neither NUL nor lone surrogates."""
    if "\0" not in text and not text.startswith(_ESCAPE):
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            pass
        else:
            return text
    return _ESCAPE + text.encode("utf-8", "surrogatepass").hex()


def unescape_text(stored: str) -> str:
    """Return the text of which `escape_text` made *stored*."""
    if not stored.startswith(_ESCAPE):
        return stored
    return bytes.fromhex(stored[1:]).decode("utf-8", "surrogatepass")


# The fields that are no columns, or are NULL by default.
_EXPRESSIONS = {"created_ms": CREATED_MS, "lease_until_ms": "coalesce(lease_until_ms, 0)"}


def find(query: Query, select: str) -> tuple[str, list[object]]:
    """Return the search for *query* with its parameters; it finds one row more than a page has."""
    conditions: list[str] = ["true"]
    values: list[object] = []
    for condition, parameters in _conditions(query):
        first = len(values) + 1
        values += parameters
        conditions.append(condition.format(*(f"${n}" for n in range(first, len(values) + 1))))
    values.append(query.limit + 1)
    order = f"{CREATED_MS} desc, id desc" if query.newest_first else "id"
    where = " and ".join(conditions)
    return f"{select} where {where} order by {order} limit ${len(values)}", values


def _conditions(query: Query) -> Iterator[tuple[str, Sequence[object]]]:
    """
    Yield each condition with its parameters, {0} being the first of these.

    Each has a form of which the planner's statistics know how selective it is. Most have no index,
    because completing would have to update it. So the planner chooses between a scan of the whole
    table and the primary key; if it took a rare value for a frequent one, it would read the whole
    table in the order of the key, which takes many times as long.
    """
    if query.after_id:
        yield "id > {0}::uuid", [query.after_id.hex()]
    if query.id_prefix:
        first, last = (query.id_prefix.ljust(ID_BYTES, fill).hex() for fill in (b"\x00", b"\xff"))
        yield "id >= {0}::uuid and id <= {1}::uuid", [first, last]
    for field, operator, value in conditions_of(query):
        column = _EXPRESSIONS.get(field, field)
        if value == "":
            yield f"{column} is null", []
        else:
            stored = escape_text(value) if isinstance(value, str) else value
            yield f"{column} {operator} {{0}}", [stored]
    if query.expired_at_ms is not None:
        yield _RETENTION_IS_OVER, [query.expired_at_ms]
