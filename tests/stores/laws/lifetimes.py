"""Laws of a store's own life: opening, closing, forgetting, and saying so."""

from __future__ import annotations

import pytest

from coatcheck.core.flow import Flow
from coatcheck.core.record import Swap, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Finding, Query

from .effects import (
    Check,
    Close,
    Find,
    GetAll,
    ReadClock,
    ReadKind,
    Reopen,
    SwapAll,
    Sweep,
    find_all,
    get,
    law,
)
from .records import ID, NOW_MS, assert_exactly, changed, claim_of, claimed, id_of

# 2024-01-01 and 2100-01-01: whoever counts in seconds, microseconds or from boot is outside.
PLAUSIBLE_MS = range(1_704_067_200_000, 4_102_444_800_000)


@law
def what_was_written_survives_closing_and_reopening() -> Flow[None]:
    """D1, L5: and a store that forgets, forgets everything."""
    kind = yield from ReadKind()
    first = yield from claimed(claim_of(id_of(1))._replace(key="order-1"))
    answered = yield from changed(first, completed(first, b"\x00\xff" * 50_000))
    held = yield from claimed(claim_of(id_of(2)))
    gone = yield from claimed(claim_of(id_of(3)))
    assert (yield from Swap(gone.id, gone.version, None)) is None
    yield from Reopen()
    standing = yield from GetAll([answered.id, held.id, gone.id])
    if not kind.durable:
        assert list(standing) == [None, None, None]
        return
    assert_exactly(standing[0], kind.as_kept(answered))
    assert_exactly(standing[1], held)
    assert standing[2] is None
    yield from changed(held, completed(held, b"after"))
    assert len((yield from find_all(Query()))) == 2


@law
def a_closed_store_refuses_further_use() -> Flow[None]:
    """D2: fail closed; nothing may seem to be written."""
    kind = yield from ReadKind()
    claim = yield from claimed(claim_of())
    yield from Close()
    if not kind.closes:
        assert_exactly((yield from get(ID)), claim)
        return
    with pytest.raises(StoreUnavailable):
        yield from Swap(ID, claim.version, completed(claim, b"late"))
    with pytest.raises(StoreUnavailable):
        yield from SwapAll([Swap(id_of(2), 0, claim_of(id_of(2)))])
    with pytest.raises(StoreUnavailable):
        yield from get(ID)
    with pytest.raises(StoreUnavailable):
        yield from Find(Query())
    with pytest.raises(StoreUnavailable):
        yield from Sweep(NOW_MS)
    yield from Reopen()
    assert (yield from get(ID)) == (claim if kind.durable else None)


@law
def closing_twice_is_closing() -> Flow[None]:
    """D2: who tidies up need not know who tidied up before."""
    yield from claimed(claim_of())
    yield from Close()
    yield from Close()


@law
def a_store_says_whether_it_can_forget() -> Flow[None]:
    """D3: the doctor's findings are sentences, and a store that forgets warns of it."""
    kind = yield from ReadKind()
    findings = yield from Check()
    assert all(isinstance(finding, Finding) for finding in findings)
    assert all(finding.message for finding in findings)
    levels = {finding.level for finding in findings}
    assert levels <= {"ok", "warning", "error"}
    assert kind.durable or levels & {"warning", "error"}
    assert "error" not in levels


@law
def the_clock_of_a_store_counts_milliseconds() -> Flow[None]:
    """T1: windows and leases are measured on it."""
    now_ms = yield from ReadClock()
    assert type(now_ms) is int
    assert now_ms in PLAUSIBLE_MS
