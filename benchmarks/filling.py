"""Filling: records as requests make them, for whoever wants to know what they weigh.

By the production flow, claimed and then completed in batches, with a day between the first and the
millionth. Nobody executes anything: every operation ends with the same response.
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

# Together as many as come together at 64 at a time. It matters: an answer makes its row grow, and
# how well the pages are filled depends on how far behind its claim it comes.
TOGETHER = 64
# A day of records: a key every 86 ms, so that times differ as much as they do in life.
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
            flow.send(None)  # the claim is ours: the flow asks for the execution
        _swap(store, [flow.send(Outcome(OutcomeKind.COMPLETE, RESPONSE)) for flow in batch])


def sweep(store: Store, first: int) -> None:
    """Sweep whatever came before the record of number *first*, as soon as its time is over."""
    while store.sweep(FIRST_MS + first * STEP_MS + Policy().retention_ms - 1):
        pass


def _swap(store: Store, effects: list[object]) -> None:
    swaps = [effect for effect in effects if isinstance(effect, Swap)]
    assert len(swaps) == len(effects)
    assert not any(store.swap(swaps))


def uuid_of(source: random.Random) -> str:
    """A key as clients make them."""
    text = f"{source.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def text_of(source: random.Random) -> str:
    """A key as long as a UUID that does not pack like one."""
    return f"order-{source.getrandbits(120):030x}"


def flows_of(key_of: KeyOf = uuid_of) -> Flows:
    """Requests as they come in, each at the step where it wants to be claimed."""
    policy, label, source = Policy(), "POST /orders", random.Random(17)
    callers = [caller_digest("bearer", f"token-{number}") for number in range(CALLERS)]
    for now_ms in itertools.count(FIRST_MS, STEP_MS):
        caller, key = source.choice(callers), key_of(source)
        ticket = ClaimRequest(
            operation_id(caller=caller, route=label, key=key),
            source.randbytes(16),
            now_ms,
            source.getrandbits(63),
            label,
            caller[:SCOPE_CHARS],
            key,
        )
        yield lifecycle(ticket, policy, may_claim=True)
