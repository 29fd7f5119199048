"""One cell of the matrix: an operation that meets a fault in a process of its own, and its retry.

Effects are counted outside of the system: as lines of a file, and in transaction mode as rows of
the application's own table.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from coatcheck import (
    AsyncEngine,
    ClaimLost,
    DidNotHappen,
    Happened,
    KeyBusy,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    current_operation,
    open_store,
)
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.asgi_visit import UNDER_WAY
from coatcheck.stores import ThreadedStore
from coatcheck.verify import crash
from coatcheck.verify.outcomes import Fault, Outcome, Recovery

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["coatcheck", "coatcheck.verify.outcomes", "psycopg", "redis", "aiosqlite", "pytest"]
)
# 1 s: long enough that a busy machine renews in time, short enough to be waited for.
LEASE = "1s"
WAIT_S_MAX = 30


class Cell(NamedTuple):
    """Where what happens to whom."""

    store: str
    fault: Fault
    point: crash.Point
    recovery: Recovery

    def __str__(self) -> str:
        return f"{self.store}-{self.recovery}-{self.fault}-{self.point.replace(' ', '_')}"


class Place(NamedTuple):
    """The store of one cell, and where its effects are counted."""

    url: str
    ledger: str

    @property
    def path(self) -> str:
        """The file of a store on SQLite."""
        return self.url.removeprefix("sqlite:///").partition("?")[0]

    def effects(self, recovery: Recovery) -> int:
        """How often it has happened."""
        if recovery != "transaction":
            path = Path(self.ledger)
            return len(path.read_text().splitlines()) if path.exists() else 0
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.path)) as connection:
                return connection.execute("select count(*) from effects").fetchone()[0]
        with psycopg.connect(self.url) as connection:
            return connection.execute("select count(*) from effects").fetchone()[0]

    def prepare(self) -> None:
        """Make the application's own table."""
        table = "create table effects (number integer)"
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute(table)
        elif self.url.startswith("postgresql"):
            with psycopg.connect(self.url) as connection:
                connection.execute(table)


# ------------------------------------------------------------------------------------ the handler


class Work:
    """The handler of one cell, with or without a fault."""

    def __init__(self, place: Place, recovery: Recovery, injector: crash.Injector | None) -> None:
        self.place = place
        self.recovery = recovery
        self.injector = injector
        self.happen = self._happen if injector is None else injector.effect(self._happen)

    def policy(self) -> Policy:
        """As the cell's column says."""
        options: dict[str, Any] = {"lease": LEASE, "wait": "3s"}
        if self.recovery == "transaction":
            options["mode"] = "transaction"
        elif self.recovery in ("reconcile", "manual"):
            options["recovery"] = self.recovery
        if self.recovery == "reconcile":
            options["reconcile"] = self.ask
        return Policy(**options)

    def ask(self, _operation: object) -> Happened | DidNotHappen:
        """What the downstream knows."""
        return Happened(value="done") if self.place.effects("retry") else DidNotHappen()

    def _happen(self) -> str:
        file = os.open(self.place.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, b"once\n")
        finally:
            os.close(file)
        return "done"

    async def handle(self) -> str:
        """Do the one thing that must happen once."""
        operation = current_operation()
        assert operation is not None
        await self.reach("after claim")
        if self.recovery == "steps":
            done: str = await operation.step("effect", self.step, at_most_once=True, probe=self.ask)
            await self.reach("after step")
        elif self.recovery == "transaction":
            await operation.connection.execute("insert into effects values (1)")
            await self.reach("after effect")
            done = "done"
        else:
            done = self.happen()
            await asyncio.sleep(0)
        return done

    async def step(self) -> str:
        """The same as a step."""
        await self.reach("in step")
        done = self.happen()
        await asyncio.sleep(0)
        return done

    async def reach(self, point: crash.Point) -> None:
        """A point in the handler, where it is not seen in the store; who is cancelled ends here."""
        if self.injector is not None and self.injector.kind != "store":
            self.injector.reach(point)
            await asyncio.sleep(0)


class Injector(crash.Injector):
    """One whose points are in the store, or else in the handler."""

    kind = "store"


def inject(cell: Cell, line: Connection) -> Injector:
    """The fault of *cell*, at its point; what happens to the store is the parent's to do."""

    def ask_parent() -> None:
        line.send("now")
        assert line.poll(WAIT_S_MAX)
        line.recv()

    faults: dict[str, Callable[[], object]] = {
        "kill": crash.kill,
        "freeze": crash.freeze,
        "exception": crash.fail,
        "cancellation": lambda: asyncio.current_task().cancel(),  # type: ignore[union-attr]
        "client gone": _cancel_request,
        "store killed": ask_parent,
        "store frozen": ask_parent,
    }
    injector = Injector(cell.point, faults[cell.fault])
    if cell.fault not in ("kill", "freeze") or cell.recovery == "transaction":
        injector.kind = "handler"
    return injector


