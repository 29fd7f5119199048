"""How much processor time does a keyed operation take on the memory store?

The floor is a dictionary and two assignments. All contenders fill an empty store with the same
number of keys, because idemkit's memory backend reads every record at each claim.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable

from idemkit import InMemoryBackend, MethodConfig, idempotent

from benchmarks.measuring import ROUNDS_QUICK, Cost, Samples, Slot, drive, interleave
from benchmarks.report import TIMES, Row, Table
from coatcheck import AsyncEngine

AT_A_TIME = 64
ROUNDS = 5

# The keys of a few seconds, far fewer than those of a day; more would favour us.
KEYS = 2_000
# How many stores each contender fills in a slot, so that all slots are long enough for the clock.
STORES = {"product": 5, "idemkit": 1, "floor": 25}
STORES_QUICK = {"product": 2, "idemkit": 1, "floor": 5}


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    slots: dict[str, Slot] = {}
    levels, stores = ((AT_A_TIME,), STORES_QUICK) if quick else ((AT_A_TIME, 1), STORES)
    for at_a_time in levels:
        for name, make in CONTENDERS.items():
            slots[f"{name} {at_a_time}"] = _slot(make, stores[name], at_a_time)
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    found = interleave(slots, ROUNDS_QUICK if quick else ROUNDS)
    return Table(
        name="memory",
        question="processor time of one keyed operation on the memory store, µs",
        rows=[_row(found, at_a_time) for at_a_time in levels],
        notes=[
            f"{AT_A_TIME} at a time: the function yields once, so that all run at the same time",
            f"every contender fills an empty store with {KEYS} keys",
        ],
    )


def _row(found: dict[str, Samples], at_a_time: int) -> Row:
    product, idemkit, floor = (found[f"{name} {at_a_time}"] for name in CONTENDERS)
    faster, slower = idemkit.over(product), product.over(floor)
    return Row(
        what=f"new keys, {at_a_time} at a time",
        product=product,
        idemkit=idemkit,
        floor=floor,
        ratios=[(f"{TIMES} faster than idemkit", faster), (f"{TIMES} the floor", slower)],
    )


def _slot(make: Callable[[int], Operation], stores: int, at_a_time: int) -> Slot:
    def slot() -> float:
        costs = [asyncio.run(_fill(make, at_a_time)).cpu_us for _ in range(stores)]
        return statistics.mean(costs)

    return slot


async def _fill(make: Callable[[int], Operation], at_a_time: int) -> Cost:
    operation = make(at_a_time)
    # The first operation opens, imports and starts threads, which is not measured.
    await operation(-1)
    return await drive(operation, iter(range(KEYS)), at_a_time=at_a_time)


Operation = Callable[[int], Awaitable[object]]


async def _place(order: int) -> dict[str, int]:
    return {"order": order}


async def _place_yielding(order: int) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"order": order}


def _function(at_a_time: int) -> Callable[[int], Awaitable[dict[str, int]]]:
    return _place if at_a_time == 1 else _place_yielding


def _product(at_a_time: int) -> Operation:
    engine = AsyncEngine("memory://")
    place = _function(at_a_time)

    async def operation(number: int) -> object:
        return await engine.run(f"order-{number}", place, number, scope="orders")

    return operation


def _idemkit(at_a_time: int) -> Operation:
    config = MethodConfig(scope=lambda _: "orders")
    place = idempotent(backend=InMemoryBackend(), config=config)(_function(at_a_time))

    async def operation(number: int) -> object:
        return await place(number, idempotency_key=f"order-{number}")

    return operation


def _floor(at_a_time: int) -> Operation:
    records: dict[str, object] = {}
    place = _function(at_a_time)

    async def operation(number: int) -> object:
        key = f"order-{number}"
        if key in records:
            return records[key]
        records[key] = None
        result = records[key] = await place(number)
        return result

    return operation


CONTENDERS = {"product": _product, "idemkit": _idemkit, "floor": _floor}
