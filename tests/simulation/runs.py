"""Runs: many schedules, on all processors, and one of them with everything that happened."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from .schedule import simulate
from .trace import readable
from .world import Violation

# 500 schedules take about two seconds: short enough to stop soon after a failure.
CHUNK = 500


class Total(NamedTuple):
    """How much was simulated, and what happened in all of it."""

    schedules: int
    steps: int
    counts: Counter[str]


def run(seeds: Iterable[int], kind: str | None = None) -> Total:
    """Run the schedules of *seeds*; raises `Violation`."""
    schedules = steps = 0
    counts: Counter[str] = Counter()
    for seed in seeds:
        summary = simulate(seed, kind=kind)
        schedules += 1
        steps += summary.steps
        counts += summary.counts
    return Total(schedules, steps, counts)


def run_on_all_processors(first: int, schedules: int, kind: str | None = None) -> Iterator[Total]:
    """Run so many schedules, from the seed *first* on; each chunk of them when it is done."""
    end = first + schedules
    chunks = [range(start, min(start + CHUNK, end)) for start in range(first, end, CHUNK)]
    # Spawned, not forked: a worker must not depend on what its parent has done before.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run, chunk, kind) for chunk in chunks]
        try:
            for chunk in running:
                yield chunk.result()
        finally:
            pool.shutdown(cancel_futures=True)


def explained(seed: int, kind: str | None = None) -> tuple[str, bool]:
    """Everything that happens in the schedule of *seed*, and whether all promises are kept."""
    try:
        summary = simulate(seed, kind=kind, is_traced=True)
    except Violation as violation:
        return f"{readable(violation.trace or [])}\n\nbroken: {violation}", False
    return (
        f"{readable(summary.trace or [])}\n\nevery promise is kept, in {summary.steps} steps",
        True,
    )
