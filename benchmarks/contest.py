"""A contest on a server: the same keyed operations by everybody, in slots of a set time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from benchmarks.measuring import ROUNDS_MIN, Cost, For, Samples, Slot, drive, interleave
from coatcheck import AsyncEngine

AT_A_TIME = 64
ROUNDS = 5
SLOT_S = 0.5
SLOT_S_QUICK = 0.1
# What an answer of a small API looks like, for the floors; the others keep their own.
RESPONSE = b'{"order": 17, "state": "placed", "amount": 1999}'

Operation: TypeAlias = Callable[[int], Awaitable[object]]
Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Operation]]


async def place(order: int) -> dict[str, object]:
    """What is done once for each key."""
    return {"order": order, "state": "placed", "amount": 1999}


@asynccontextmanager
async def product(url: str) -> AsyncIterator[Operation]:
    """We ourselves, on the store that *url* names."""
    async with AsyncEngine(url) as engine:
        yield lambda number: engine.run(f"order-{number}", place, number, scope="orders")


def contest(contenders: Mapping[str, Contender], alone: str, *, quick: bool) -> dict[str, Samples]:
    """Operations a second: of all 64 at a time, and of us and *alone* one at a time."""
    wall_s = SLOT_S_QUICK if quick else SLOT_S
    slots = {name: _slot(make, AT_A_TIME, wall_s) for name, make in contenders.items()}
    for name in ("product", alone):
        slots[f"{name}, alone"] = _slot(contenders[name], 1, wall_s)
    return interleave(slots, ROUNDS_MIN if quick else ROUNDS)


def _slot(make: Contender, at_a_time: int, wall_s: float) -> Slot:
    async def run() -> Cost:
        async with make() as operation:
            await operation(-1)  # opens, imports and starts threads, which is not what is asked
            return await drive(operation, For(wall_s), at_a_time=at_a_time)

    return lambda: asyncio.run(run()).per_second


class Group:
    """What has gathered for one statement, and who waits for it."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self._arrived = arrived
        self._asked: list[object] = []
        self._futures: list[asyncio.Future[None]] = []

    def add(self, asked: object) -> asyncio.Future[None]:
        """Ask; done when it is written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._futures.append(future)
        self._arrived.set()
        return future

    def taken(self) -> tuple[list[object], list[asyncio.Future[None]]]:
        """All that has gathered, which is nobody else's any more."""
        taken = self._asked, self._futures
        self._asked, self._futures = [], []
        return taken
