"""The law of all brokers: each event has its effect once, whatever is killed (E1)."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple, Self

import psycopg

# 0.3: every third event is published twice.
DUPLICATES = 0.3
WORKERS = 2
# All of them together, on a busy machine: in the short law, and where many are killed.
DEADLINE_S, DEADLINE_S_OF_MANY = 120, 900
IS_LONG = os.environ.get("COATCHECK_FAULTS") == "all"
# How many events, and how many kills of a worker: in `make test-faults`, and in `make test`.
MESSAGES, KILLS = (5_000, 20) if IS_LONG else (60, 2)
# A few at a time: 60 events may all have their effect between two looks, and no worker was killed.
PORTION = 10_000 if IS_LONG else 15
# 5: as many messages can never be handled. They must not keep others from being handled.
POISONED = 5
POISON = b"poison"


class Source(NamedTuple):
    """A queue of a real broker, as a worker and a publisher name it."""

    broker: str
    url: str
    queue: str
    # Publishes events, each with its id and its body.
    publish: Callable[[Sequence[tuple[str, bytes]]], None]
    # How many may wait in the queue. The next are published when these have their effect, and when
    # `settle` has returned.
    waiting_max: int = 10_000
    settle: Callable[[], object] = lambda: None


class Ledger:
    """The handler's own database, with a row for each effect."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._run("create table effects (event text)")

    def effects(self) -> Counter[str]:
        """How often each event had its effect."""
        return Counter(event for (event,) in self._run("select event from effects"))

    def _run(self, statement: str) -> list[tuple[str]]:
        if self.url.startswith("sqlite"):
            path = self.url.removeprefix("sqlite:///")
            with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
                return connection.execute(statement).fetchall()
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


class Workers:
    """Processes that consume; each that is killed is replaced."""

    def __init__(self, source: Source, ledger: Ledger, count: int = WORKERS) -> None:
        self._count = count
        words = ["-m", "tests.consumer.worker", *source[:3], ledger.url]
        self._command = [sys.executable, *words]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self) -> None:
        self._processes.append(subprocess.Popen(self._command, stdout=subprocess.DEVNULL))

    def kill_one(self, chosen: random.Random) -> None:
        """Kill a worker without a warning, and start another."""
        process = self._processes.pop(chosen.randrange(len(self._processes)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        self._start()


class Publisher:
    """Publishes the events of a law, many of them twice, and some that can never be handled."""

    def __init__(self, source: Source, chosen: random.Random) -> None:
        self.ids = [f"event-{number}" for number in range(MESSAGES)]
        twice = [id for id in self.ids if chosen.random() < DUPLICATES]
        self._waiting = [(id, f"body of {id}".encode()) for id in (*self.ids, *twice)]
        self._waiting += [(f"poison-{number}", POISON) for number in range(POISONED)]
        chosen.shuffle(self._waiting)
        self._source = source
        self._published: set[str] = set()

    def publish(self, effects: Counter[str]) -> None:
        """Publish the next events, if all before have their effect."""
        if self._waiting and effects.keys() >= self._published:
            size = min(PORTION, self._source.waiting_max)
            portion, self._waiting = self._waiting[:size], self._waiting[size:]
            if self._published:
                self._source.settle()
            self._source.publish(portion)
            self._published.update(id for id, body in portion if body != POISON)


def each_event_has_its_effect_once(source: Source, ledger: Ledger) -> None:
    """Publish events, and kill workers while they handle them."""
    chosen = random.Random(7)
    publisher = Publisher(source, chosen)
    publisher.publish(ledger.effects())
    deadline = time.monotonic() + (DEADLINE_S_OF_MANY if IS_LONG else DEADLINE_S)
    killed = 0
    with Workers(source, ledger) as workers:
        while len(effects := ledger.effects()) < MESSAGES:
            assert time.monotonic() < deadline, f"{len(effects)} of {MESSAGES} have their effect"
            if killed < KILLS and len(effects) * (KILLS + 1) > MESSAGES * (killed + 1):
                workers.kill_one(chosen)
                killed += 1
            publisher.publish(effects)
            time.sleep(0.02)
    assert killed == KILLS
    assert ledger.effects() == Counter(publisher.ids)
