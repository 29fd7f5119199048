"""A handler of three steps whose process dies in or after each of them: none happens twice (L7).

Each step is a line of a file outside of the system. If an attempt died in a step that may happen at
most once, the next attempt calls its probe, which reads the file.
"""

import asyncio
import signal
from pathlib import Path

import pytest

from coatcheck import AsyncEngine, DidNotHappen, Happened, Policy, current_operation
from coatcheck.stores import open_async_store
from coatcheck.verify import crash
from tests.faults.cells import IS_ALL
from tests.faults.outcomes import STORES
from tests.faults.test_matrix import place_of
from tests.faults.victims import LEASE, PROCESSES, WAIT_S_MAX, async_points

STEPS = ("reserve", "charge", "ship")
# The retry waits until the lease of the dead process has expired.
POLICY = Policy(lease=LEASE, wait="20s")


class Downstream:
    """Has effects, and knows which it has had."""

    def __init__(self, ledger):
        self._ledger = Path(ledger)

    def done(self):
        return self._ledger.read_text().split() if self._ledger.exists() else []

    def do(self, name):
        with self._ledger.open("a") as file:
            file.write(f"{name}\n")
        return f"{name}, done"

    def probe(self, name):
        def ask(_operation):
            return Happened(value=f"{name}, done") if name in self.done() else DidNotHappen()

        return ask


def order(downstream, do):
    """The handler; *do* has the effect, and is not part of the fingerprint."""

    async def handle():
        operation = current_operation()
        return [
            await operation.step(name, do, name, at_most_once=True, probe=downstream.probe(name))
            for name in STEPS
        ]

    return handle


def die(place, point, number):
    """The process that is killed, the *number*-th time that it reaches *point*."""
    injector = crash.Injector(point, crash.kill, number)
    downstream = Downstream(place.ledger)
    store = async_points(open_async_store(place.url), injector)

    async def main():
        async with AsyncEngine(store, POLICY) as engine:
            await engine.run("k", order(downstream, injector.effect(downstream.do)), scope="s")

    asyncio.run(main())


def retried(place):
    downstream = Downstream(place.ledger)

    async def main():
        async with AsyncEngine(place.url, POLICY) as engine:
            return await engine.run("k", order(downstream, downstream.do), scope="s")

    return asyncio.run(main())


@pytest.mark.parametrize("store", STORES if IS_ALL else ["SQLite"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("point", ["in step", "after effect", "after step"])
def test_whichever_step_a_process_dies_in_each_happens_once(point, number, store, tmp_path):
    """L5, L7: and in their order."""
    place = place_of(store, tmp_path)
    process = PROCESSES.Process(target=die, args=(place, point, number))
    process.start()
    process.join(WAIT_S_MAX)
    assert process.exitcode == -signal.SIGKILL
    done = number - (point == "in step")
    assert Downstream(place.ledger).done() == list(STEPS[:done])
    assert retried(place) == [f"{name}, done" for name in STEPS]
    assert Downstream(place.ledger).done() == list(STEPS)
