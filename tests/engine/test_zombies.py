"""Zombies: executors that are stopped for longer than their lease, and come back (L5).

Real processes and real signals, on a store that both of them open.
"""

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from contextlib import closing, contextmanager

import pytest

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.core.record import COMPLETED, RUNNING
from coatcheck.errors import ClaimLost
from coatcheck.stores import Query, open_store
from tests.support.servers.postgres import postgres

PROCESSES = multiprocessing.get_context("spawn")
WAIT_S_MAX = 30
# 1 s: long enough that a busy machine renews in time, short enough to be waited for.
POLICY = Policy(lease="1s", wait="20s")


def url_of(kind, directory):
    return postgres().fresh_url() if kind == "postgres" else f"sqlite:///{directory}/keys.db"


def execute(url, line, then):
    """The zombie: reports that it executes, and waits for the test."""
    with Engine(url, POLICY) as engine:
        line.send(engine.run("k", lambda order: work(line, then), "an order", scope="s"))


def execute_async(url, line, then):
    """The same on an event loop, which is stopped with the process."""

    async def work_async(_order):
        return work(line, then)

    async def main():
        async with AsyncEngine(url, POLICY) as engine:
            return await engine.run("k", work_async, "an order", scope="s")

    line.send(asyncio.run(main()))


def work(line, then):
    operation = current_operation()
    line.send(operation.fence)
    assert line.poll(WAIT_S_MAX)
    line.recv()
    if then == "step":
        try:
            operation.step("late", lambda: line.send("the step has run"))
        except ClaimLost:
            line.send("lost")
            raise
    return "by the zombie"


def execute_until_lost(url, line, _then):
    """One that has itself cancelled as soon as it has lost its claim, and says whether it was."""

    async def work_async(_order):
        operation, task = current_operation(), asyncio.current_task()
        loop = asyncio.get_running_loop()
        operation.on_lost(lambda: loop.call_soon_threadsafe(task.cancel))
        line.send(operation.fence)
        await asyncio.sleep(WAIT_S_MAX)
        return "never cancelled"

    async def main():
        async with AsyncEngine(url, POLICY) as engine:
            return await engine.run("k", work_async, "an order", scope="s")

    try:
        line.send(asyncio.run(main()))
    except asyncio.CancelledError:
        line.send("cancelled")


@contextmanager
def no_write_in_flight(url):
    """
    Hold the write lock of a SQLite file, so that no process is stopped while it holds it.

    A renewal may be under way at any time; its frozen writer would lock out all others.
    """
    if not url.startswith("sqlite"):
        yield
        return
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=WAIT_S_MAX)) as file:
        file.execute("begin immediate")
        yield
        file.rollback()


@contextmanager
def zombie(target, url, then=""):
    """A process that executes until it is stopped; it is gone at the end."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=target, args=(url, theirs, then))
    process.start()
    try:
        assert ours.poll(WAIT_S_MAX)
        fence = ours.recv()
        with no_write_in_flight(url):
            os.kill(process.pid, signal.SIGSTOP)
        yield process, ours, fence
        process.join(WAIT_S_MAX)
        assert not process.is_alive()
    finally:
        process.kill()
        process.join()


def wake(process, line):
    os.kill(process.pid, signal.SIGCONT)
    line.send("go on")
    assert line.poll(WAIT_S_MAX)
    return line.recv()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("target", [execute, execute_async])
def test_a_zombie_cannot_overwrite_its_successor_and_its_client_gets_that_result(
    target, kind, tmp_path
):
    """L5: SIGSTOP past the lease, a take-over, SIGCONT; the answer that stands is the second."""
    url = url_of(kind, tmp_path)
    with Engine(url, POLICY) as engine, zombie(target, url) as (process, line, fence):
        fences = []

        def take_over(_order):
            fences.append(current_operation().fence)
            return "by the successor"

        assert engine.run("k", take_over, "an order", scope="s") == "by the successor"
        assert fences[0] > fence
        assert wake(process, line) == "by the successor"
        (record,) = engine.store.find(Query()).records
    assert (record.state, record.attempt) == (COMPLETED, 2)


def test_a_zombie_learns_before_its_next_step_that_it_has_lost(tmp_path):
    """L5, L7: the step does not run, although no renewal has noticed it yet."""
    url = url_of("sqlite", tmp_path)
    with Engine(url, POLICY) as engine, zombie(execute, url, "step") as (process, line, _):
        assert engine.run("k", lambda order: order, "an order", scope="s") == "an order"
        assert wake(process, line) == "lost"


def test_a_zombie_can_be_cancelled_in_the_middle_of_its_work(tmp_path):
    """L5: its next renewal tells it, although its handler takes no step."""
    url = url_of("sqlite", tmp_path)
    with Engine(url, POLICY) as engine, zombie(execute_until_lost, url) as (process, line, _):
        assert engine.run("k", lambda order: order, "an order", scope="s") == "an order"
        assert wake(process, line) == "cancelled"
        (record,) = engine.store.find(Query()).records
    assert (record.state, record.attempt) == (COMPLETED, 2)


def test_a_zombie_without_a_successor_completes(tmp_path):
    """L5: its lease ran out, but its attempt is still the last one."""
    url = url_of("sqlite", tmp_path)
    with zombie(execute, url) as (process, line, _):
        store = open_store(url)
        (record,) = store.find(Query()).records
        assert record.state == RUNNING
        assert wake(process, line) == "by the zombie"
        (record,) = store.find(Query()).records
        store.close()
    assert (record.state, record.attempt) == (COMPLETED, 1)
