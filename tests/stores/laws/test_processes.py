"""What takes more than one process: one store, opened by several at once, one of them killed.

A store that declares itself not shared is of one process; it has to say so to the doctor, and that
is then asserted instead.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from coatcheck.core.record import Record, Swap, renewed
from coatcheck.stores import Store, open_store
from coatcheck.stores.registry import STORES

from .drivers import WAIT_S_MAX
from .kinds import KINDS, OWN, Kind
from .records import NOW_MS, RETENTION_MS, assert_exactly, claim_of, id_of

PROCESSES = 4
ROUNDS = 40

# Other processes open a store by its URL alone.
BY_URL = [kind for kind in KINDS if kind.is_plain]
SHARED = [OWN, *(kind for kind in BY_URL if kind.shared)]
ALONE = [kind for kind in BY_URL if not kind.shared]
DURABLE = [kind for kind in BY_URL if kind.durable]

start: Barrier


def meet_at(barrier: Barrier) -> None:
    """A barrier reaches a new process only as it begins."""
    global start  # noqa: PLW0603 - one for each process
    start = barrier


def in_processes(work: Any, url: str) -> list[Any]:
    """Run *work* (url, number of the process) in real processes; results in order."""
    context = fork_server()
    barrier = context.Barrier(PROCESSES, timeout=WAIT_S_MAX)
    with ProcessPoolExecutor(PROCESSES, context, meet_at, (barrier,)) as processes:
        return list(processes.map(work, [url] * PROCESSES, range(PROCESSES), timeout=WAIT_S_MAX))


@cache
def fork_server() -> ForkServerContext:
    """
    Where new processes come from: one that has imported everything, and done nothing yet.

    Not from this one: a child that inherits its threads, locks and stores proves nothing. And not
    from nothing: to import the drivers takes several times as long as the work.
    """
    context = multiprocessing.get_context("forkserver")
    stores = [f"coatcheck.stores.{info.module}" for info in STORES]
    context.set_forkserver_preload([__name__, *stores])
    with pytest.MonkeyPatch.context() as patch:
        # Not every Python tells it where this one has its modules from (CPython's issue 117378).
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    return context


def named(kinds: list[Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def opened(url: str) -> Store:
    return OWN.open(url) if url.endswith(".log") else open_store(url)


def claim_in_rounds(url: str, number: int) -> Sequence[Record | None]:
    start.wait()
    store = opened(url)
    answers: list[Record | None] = []
    for round in range(ROUNDS):
        claim = claim_of(id_of(round), nonce=number)
        start.wait()
        answers += store.swap([Swap(claim.id, 0, claim)])
    store.close()
    return answers


@named(SHARED)
def test_of_simultaneous_claims_in_several_processes_one_wins(kind: Kind, tmp_path: Path):
    """L1, D4: all open it at once, and one creates it; losers get the winner's record."""
    told = in_processes(claim_in_rounds, kind.fresh_url(tmp_path))
    for round in range(ROUNDS):
        answers = [answers[round] for answers in told]
        winner = claim_of(id_of(round), nonce=answers.index(None))
        assert answers.count(None) == 1
        for answer in answers:
            if answer is not None:
                assert_exactly(answer, winner)


def renew_often(url: str, _number: int) -> int:
    store = opened(url)
    seen = claim_of()
    start.wait()
    for _ in range(ROUNDS):
        while lost := store.swap([Swap(seen.id, seen.version, renewed(seen, NOW_MS))])[0]:
            seen = lost
        seen = renewed(seen, NOW_MS)
    store.close()
    return seen.version


@named(SHARED)
def test_no_update_of_several_processes_is_lost(kind: Kind, tmp_path: Path):
    """L5: the version is a fence between processes, too."""
    url = kind.fresh_url(tmp_path)
    store = opened(url)
    claim = claim_of()
    assert store.swap([Swap(claim.id, 0, claim)])[0] is None
    versions = in_processes(renew_often, url)
    standing = store.get([claim.id])[0]
    assert standing is not None
    assert standing.version == max(versions) == claim.version + PROCESSES * ROUNDS
    store.close()


def sweep_until_empty(url: str, _number: int) -> int:
    store = opened(url)
    start.wait()
    taken = 0
    while count := store.sweep(NOW_MS + RETENTION_MS, limit=7):
        taken += count
    store.close()
    return taken