# ---------------------------------------------------------------------------------- the processes


def suffer(cell: Cell, place: Place, line: Connection) -> None:
    """The process that meets the fault."""
    injector = inject(cell, line)
    try:
        asyncio.run(_suffer(cell, place, injector))
    except (crash.Injected, asyncio.CancelledError, ClaimLost):
        pass  # of these its client knows; and who was stopped learns that it has lost its claim
    except Exception:  # its client is told of an outage, and asks again
        if not cell.fault.startswith("store"):
            raise
    assert injector.has_struck, "the point was never reached, and nothing is shown"


async def _suffer(cell: Cell, place: Place, injector: Injector) -> None:
    work, store = Work(place, cell.recovery, injector), open_store(place.url)
    if injector.kind == "store":
        store = injector.store(store)
    elif cell.fault != "client gone":
        injector.reach("before claim")
    async with AsyncEngine(ThreadedStore(store), work.policy()) as engine:
        if cell.fault == "client gone":
            await _hang_up(engine, work, injector)
            return
        await engine.run("k", work.handle, scope="s")
        if injector.kind == "handler":
            injector.reach("after complete")
        injector.reach("before response")


# The request whose client is gone; one for each process.
REQUESTS: list[asyncio.Task[str]] = []


def _cancel_request() -> None:
    REQUESTS[0].cancel()


async def _hang_up(engine: AsyncEngine, work: Work, injector: Injector) -> None:
    """Send a request over ASGI whose client leaves, and stay until its work is done."""
    app = injector.asgi(_guarded(engine, work))
    REQUESTS.append(asyncio.ensure_future(_ask(app, injector)))
    with suppress(asyncio.CancelledError):
        await REQUESTS[0]
    async with asyncio.timeout(WAIT_S_MAX):
        await asyncio.gather(*(visit.task for visit in UNDER_WAY if visit.task is not None))


def _guarded(engine: AsyncEngine, work: Work) -> Any:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        body = (await work.handle()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return IdempotencyMiddleware(app, engine=engine)


async def _ask(app: Any, injector: Injector | None = None) -> str:
    """The body of the answer; it is claimed when the body of the request is there."""
    said: list[Any] = []
    headers = [(b"idempotency-key", b"k")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}

    async def receive() -> Any:
        if injector is not None:
            injector.reach("before claim")
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, receive, send)
    return str(said[1]["body"].decode())


def retry_http(place: Place, recovery: Recovery) -> str:
    """A client that asks again, over ASGI."""
    work = Work(place, recovery, None)

    async def main() -> str:
        async with AsyncEngine(place.url, work.policy()) as engine:
            return _end_of(await _ask(_guarded(engine, work)))

    return asyncio.run(main())


def retry(place: Place, recovery: Recovery) -> str:
    """A client that asks until it has a final answer, or knows that nobody knows."""
    work = Work(place, recovery, None)

    async def main() -> str:
        async with AsyncEngine(place.url, work.policy()) as engine:
            deadline = time.monotonic() + WAIT_S_MAX
            while True:
                try:
                    return _end_of(await engine.run("k", work.handle, scope="s"))
                except OutcomeUnknown:
                    return "in doubt"
                except (KeyBusy, StoreUnavailable):
                    assert time.monotonic() < deadline, "it never ends"
                    if recovery == "transaction":
                        return "busy"  # somebody holds the row, and may be asleep

    try:
        return asyncio.run(main())
    except StoreUnavailable:  # SQLite cannot even be opened while a transaction is asleep
        assert recovery == "transaction"
        return "busy"


def _end_of(result: str) -> str:
    return "answer" if result == "done" else result


def outcome(cell: Cell, place: Place, trouble: Callable[[Connection], None]) -> Outcome:
    """What became of it, when all is over; *trouble* is what happens to the store."""
    place.prepare()
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=suffer, args=(cell, place, theirs))
    process.start()
    try:
        if cell.fault.startswith("store"):
            assert ours.poll(WAIT_S_MAX)
            trouble(ours)
        if cell.fault == "freeze":
            _wait_until_stopped(process.pid)
            retry(place, cell.recovery)
            os.kill(process.pid, signal.SIGCONT)
        process.join(WAIT_S_MAX)
        assert process.exitcode is not None, "the process never ends"
        assert process.exitcode == (-signal.SIGKILL if cell.fault == "kill" else 0)
    finally:
        process.kill()
        process.join()
    end = (retry_http if cell.fault == "client gone" else retry)(place, cell.recovery)
    assert end in ("answer", "in doubt"), end
    return Outcome(place.effects(cell.recovery), end)  # type: ignore[arg-type] # checked above


def _wait_until_stopped(pid: int | None) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] != "T":
        assert time.monotonic() < deadline, "it never reached its point"
        time.sleep(0.01)
