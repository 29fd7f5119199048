"""A trip of four steps, as a saga in a process that is killed at a numbered boundary.

A boundary is before or after each write into the store, and before or after each effect. The
travel agency is outside of the system: a database of its own, which acts once for each key.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from coatcheck import Policy, SagaUndone
from coatcheck.core.record import Record, Swap
from coatcheck.saga import Sagas
from coatcheck.stores import open_async_store, open_store

POLICY = Policy(window="30d", lease="500ms", wait="20s", on_expired="refuse")
STEPS = ("flight", "hotel", "car", "charge")
HAD = {"flight": 10, "hotel": 10, "car": 10, "charge": 100}
COSTS = {"flight": 1, "hotel": 1, "car": 1, "charge": 30}
TRIP = {"id": 42}


class Agency:
    """Has seats, rooms, cars and money, and acts once for each key."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        """Open for business."""
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute("create table effects (key text primary key, what text, by integer)")
            database.execute("create table calls (key text)")

    def act(self, what: str, by: int, key: str) -> str:
        """Change *what* by so much, once for *key*."""
        with closing(sqlite3.connect(self._path, timeout=20)) as database, database:
            database.execute("insert into calls values (?)", (key,))
            database.execute("insert or ignore into effects values (?, ?, ?)", (key, what, by))
        return f"{what} by {by}"

    def left(self) -> dict[str, int]:
        """How much there is of everything."""
        with closing(sqlite3.connect(self._path)) as database:
            changed = dict(database.execute("select what, sum(by) from effects group by what"))
        return {what: HAD[what] + changed.get(what, 0) for what in STEPS}

    def keys(self, table: str = "effects") -> list[str]:
        """The keys of all effects, or of all calls, in their order."""
        with closing(sqlite3.connect(self._path)) as database:
            return [key for (key,) in database.execute(f"select key from {table} order by rowid")]


class Boundaries:
    """Counts boundaries, and kills this process at one of them."""

    def __init__(self, deadly: int = 0) -> None:
        self.count = 0
        self._deadly = deadly

    def reached(self) -> None:
        """One more boundary."""
        self.count += 1
        if self.count == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedStore:
    """A store whose writes are boundaries, except for the renewals of a lease."""

    def __init__(self, store: Any, boundaries: Boundaries) -> None:
        self._store = store
        self._boundaries = boundaries
        self._written: set[object] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _is_boundary(self, swaps: Sequence[Swap]) -> bool:
        record: Record | None = swaps[0].record
        assert record is not None
        written = (record.state, record.progress, record.nonce)
        is_new = written not in self._written  # also not a write that is repeated after a renewal
        self._written.add(written)
        return is_new

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write, between two boundaries."""
        if not self._is_boundary(swaps):
            return self._store.swap(swaps)  # type: ignore[no-any-return]
        self._boundaries.reached()
        result: Sequence[Record | None] = self._store.swap(swaps)
        self._boundaries.reached()
        return result


class AsyncCountedStore(CountedStore):
    """The same for async code."""

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:  # type: ignore[override]
        """Write, between two boundaries."""
        if not self._is_boundary(swaps):
            return await self._store.swap(swaps)  # type: ignore[no-any-return]
        self._boundaries.reached()
        result: Sequence[Record | None] = await self._store.swap(swaps)
        self._boundaries.reached()
        return result


class Node:
    """One process with the saga; *fails*: the step that the agency refuses."""

    def __init__(self, place: Any, *, is_async: bool, fails: str, boundaries: Boundaries) -> None:
        self.agency = Agency(place.ledger)
        self.is_async = is_async
        self._fails = fails
        self._boundaries = boundaries
        opened: Any = (
            AsyncCountedStore(open_async_store(place.url), boundaries)
            if is_async
            else CountedStore(open_store(place.url), boundaries)
        )
        self.sagas = Sagas(opened, policy=POLICY, recover_every_s=0.2)
        self.trip = self._async_trip() if is_async else self._trip()

    def _act(self, what: str, sign: int, key: str) -> str:
        if sign < 0 and what == self._fails:
            raise ValueError(f"no {what}")
        self._boundaries.reached()
        done = self.agency.act(what, sign * COSTS[what], key)
        self._boundaries.reached()
        return done

    def _do(self, what: str, _trip: Any, *, key: str) -> str:
        return self._act(what, -1, key)

    def _undo(self, what: str, _trip: Any, *, key: str, result: str) -> None:
        assert result == f"{what} by -{COSTS[what]}"
        self._act(what, 1, key)

    def _trip(self) -> Any:
        do, undo = self._do, self._undo

        @self.sagas.saga("trip", key=lambda trip: trip["id"])
        def trip(saga: Any, trip: Any) -> list[str]:
            return [saga.step(what, _of(do, what), trip, undo=_of(undo, what)) for what in STEPS]

        return trip

    def _async_trip(self) -> Any:
        async def do(what: str, trip: Any, *, key: str) -> str:
            return self._do(what, trip, key=key)

        undo = self._undo

        @self.sagas.saga("trip", key=lambda trip: trip["id"])
        async def trip(saga: Any, trip: Any) -> list[str]:
            flight, hotel = await saga.gather(
                saga.step("flight", _of(do, "flight"), trip, undo=_of(undo, "flight")),
                saga.step("hotel", _of(do, "hotel"), trip, undo=_of(undo, "hotel")),
            )
            car = await saga.step("car", _of(do, "car"), trip, undo=_of(undo, "car"))
            charge = await saga.step("charge", _of(do, "charge"), trip, undo=_of(undo, "charge"))
            return [flight, hotel, car, charge]

        return trip

    def call(self) -> object:
        """Run, resume or replay the trip: its result, or the error that it was undone for."""
        try:
            return asyncio.run(self._called()) if self.is_async else self.trip(TRIP)
        except SagaUndone as undone:
            return undone

    async def _called(self) -> object:
        return await self.trip(TRIP)

    def close(self) -> None:
        """End the threads."""
        self.sagas.close()


def _of(function: Any, what: str) -> Any:
    return functools.partial(function, what)


def die(place: Any, is_async: bool, fails: str, deadly: int) -> None:
    """The process that is killed at the boundary *deadly*."""
    node = Node(place, is_async=is_async, fails=fails, boundaries=Boundaries(deadly))
    node.call()
