"""The contract: what every store is, sync and async under the same names.

A store is one primitive, `swap`: compare-and-swap of one record by version, in bulk, giving back
the record that stands where it loses. Everything else a store does is for waiting (`get`), for
people (`find`, `check`) and for cleaning up (`sweep`). A store that can carry a word from node to
node also offers a `Bell`, and one that can be asked from an event loop itself a `Wire`.

Invariants that the law-suite (`tests/laws`) holds every store to:
- each swap is atomic on its own, against any number of processes; of two equal swaps one wins;
- a record comes back exactly as it was written (a compact store may drop label, scope and key);
- what a swap has acknowledged survives whatever the store's documentation says it survives;
- a store never changes a record by itself, except that it may forget one whose retention is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from coatcheck.core.record import Record, State, Swap, is_retention_over

# 500: large enough that a sweep keeps up with thousands of claims a second, small enough that it
# holds a write lock for about a millisecond.
SWEEP_BATCH = 500
FIND_LIMIT = 100
# 4 000: what can be said at once; half of what PostgreSQL takes.
BELL_CHARS_MAX = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which records an operator wants to see; every condition given must hold."""

    id_prefix: bytes = b""  # from a reference: `core.key.prefix_of`; whole bytes
    key: str | None = None
    state: State | None = None
    label: str | None = None
    created_before_ms: int | None = None
    expired_at_ms: int | None = None  # only what a sweep at this time would take
    after_id: bytes = b""  # paging: the last id of the page before
    limit: int = FIND_LIMIT


def matches(record: Record, query: Query) -> bool:
    """Every condition of *query* holds for *record*; for stores that filter in Python."""
    return (
        record.id.startswith(query.id_prefix)
        and record.id > query.after_id
        and (query.key is None or record.key == query.key)
        and (query.state is None or record.state == query.state)
        and (query.label is None or record.label == query.label)
        and (query.created_before_ms is None or record.created_ms < query.created_before_ms)
        and (query.expired_at_ms is None or is_retention_over(record, query.expired_at_ms))
    )


class Page(NamedTuple):
    """Some records in id order, and where the next page starts (None: this was the last)."""

    records: Sequence[Record]
    next_after_id: bytes | None


class Finding(NamedTuple):
    """One thing the doctor saw."""

    level: Literal["ok", "warning", "error"]
    message: str


@runtime_checkable
class Store(Protocol):
    """A store for sync code. Safe to use from any thread."""

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """
        Write each record if the version its caller saw still stands.

        Returns None where the write took effect, else the record that stands now (`GONE` where a
        record was expected and there is none). Each swap is atomic on its own; a batch is one
        round trip and one commit, not one transaction of meaning. No id appears twice in a batch.
        Where it is several requests, and some fail, what is raised has the fate of each (`fates`).
        """
        ...

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; None where there is none."""
        ...

    def find(self, query: Query) -> Page:
        """Records for operators, in id order, at most `query.limit` of them."""
        ...

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over at *now_ms*; how many it were."""
        ...

    def check(self) -> Sequence[Finding]:
        """Can this store forget? What the doctor sees."""
        ...

    def now_ms(self) -> int:
        """The store's clock, which rules."""
        ...

    def close(self) -> None:
        """Let go of files, connections and threads. Who let go of any refuses further use."""
        ...


@runtime_checkable
class HasStretches(Protocol):
    """A store whose sweep looks at a stretch of it only, because there looking is what costs."""

    def sweep_all(self, now_ms: int) -> Iterator[int]:
        """Sweep it from end to end, whatever that costs; how many records, stretch by stretch."""
        ...


@runtime_checkable
class AsyncStore(Protocol):
    """A store for async code; the same words with `await`. Safe to use from any event loop."""

    @property
    def blocking(self) -> Store:
        """
        The same store for threads.

        A heartbeat must beat while a handler blocks the event loop, so it cannot live on one.
        """
        ...

    def swap(self, swaps: Sequence[Swap]) -> Awaitable[Sequence[Record | None]]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        ...

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand; see `Store.get`."""
        ...

    async def find(self, query: Query) -> Page:
        """Records for operators; see `Store.find`."""
        ...

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows; see `Store.sweep`."""
        ...

    async def check(self) -> Sequence[Finding]:
        """What the doctor sees; see `Store.check`."""
        ...

    async def now_ms(self) -> int:
        """The store's clock; see `Store.now_ms`."""
        ...

    async def close(self) -> None:
        """Let go of files, connections and threads."""
        ...


class Bell(Protocol):
    """
    What is said at one node is heard at every node that listens, its own included; or it is lost.

    Used by one thread. It raises what it likes: who uses it then closes it, and opens it again.
    A forked child opens it anew, and leaves the parent's connection alone.
    """

    def open(self) -> bool:
        """Connect, and listen from now on; False where that can never be."""
        ...

    def fileno(self) -> int:
        """What becomes readable when there is something to hear."""
        ...

    def ring(self, words: str) -> None:
        """Say *words* to all: plain ASCII, at most `BELL_CHARS_MAX`."""
        ...

    def heard(self) -> Sequence[str]:
        """What was said since the last time, without waiting for more."""
        ...

    def ping(self) -> None:
        """Raise, if nothing would be heard any more."""
        ...

    def close(self) -> None:
        """Let go of the connection, until it is opened again."""
        ...


@runtime_checkable
class HasBell(Protocol):
    """A store that may have a bell."""

    def bell(self) -> Bell | None:
        """A bell that rings for everybody on the same records; None where there is none."""
        ...


def bell_of(store: Store) -> Bell | None:
    """The bell of *store*, if it has one."""
    return store.bell() if isinstance(store, HasBell) else None


class Wire(Protocol):
    """
    One event loop's own connections to a store's server.

    Made on that loop, used on it and by one `LoopedStore`, and connected when it is first used. It
    raises what the store would raise. Who is cancelled while it waits for the server lets go of
    that connection. Up to `lanes` batches of swaps are on their way at once, which have no id in
    common, and beside them one of reads. Coroutines will do; a future that is on its way when it
    is given back saves a turn of the loop, and a `Prompt` one saves two.
    """

    lanes: int

    def swap(self, swaps: Sequence[Swap], /) -> Awaitable[Sequence[Record | None]]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        ...

    def get(self, ids: Sequence[bytes], /) -> Awaitable[Sequence[Record | None]]:
        """The records that stand; see `Store.get`."""
        ...

    async def close(self) -> None:
        """
        Let go of the connections; nothing is on its way.

        Where its own event loop is closed, another one calls this. Then it waits for nothing, and
        leaves its own alone.
        """
        ...


@runtime_checkable
class HasWire(Protocol):
    """A store that can be asked from an event loop, without a thread."""

    def wire(self) -> Wire:
        """
        A wire for the running event loop; nothing is connected yet.

        Raises NotImplementedError where this kind of loop cannot have one.
        """
        ...
