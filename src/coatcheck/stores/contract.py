"""The contract of a store: what to implement, and what the law-suite checks.

A store keeps records by id and has one essential operation, `swap`: compare-and-swap by version,
in bulk. The rest is for waiting requests (`get`), for operators (`find`, `check`) and for cleaning
up (`sweep`). To write a store, implement the seven methods of `Store`: plain blocking code, safe
from any thread. Event loops, batching across callers, encryption and retries are added around it:
wrap it in `ThreadedStore` for async code. `docs/howto/own-store.md` has a complete example. A store
that can count its records cheaply may implement `record_counts.HasRecordCounts` as well.

What the law-suite (`tests/stores/laws`) checks of every store:
- Each swap is atomic on its own, against any number of processes. Of two equal swaps one wins.
- A record is returned exactly as it was written. A compact store keeps less of two texts
  that are for people (`compact_record`).
- A write that `swap` has acknowledged survives what its `StoreInfo.survives` lists.
- A store never changes a record by itself, but it may delete one whose retention is over.

Errors: raise `StoreUnavailable` when the store cannot be reached or does not answer, with the
driver's error as its cause, and with `is_ambiguous=True` if the write may have been applied (the
request was sent and its answer was lost). The engine then makes the same swap again. Any other
exception means that this record cannot be written, and that nothing was.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from coatcheck.core.record import (
    RUNNING,
    Record,
    State,
    Swap,
    is_retention_over,
)

# 500: large enough that a sweep keeps up with thousands of claims a second, small enough that it
# holds a write lock for about a millisecond.
SWEEP_BATCH = 500
# 100: a page that a person can read.
FIND_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which records an operator wants to see; every condition given must hold."""

    id_prefix: bytes = b""  # from a reference: `core.key.prefix_of`; whole bytes
    key: str | None = None
    scope: str | None = None  # the caller's digest; a compact store keeps only its first character
    label: str | None = None
    state: State | None = None
    created_before_ms: int | None = None
    created_after_ms: int | None = None
    lease_expired_at_ms: int | None = None  # only running records whose lease is over at this time
    expired_at_ms: int | None = None  # only records that a sweep at this time would delete
    after_id: bytes = b""  # paging in id order: the last id of the previous page
    # By `created_ms`, the latest first, and by id among equals. For the next page, set
    # `created_before_ms` to the last record's `created_ms`, plus 1 to see its equals again.
    newest_first: bool = False
    limit: int = FIND_LIMIT


class Condition(NamedTuple):
    """What a query demands of one field of a record."""

    field: str
    operator: Literal["=", "<", ">", "<="]
    value: Any


def conditions_of(query: Query) -> Iterator[Condition]:
    """Yield all conditions of *query* but those about ids and `expired_at_ms`."""
    for field in ("key", "scope", "label", "state"):
        if (value := getattr(query, field)) is not None:
            yield Condition(field, "=", value)
    if query.created_before_ms is not None:
        yield Condition("created_ms", "<", query.created_before_ms)
    if query.created_after_ms is not None:
        yield Condition("created_ms", ">", query.created_after_ms)
    if query.lease_expired_at_ms is not None:
        yield Condition("state", "=", RUNNING)
        yield Condition("lease_until_ms", "<=", query.lease_expired_at_ms)


_OPERATORS = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le}


def matches(record: Record, query: Query) -> bool:
    """Return whether *record* fulfils *query*; for stores that filter in Python."""
    return (
        record.id.startswith(query.id_prefix)
        and record.id > query.after_id
        and (query.expired_at_ms is None or is_retention_over(record, query.expired_at_ms))
        and all(
            _OPERATORS[condition.operator](getattr(record, condition.field), condition.value)
            for condition in conditions_of(query)
        )
    )


def matching(records: Iterable[Record], query: Query) -> Iterable[Record]:
    """Return those of *records*, given in id order, that match, in the order of *query*."""
    found = (record for record in records if matches(record, query))
    if query.newest_first:
        return heapq.nlargest(query.limit, found, key=lambda r: (r.created_ms, r.id))
    return found


def page_of(found: Iterable[Record], query: Query) -> Page:
    """Return the first page of *found*, which match *query* and are in its order."""
    records = list(islice(found, query.limit + 1))
    is_last = len(records) <= query.limit or query.newest_first
    return Page(records[: query.limit], None if is_last else records[query.limit - 1].id)


def compact_record(record: Record) -> Record:
    """
    Return *record* as a compact store (`compact=1`) keeps it: with its label, without its key.

    Of the scope only the first character is kept. It tells a request from a function, which has
    no scope.
    """
    return record._replace(scope=record.scope[:1], key="")


