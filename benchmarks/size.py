"""Question: how many bytes does a record cost beside its response body?

Records as requests make them, by the production flow, claimed and then completed in large batches;
then what the database takes for them is weighed, indexes and free space included: SQLite's file,
and PostgreSQL's table, where as many were swept as are left. The floor is a table of ids,
fingerprints, expiries and bodies in SQLite, with no index but its primary key.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import psycopg
from servers.postgres import Postgres

from benchmarks.floors import OneByOne
from benchmarks.machine import workshop
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target, counted
from coatcheck import Policy, Response
from coatcheck.core.flow import Flow
from coatcheck.core.record import Swap
from coatcheck.core.replay import Fate, encode_response
from coatcheck.core.scope import SCOPE_CHARS, caller_digest, operation_id
from coatcheck.core.serve import Answer, Ending, Ticket, serve
from coatcheck.stores.contract import Store
from coatcheck.stores.postgres import PostgresStore
from coatcheck.stores.sqlite import SqliteStore

# Together as many as come together at 64 at a time. It matters: an answer makes its row grow, and
# how well the pages are filled depends on how far behind its claim it comes.
TOGETHER = 64
FEWER_TOGETHER = 16
# A day of records: a key every 86 ms, so that times differ as much as they do in life.
STEP_MS = 86
CALLERS = 1_000
FIRST_MS = 1_800_000_000_000
# Whenever a twentieth of the rows has changed, as autovacuum does in a day that is longer.
VACUUMS = 20

BODY = b'{"id": "ord_8f14e45fceea167a", "state": "placed", "amount": 1999, "currency": "EUR"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
KeyOf: TypeAlias = Callable[[random.Random], str]


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    many, few, left = (50_000, 10_000, 25_000) if quick else (1_000_000, 50_000, 50_000)
    server = Postgres(autovacuum="off", shared_buffers="128MB")
    try:
        weights = {
            "postgres, uuid": _weigh_postgres(server, left, _uuid, compact=False),
            "postgres": _weigh_postgres(server, left, _uuid, compact=True),
        }
    finally:
        server.remove()
    with workshop() as directory:
        at = Path(directory)
        weights |= {
            "uuid": _weigh_sqlite(SqliteStore(at / "uuid.db"), many, _uuid),
            "fewer": _weigh_sqlite(
                SqliteStore(at / "fewer.db"), few, _uuid, together=FEWER_TOGETHER
            ),
            "text": _weigh_sqlite(SqliteStore(at / "text.db"), few, _text),
            "compact": _weigh_sqlite(SqliteStore(at / "compact.db", compact=True), few, _text),
            "floor": _weigh_floor(at / "floor.db", few),
        }
    found = {name: Samples((weight,)) for name, weight in weights.items()}
    return Table(
        name="size",
        question="bytes on disk for a record beside its response body",
        rows=_rows(found, many=counted(many), few=counted(few), left=counted(left)),
        notes=[
            f"beside a body of {len(BODY)} bytes; its headers count as ours",
            f"{TOGETHER} claimed and then completed together, where nothing else is said",
            "not UUIDs: 36 other characters, which do not pack",
            "PostgreSQL: when as many were swept as are left, vacuumed as autovacuum would",
        ],
    )


def _rows(found: dict[str, Samples], *, many: str, few: str, left: str) -> list[Row]:
    labels = {
        "uuid": f"SQLite, {many} records, keys are UUIDs",
        "fewer": f"SQLite, {few} records, {FEWER_TOGETHER} together",
        "text": f"SQLite, {few} records, keys are not UUIDs",
        "compact": f"SQLite, {few} records, compact=1",
        "postgres, uuid": f"PostgreSQL, {left} records, keys are UUIDs",
        "postgres": f"PostgreSQL, {left} records, compact=1",
    }
    return [
        Row(
            what=f"{label}, bytes",
            product=found[name],
            floor=found["floor"],
            ratios=[(f"{TIMES} the floor", found[name].over(found["floor"]))],
            targets=[Target(measured=found[name], bound="≤", limit=200, unit="bytes")]
            if name in ("uuid", "postgres")
            else (),
        )
        for name, label in labels.items()
    ]


def _weigh_sqlite(
    store: SqliteStore, records: int, key_of: KeyOf, *, together: int = TOGETHER
) -> float:
    with closing(store):
        _fill(store, records, _flows(key_of), together)
    return Path(store.path).stat().st_size / records - len(BODY)


def _weigh_postgres(server: Postgres, records: int, key_of: KeyOf, *, compact: bool) -> float:
    schema = f"size_{next(_NUMBERS)}"
    store = PostgresStore(server.url, schema=schema, compact=compact)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"set search_path to {schema}")
        flows, portion = _flows(key_of), records // VACUUMS
        for number in range(2 * VACUUMS):
            _fill(store, portion, flows, TOGETHER)
            over_ms = FIRST_MS + (number + 1 - VACUUMS) * portion * STEP_MS
            while store.sweep(over_ms + Policy().retention_ms - 1):
                pass
            connection.execute("vacuum coatcheck_records")
        asked = "select pg_total_relation_size('coatcheck_records')"
        (taken,) = connection.execute(asked).fetchone() or (0,)
    store.close()
    return int(taken) / records - len(BODY)


_NUMBERS = itertools.count()


def _fill(store: Store, records: int, flows: Iterator[Flow[Answer]], together: int) -> None:
    """Claim and complete *records* operations."""
    for start in range(0, records, together):
        batch = list(itertools.islice(flows, min(together, records - start)))
        _swap(store, [next(flow) for flow in batch])
        for flow in batch:
            flow.send(None)  # the claim is ours: the flow asks for the execution
        _swap(store, [flow.send(Ending(Fate.KEEP, RESPONSE)) for flow in batch])


def _swap(store: Store, effects: list[object]) -> None:
    swaps = [effect for effect in effects if isinstance(effect, Swap)]
    assert len(swaps) == len(effects)
    assert not any(store.swap(swaps))


def _flows(key_of: KeyOf) -> Iterator[Flow[Answer]]:
    """Requests as they come in, each at the step where it wants to be claimed."""
    policy, label, source = Policy(), "POST /orders", random.Random(17)
    callers = [caller_digest("bearer", f"token-{number}") for number in range(CALLERS)]
    for now_ms in itertools.count(FIRST_MS, STEP_MS):
        caller, key = source.choice(callers), key_of(source)
        ticket = Ticket(
            operation_id(caller=caller, route=label, key=key),
            source.randbytes(16),
            now_ms,
            source.getrandbits(63),
            label,
            caller[:SCOPE_CHARS],
            key,
        )
        yield serve(ticket, policy, may_claim=True)


def _uuid(source: random.Random) -> str:
    text = f"{source.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def _text(source: random.Random) -> str:
    return f"order-{source.getrandbits(120):030x}"


def _weigh_floor(path: Path, records: int) -> float:
    table = OneByOne(path)
    table.begin()
    for number in range(records):
        id = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
        table.insert(id, id)
        table.update(id, BODY)
    table.commit()
    table.close()
    return path.stat().st_size / records - len(BODY)


RESPONSE = encode_response(Response(201, HEADERS, BODY))
