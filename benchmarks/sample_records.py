"""Records as requests create them, for measurements of size.

The production flows claim and complete them in batches, with a day between the first and the
millionth. Nothing is executed: every operation ends with the same response.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

from coatcheck import Policy, Response
from coatcheck.core.flow import Flow
from coatcheck.core.identity import SCOPE_CHARS, caller_digest, operation_id
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Answer, ClaimRequest, lifecycle
from coatcheck.core.record import Swap
from coatcheck.core.response import encode_response
from coatcheck.stores.contract import Store

# Records per batch. A completion makes its row grow, and how full the pages become depends on how
# soon it follows its claim.
TOGETHER = 64
# A key every 86 ms: a million in a day.
STEP_MS = 86
CALLERS = 1_000
FIRST_MS = 1_800_000_000_000

BODY = b'{"id": "ord_8f14e45fceea167a", "state": "placed", "amount": 1999, "currency": "EUR"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
RESPONSE = encode_response(Response(201, HEADERS, BODY))

KeyOf: TypeAlias = Callable[[random.Random], str]
Flows: TypeAlias = Iterator[Flow[Answer]]


def fill(store: Store, records: int, flows: Flows, together: int = TOGETHER) -> None:
    """Claim and complete *records* operations."""
    for start in range(0, records, together):
        batch = list(itertools.islice(flows, min(together, records - start)))
        _swap(store, [next(flow) for flow in batch])
        for flow in batch:
            flow.send(None)  # the claim was applied
        _swap(store, [flow.send(Outcome(OutcomeKind.COMPLETE, RESPONSE)) for flow in batch])


def sweep(store: Store, first: int) -> None:
    """Sweep all records before number *first*, as if their retention had just ended."""
    while store.sweep(FIRST_MS + first * STEP_MS + Policy().retention_ms - 1):
        pass


def _swap(store: Store, effects: list[object]) -> None:
    swaps = [effect for effect in effects if isinstance(effect, Swap)]
    assert len(swaps) == len(effects)
    assert not any(store.swap(swaps))


def uuid_of(source: random.Random) -> str:
    """Return a UUID, as clients send it."""
    text = f"{source.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def text_of(source: random.Random) -> str:
    """Return a key as long as a UUID, which cannot be packed."""
    return f"order-{source.getrandbits(120):030x}"


def flows_of(key_of: KeyOf = uuid_of) -> Flows:
    """Yield the flows of new requests, each before its claim."""
    policy, label, source = Policy(), "POST /orders", random.Random(17)
    callers = [caller_digest("bearer", f"token-{number}") for number in range(CALLERS)]
    for now_ms in itertools.count(FIRST_MS, STEP_MS):
        caller, key = source.choice(callers), key_of(source)
        request = ClaimRequest(
            operation_id(caller=caller, route=label, key=key),
            source.randbytes(16),
            now_ms,
            source.getrandbits(63),
            label,
            caller[:SCOPE_CHARS],
            key,
        )
        yield lifecycle(request, policy, may_claim=True)