def compact_swap(swap: Swap) -> Swap:
    """Return *swap* as a compact store writes it."""
    if swap.record is None:
        return swap
    return Swap(swap.id, swap.expected, compact_record(swap.record))


class Page(NamedTuple):
    """Some records, and in id order where the next page starts (None: this was the last)."""

    records: Sequence[Record]
    next_after_id: bytes | None  # always None if the newest come first


class Finding(NamedTuple):
    """One result of `check`."""

    level: Literal["ok", "warning", "error"]
    message: str


@runtime_checkable
class Store(Protocol):
    """A store for sync code. Safe to use from any thread, and after a fork."""

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """
        Write each record if its version in the store is still the expected one.

        A swap has an `id`, the `expected` version (0: no record exists) and the new `record`
        (None: delete it). The result has one entry per swap, in order: None if the swap was
        applied, otherwise the current record, or `GONE` if a record was expected and none exists.

        Each swap is atomic on its own. One that conflicts does not stop the others. No id appears
        twice in a call. Write all swaps of a call in one transaction or round trip if you can:
        that is what makes the engine fast. If a call takes several requests, and only some fail,
        raise a `BatchError` with the outcome of each (`batch_errors.results_of` does it).
        """
        ...

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """
        Return the current records in the order of *ids*; None if there is no such record.

        Must see every swap that was acknowledged before the call: no stale replica. An id may
        appear more than once.
        """
        ...

    def find(self, query: Query) -> Page:
        """
        Return the records that fulfil *query*, at most `query.limit` of them.

        They are in id order, or the newest first. For operators and background recovery. May be
        slow, but must not block `swap`. `page_of` and `matching` do it for a store that cannot
        search by itself.
        """
        ...

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """
        Delete up to *limit* records whose retention is over at *now_ms*; return how many.

        A record that changes meanwhile must stay. A store that expires records by itself may
        return 0.
        """
        ...

    def check(self) -> Sequence[Finding]:
        """
        Return what could make this store lose records or refuse writes; for `coatcheck doctor`.

        Try things instead of trusting settings where that is possible. Must not raise if the
        store is unreachable: that is a finding.
        """
        ...

    def now_ms(self) -> int:
        """
        Return the store's clock in milliseconds since 1970.

        Leases of all nodes are measured on this clock, so a shared store returns its server's.
        """
        ...

    def close(self) -> None:
        """
        Close files, connections and threads. A second call does nothing.

        Later calls of other methods raise `StoreUnavailable`.
        """
        ...


@runtime_checkable
class AsyncStore(Protocol):
    """
    A store for async code: the same methods with `await`. Safe to use from any event loop.

    There is no need to implement it: `ThreadedStore` makes one of any `Store`.
    """

    @property
    def blocking(self) -> Store:
        """The same store for threads: leases are renewed there even if the loop is blocked."""
        ...

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        ...

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records; see `Store.get`."""
        ...

    async def find(self, query: Query) -> Page:
        """Return records for operators; see `Store.find`."""
        ...

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete records whose retention is over; see `Store.sweep`."""
        ...

    async def check(self) -> Sequence[Finding]:
        """Return what could make this store lose records; see `Store.check`."""
        ...

    async def now_ms(self) -> int:
        """Return the store's clock; see `Store.now_ms`."""
        ...

    async def close(self) -> None:
        """Finish the calls that were made, then close files, connections and threads."""
        ...


class AsyncBackend(Protocol):
    """
    One event loop's own access to a store's server.

    Made on that loop and used only on it, by one batcher. It connects on first use, and raises
    what the store would raise. A call that is cancelled (the batcher cancels one that takes too
    long) discards the connection it was using.
    """

    batch_max: int  # swaps in one call; a read has at most 256 ids
    in_flight: int  # calls of `swap` that may run at the same time, beside one of `get`
    timeout_s: float | None  # for one call, with connecting; None: calls end by themselves

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        ...

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """Return the current records; see `Store.get`."""
        ...

    async def close(self) -> None:
        """
        Close the connections.

        Another event loop may call this when its own is closed. Then it must not wait.
        """
        ...


@runtime_checkable
class HasAsyncBackend(Protocol):
    """A store with native access for event loops; every other store goes through threads."""

    def async_backend(self) -> AsyncBackend:
        """
        Return access for the running event loop; nothing is connected yet.

        Raises NotImplementedError if this store or this loop must go through threads after all.
        """
        ...
