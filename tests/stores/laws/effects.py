"""What a law may do: yield these effects, and assert on what comes back.

A law is a flow (`core/flow.py`) that starts on an empty store. Two `performs` that differ in the
word `await` run all of them, so that sync and async stores cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import Record, Swap
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query

if TYPE_CHECKING:
    from .kinds import Kind  # noqa: F401 - in the type of `ReadKind`, which is a string

Law: TypeAlias = Callable[[], Flow[None]]
L = TypeVar("L", bound=Law)

LAWS: list[Law] = []


def law(flow: L) -> L:
    """Hold every store to *flow*."""
    assert flow.__doc__, f"{flow.__name__} must say which promises it is about"
    LAWS.append(flow)
    return flow


@dataclass(frozen=True, slots=True)
class SwapAll(Effect[Sequence[Record | None]]):
    """Several swaps in one batch; a single one is the core's own `Swap`."""

    swaps: Sequence[Swap]


@dataclass(frozen=True, slots=True)
class GetAll(Effect[Sequence[Record | None]]):
    """Read several records."""

    ids: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Find(Effect[Page]):
    """One page of records for an operator."""

    query: Query


@dataclass(frozen=True, slots=True)
class Sweep(Effect[int]):
    """Delete what retention allows at *now_ms*."""

    now_ms: int
    limit: int = SWEEP_BATCH


@dataclass(frozen=True, slots=True)
class Check(Effect[Sequence[Finding]]):
    """Ask what the doctor sees."""


@dataclass(frozen=True, slots=True)
class ReadClock(Effect[int]):
    """The store's own clock. Laws measure nothing with it; it is itself under law."""


@dataclass(frozen=True, slots=True)
class Close(Effect[None]):
    """Close the store; the law goes on with a closed one."""


@dataclass(frozen=True, slots=True)
class Reopen(Effect[None]):
    """Close the store and open it again by its URL, as the next process would."""


@dataclass(frozen=True, slots=True)
class ReadKind(Effect["Kind"]):
    """Read which kind of store is under law, and what it promises."""


@dataclass(frozen=True, slots=True)
class Together(Effect[Sequence[Any]]):
    """Run *flows* at the same moment, in threads or on event loops; their results in order."""

    flows: Sequence[Flow[Any]]


def get(id: bytes) -> Flow[Record | None]:
    """The record that stands for *id*."""
    (standing,) = yield from GetAll([id])
    return standing


def find_all(query: Query) -> Flow[list[Record]]:
    """Every record of *query*, page by page, as an operator's tool would collect them."""
    found: list[Record] = []
    while True:
        page = yield from Find(query)
        assert len(page.records) <= query.limit
        found += page.records
        if page.next_after_id is None:
            return found
        assert page.next_after_id > query.after_id, "paging must move on"
        query = replace(query, after_id=page.next_after_id)
