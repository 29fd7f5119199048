"""Question: how many bytes does a record cost beside its response body?

Records as requests make them, by the production flow, claimed and then completed in large batches
through the SQLite store; then the file is closed and weighed, indexes and free space included. The
floor is a table of ids, fingerprints, expiries and bodies, with no index but its primary key.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from benchmarks.floors import OneByOne
from benchmarks.machine import workshop
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target, counted
from coatcheck import Policy, Response
from coatcheck.core.flow import Flow
from coatcheck.core.record import Swap
from coatcheck.core.replay import Fate, encode_response
from coatcheck.core.scope import caller_digest, operation_id, scope_of
from coatcheck.core.serve import Answer, Ending, Ticket, serve
from coatcheck.stores.sqlite import SqliteStore

# Together as many as come together at 64 at a time. It matters: an answer makes its row grow, and
# how well the pages are filled depends on how far behind its claim it comes.
TOGETHER = 64
FEWER_TOGETHER = 16
# A day of records: a key every 86 ms, so that times differ as much as they do in life.
STEP_MS = 86
CALLERS = 1_000

BODY = b'{"id": "ord_8f14e45fceea167a", "state": "placed", "amount": 1999, "currency": "EUR"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
KeyOf: TypeAlias = Callable[[random.Random], str]


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    many, few = (50_000, 10_000) if quick else (1_000_000, 50_000)
    started_s = time.monotonic()
    with workshop() as directory:
        at = Path(directory)
        weights = {
            "uuid": _weigh(SqliteStore(at / "uuid.db"), many, _uuid),
            "fewer": _weigh(SqliteStore(at / "fewer.db"), few, _uuid, together=FEWER_TOGETHER),
            "text": _weigh(SqliteStore(at / "text.db"), few, _text),
            "compact": _weigh(SqliteStore(at / "compact.db", compact=True), few, _text),
            "floor": _weigh_floor(at / "floor.db", few),
        }
    found = {name: Samples((weight,)) for name, weight in weights.items()}
    took_s = time.monotonic() - started_s
    return Table(
        name="size",
        question="bytes of file for a record beside its response body, in SQLite",
        rows=_rows(found, many=many, few=few),
        notes=[
            f"beside a body of {len(BODY)} bytes; its headers count as ours; {took_s:.0f} s",
            f"{TOGETHER} claimed and then completed together, where nothing else is said",
            "not UUIDs: 36 other characters, which do not pack",
        ],
    )


def _rows(found: dict[str, Samples], *, many: int, few: int) -> list[Row]:
    labels = {
        "uuid": f"{counted(many)} records, keys are UUIDs",
        "fewer": f"{counted(few)} records, {FEWER_TOGETHER} together",
        "text": f"{counted(few)} records, keys are not UUIDs",
        "compact": f"{counted(few)} records, compact=1",
    }
    return [
        Row(
            what=f"{label}, bytes",
            product=found[name],
            floor=found["floor"],
            ratios=[(f"{TIMES} the floor", found[name].over(found["floor"]))],
            targets=[Target(measured=found[name], bound="≤", limit=200, unit="bytes")]
            if name == "uuid"
            else (),
        )
        for name, label in labels.items()
    ]


def _weigh(store: SqliteStore, records: int, key_of: KeyOf, *, together: int = TOGETHER) -> float:
    flows = _flows(key_of)
    for _ in range(0, records, together):
        batch = list(itertools.islice(flows, together))
        _swap(store, [next(flow) for flow in batch])
        for flow in batch:
            flow.send(None)  # the claim is ours: the flow asks for the execution
        _swap(store, [flow.send(Ending(Fate.KEEP, RESPONSE)) for flow in batch])
    store.close()
    return Path(store.path).stat().st_size / records - len(BODY)


def _swap(store: SqliteStore, effects: list[object]) -> None:
    swaps = [effect for effect in effects if isinstance(effect, Swap)]
    assert len(swaps) == len(effects)
    assert not any(store.swap(swaps))


def _flows(key_of: KeyOf) -> Iterator[Flow[Answer]]:
    """Requests as they come in, each at the step where it wants to be claimed."""
    policy, label, source = Policy(), "POST /orders", random.Random(17)
    callers = [caller_digest("bearer", f"token-{number}") for number in range(CALLERS)]
    for now_ms in itertools.count(1_800_000_000_000, STEP_MS):
        caller, key = source.choice(callers), key_of(source)
        ticket = Ticket(
            operation_id(caller=caller, route=label, key=key),
            source.randbytes(16),
            now_ms,
            source.getrandbits(63),
            label,
            scope_of(caller),
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