@named(SHARED)
def test_sweeps_of_several_processes_take_every_record_once(kind: Kind, tmp_path: Path):
    """T3: safe to run on every node at once."""
    url = kind.fresh_url(tmp_path)
    store = opened(url)
    expired = [claim_of(id_of(number)) for number in range(200)]
    live = claim_of(id_of(999), now_ms=NOW_MS + 1)
    store.swap([Swap(record.id, 0, record) for record in [*expired, live]])
    taken = in_processes(sweep_until_empty, url)
    assert sum(taken) == (200 if kind.sweeps else 0)
    left = [record for record in store.get([r.id for r in [*expired, live]]) if record]
    assert left == ([live] if kind.sweeps else [*expired, live])
    store.close()


# Prints one line for each operation whose claim and completion were acknowledged.
CLAIMANT = """
import itertools, sys
from coatcheck.core.record import RUNNING, Record, Swap, completed
from coatcheck.stores import open_store

store = open_store(sys.argv[1])
for number in itertools.count():
    id = number.to_bytes(16, "big")
    claim = Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1 << 43, 7, "", "", "", None, None)
    assert store.swap([Swap(id, 0, claim)])[0] is None
    assert store.swap([Swap(id, 1, completed(claim, b"x" * 5000))])[0] is None
    print(number, flush=True)
"""


@named(DURABLE)
def test_what_was_acknowledged_survives_a_kill(kind: Kind, tmp_path: Path):
    """L5, D1: every claim that its process was told of is there after SIGKILL."""
    url = kind.fresh_url(tmp_path)
    command = [sys.executable, "-c", CLAIMANT, url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for wanted in range(50):
            assert process.stdout.readline() == b"%d\n" % wanted
        process.send_signal(signal.SIGKILL)
        acknowledged = 50 + len(process.stdout.read().splitlines())
    store = open_store(url)
    ids = [number.to_bytes(16, "big") for number in range(acknowledged)]
    for id, record in zip(ids, store.get(ids), strict=True):
        assert record is not None, f"{id.hex()} was acknowledged and is gone"
        assert record.response == b"x" * 5000
    assert store.swap([Swap(ids[0], 0, claim_of(ids[0]))])[0] is not None
    assert not [finding for finding in store.check() if finding.level == "error"]
    store.close()


SWAP = """
import asyncio, logging, os, sys, threading
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.stores import open_async_store, open_store

logging.disable(logging.WARNING)  # that a server of the tests is fast rather than safe

def swap(number):
    id = number.to_bytes(16, "big")
    return [Swap(id, 0, Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1 << 43, 7, "", "", "", None, b""))]
"""
# Each uses a store, forks, and uses it in parent and child; other threads hold its locks meanwhile.
FORKING = {
    "threads": """
store = open_store(sys.argv[1])
assert store.swap(swap(1)) == [None]
stop = threading.Event()

def hold_locks():
    while not stop.is_set():
        store.get([bytes(16)])

threads = [threading.Thread(target=hold_locks) for _ in range(3)]
for thread in threads:
    thread.start()
for start in range(1000, 6000, 1000):
    child = os.fork()
    if child == 0:
        for number in range(start, start + 20):
            assert store.swap(swap(number)) == [None]
        assert store.swap(swap(1)) != [None]
        store.close()
        os._exit(0)
    for number in range(start + 500, start + 520):
        assert store.swap(swap(number)) == [None]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.swap(swap(start)) != [None]
stop.set()
for thread in threads:
    thread.join()
store.close()
print("done")
""",
    "loop": """
store = open_async_store(sys.argv[1])

async def write(start):
    for number in range(start, start + 100):
        assert await store.swap(swap(number)) == [None]
    assert await store.swap(swap(1)) != [None]

async def main():
    assert await store.swap(swap(1)) == [None]
    assert await store.get([bytes(16)]) == [None]
    child = os.fork()
    if child == 0:
        asyncio.run(write(1000))
        asyncio.run(store.close())
        os._exit(0)
    await write(2000)
    ended = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    await write(3000)
    await store.close()

asyncio.run(main())
print("done")
""",
}


@pytest.mark.parametrize("way", FORKING)
@named([kind for kind in SHARED if kind is not OWN])
def test_a_store_from_before_a_fork_works_in_parent_and_child(kind: Kind, tmp_path: Path, way: str):
    """D4, L1: each with its own connections, whatever locks other threads held at the fork."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SWAP + FORKING[way]]
    ran = subprocess.run(
        [*command, kind.fresh_url(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


@named(ALONE)
def test_a_store_of_one_process_says_so(kind: Kind, tmp_path: Path):
    """D3: who starts a second process with it has been warned."""
    store = open_store(kind.fresh_url(tmp_path))
    warnings = [finding.message for finding in store.check() if finding.level == "warning"]
    assert any("process" in warning for warning in warnings)
