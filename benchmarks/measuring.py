"""Measuring: contenders run in turn, so that a disturbance affects all of them.

A slot is one turn of one contender and returns one value. Each round begins with another contender,
because the first slot after a pause is often the fastest. Ratios are computed within a round,
between values that are seconds apart, and then their median is taken.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

Slot: TypeAlias = Callable[[], float]

# 3: the fewest rounds whose median survives one disturbed round.
ROUNDS_QUICK = 3


class Samples(NamedTuple):
    """The values of one contender, one for each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value of any round."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value of any round."""
        return max(self.values)

    def over(self, other: Samples) -> Samples:
        """Return the ratio to *other*, round by round."""
        return Samples(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


def interleave(slots: Mapping[str, Slot], rounds: int) -> dict[str, Samples]:
    """Run every slot once in each of *rounds* rounds, in turn."""
    assert rounds >= ROUNDS_QUICK
    names = list(slots)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(slots[name]())
    return {name: Samples(tuple(values)) for name, values in found.items()}


class Cost(NamedTuple):
    """The time that a number of operations took."""

    operations: int
    wall_s: float
    cpu_s: float

    @property
    def cpu_us(self) -> float:
        """Processor time of this process for one operation, all threads."""
        return self.cpu_s / self.operations * 1e6

    @property
    def per_second(self) -> float:
        """Operations a second."""
        return self.operations / self.wall_s


class For:
    """The next of *numbers* for *wall_s* seconds from the first; tasks and threads may share it."""

    def __init__(self, wall_s: float, numbers: Iterator[int] | None = None) -> None:
        self._wall_s = wall_s
        self._end_s = 0.0
        self._numbers = itertools.count() if numbers is None else numbers

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        now_s = time.perf_counter()
        self._end_s = self._end_s or now_s + self._wall_s
        if now_s >= self._end_s:
            raise StopIteration
        return next(self._numbers)


async def drive(
    operation: Callable[[int], Awaitable[object]], numbers: Iterator[int], *, at_a_time: int
) -> Cost:
    """Await *operation* for all *numbers*, with *at_a_time* tasks that do one after another."""

    async def work() -> int:
        done = 0
        for number in numbers:
            await operation(number)
            done += 1
        return done

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    done = sum(await asyncio.gather(*(work() for _ in range(at_a_time))))
    return Cost(done, time.perf_counter() - wall_s, time.process_time() - cpu_s)


def drive_threads(
    operation: Callable[[int], object], numbers: Iterator[int], *, at_a_time: int
) -> Cost:
    """Call *operation* for all *numbers*, in *at_a_time* threads."""

    def work() -> int:
        done = 0
        for number in numbers:
            operation(number)
            done += 1
        return done

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(at_a_time) as pool:
        done = sum(future.result() for future in [pool.submit(work) for _ in range(at_a_time)])
    return Cost(done, time.perf_counter() - wall_s, time.process_time() - cpu_s)
