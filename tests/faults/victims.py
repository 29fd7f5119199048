"""The process that a fault strikes, and its retry; each in sync and in async code.

Effects are counted outside of the system: as lines of a file, and in transaction mode as rows of
the application's own table. Every store is reached as it is in production: from an event loop over
that loop's own connections, where the store offers them, and from threads over theirs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from coatcheck import (
    AsyncEngine,
    ClaimLost,
    DidNotHappen,
    Engine,
    Happened,
    KeyBusy,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    current_operation,
    open_store,
)
from coatcheck.core.record import Record, Swap
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.asgi.exchange import RUNNING_EXCHANGES
from coatcheck.stores import AsyncStore, open_async_store
from coatcheck.verify import crash
from tests.faults.cells import Cell, Place
from tests.faults.scripts import Script, play, play_async

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("coatcheck.server.fastapi", "coatcheck.verify.crash", "psycopg", "redis", "aiosqlite"),
        *("pytest", "httpx", "fastapi", "uvicorn"),
    ]
)
# 1 s: long enough that a busy machine renews in time, short enough to be waited for.
LEASE = "1s"
# Much longer than a store is down: no request takes over from a running attempt.
LEASE_LONG = "60s"
WAIT_S_MAX = 30

# ------------------------------------------------------------------------------------ the handler


class Work:
    """The handler of one cell, with or without a fault."""

    def __init__(self, cell: Cell, place: Place, injector: Injector | None = None) -> None:
        self.cell = cell
        self.place = place
        self.injector = injector
        self.play: Callable[[Script[str]], Any] = play_async if cell.code == "async" else play
        self.happen = self._happen if injector is None else injector.effect(self._happen)

    def policy(self) -> Policy:
        """The policy of the cell's recovery."""
        recovery, is_meanwhile = self.cell.recovery, self.cell.retry == "meanwhile"
        options: dict[str, Any] = {"lease": LEASE, "wait": "3s"}
        if is_meanwhile:
            options = {"lease": LEASE_LONG, "wait": "300ms"}
        if recovery == "transaction":
            options["mode"] = "transaction"
        elif recovery in ("reconcile", "manual"):
            options["recovery"] = recovery
        if recovery == "reconcile":
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

    def handle(self) -> Any:
        """Do the one thing that must happen once."""
        return self.play(self._handle())

    def _handle(self) -> Script[str]:
        operation = current_operation()
        assert operation is not None
        yield self.reach("after claim")
        if self.cell.recovery == "steps":
            done: str = yield operation.step("effect", self.step, at_most_once=True, probe=self.ask)
            yield self.reach("after step")
        elif self.cell.recovery == "transaction":
            yield operation.connection.execute("insert into effects values (1)")
            yield self.reach("after effect")
            done = "done"
        else:
            done = self.happen()
            yield self.stay("after effect")
        return done

    def step(self) -> Any:
        """The same as a step."""
        return self.play(self._step())

    def _step(self) -> Script[str]:
        yield self.reach("in step")
        done = self.happen()
        yield self.stay("after effect")
        return done

    def reach(self, point: crash.Point) -> Any:
        """A point in the handler, where it is not seen in the store; a cancelled handler ends here."""
        if self.injector is not None and not self.injector.is_in_store:
            self.injector.reach(point)
        return self.stay(point)

    def stay(self, point: crash.Point) -> Any:
        """If the retry comes meanwhile, stay at the point until it is there."""
        if self.injector is None or self.cell.retry != "meanwhile" or point != self.cell.point:
            return None
        wait = self.injector.wait
        return asyncio.to_thread(wait) if self.cell.code == "async" else wait()


# ------------------------------------------------------------------------------------- the faults


class Injector(crash.Injector):
    """The fault of *cell*, at its point; the parent freezes or kills the store."""

    def __init__(self, cell: Cell, line: Connection) -> None:
        faults: dict[str, Callable[[], object]] = {
            "kill": crash.kill,
            "freeze": crash.freeze,
            "exception": crash.fail,
            "cancellation": lambda: asyncio.current_task().cancel(),  # type: ignore[union-attr]
            "client gone": _cancel_request,
            "store killed": self._ask_parent,
            "store frozen": self._ask_parent,
        }
        super().__init__(cell.point, faults[cell.fault])
        # Its points are seen in the store; otherwise in the handler.
        self.is_in_store = cell.fault in ("kill", "freeze") and cell.recovery != "transaction"
        self._line = line

    def _ask_parent(self) -> None:
        self._line.send("now")
        self.wait()

    def wait(self) -> None:
        """Wait for a message of the parent."""
        assert self._line.poll(WAIT_S_MAX)
        self._line.recv()


def async_points(store: AsyncStore, injector: crash.Injector) -> AsyncStore:
    """*store*, with the points around what event loops and threads write to it."""
    return _Around(store, injector)  # type: ignore[return-value] # the rest it has by delegation


class _Around:
    """A store for event loops, with the points that `crash.Injector.store` has for threads."""

    def __init__(self, store: AsyncStore, injector: crash.Injector) -> None:
        self._store = store
        self._injector = injector
        self.blocking = injector.store(store.blocking)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        if any(crash._is_claim(swap) for swap in swaps):
            self._injector.reach("before claim")
        lost = await self._store.swap(swaps)
        for swap, conflict in zip(swaps, lost, strict=True):
            if conflict is None:
                self.blocking._reach_after(swap)  # type: ignore[attr-defined] # it is crash's own
        return lost


# ------------------------------------------------------------------------------------- the victim


def suffer(cell: Cell, place: Place, line: Connection) -> None:
    """The process that meets the fault."""
    injector = Injector(cell, line)
    try:
        _play(cell, _suffer(Work(cell, place, injector)))
    except (crash.Injected, asyncio.CancelledError, ClaimLost):
        pass  # its client gets these; a process that was stopped finds that it has lost its claim
    except Exception:  # its client gets a 503, and asks again
        if not cell.fault.startswith("store"):
            raise
    assert injector.has_struck, "the point was never reached, and nothing is shown"


def _play(cell: Cell, script: Script[str]) -> str:
    return asyncio.run(play_async(script)) if cell.code == "async" else play(script)


def _suffer(work: Work) -> Script[str]:
    cell, injector, engine = work.cell, work.injector, engine_of(work)
    assert injector is not None
    try:
        if cell.fault == "client gone":
            yield _hang_up(engine, work, injector)
            return ""
        if cell.fault.startswith("store"):  # so that the connections are open already
            yield engine.run("k", _nothing(cell), scope="before")
        if not injector.is_in_store:
            injector.reach("before claim")
        done: str = yield engine.run("k", work.handle, scope="s")
        if not injector.is_in_store:
            injector.reach("after complete")
        injector.reach("before response")
        return done
    finally:
        yield engine.close()


def engine_of(work: Work) -> Any:
    """An engine as in production, but for the points."""
    cell, injector, policy = work.cell, work.injector, work.policy()
    is_seen = injector is not None and injector.is_in_store
    if cell.code == "sync":
        store = open_store(work.place.url)
        return Engine(injector.store(store) if is_seen else store, policy)
    async_store = open_async_store(work.place.url)
    return AsyncEngine(async_points(async_store, injector) if is_seen else async_store, policy)


def _nothing(cell: Cell) -> Callable[[], Any]:
    async def nothing() -> str:
        return ""

    return nothing if cell.code == "async" else lambda: ""


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
        await asyncio.gather(*(one.task for one in RUNNING_EXCHANGES if one.task is not None))


def _guarded(engine: AsyncEngine, work: Work) -> Any:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        body = (await work.handle()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return IdempotencyMiddleware(app, engine=engine)


async def _ask(app: Any, injector: Injector | None = None) -> str:
    """The body of the answer; the claim follows when the body of the request is there."""
    sent: list[Any] = []
    headers = [(b"idempotency-key", b"k")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}

    async def receive() -> Any:
        if injector is not None:
            injector.reach("before claim")
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return str(sent[1]["body"].decode())


# -------------------------------------------------------------------------------------- the retry


# Called with each refusal that the client gets meanwhile.
OnRefused = Callable[[str], object] | None


def retry(cell: Cell, place: Place, on_refused: OnRefused = None) -> str:
    """
    A client that asks until it has a final answer, or the operation is in doubt.

    In transaction mode a frozen process may hold the row. Then the result is "busy", unless
    *on_refused* is there, which gets every refusal and lets that process go on.
    """
    try:
        return _play(cell, _retry(Work(cell, place), on_refused))
    except StoreUnavailable:  # SQLite cannot even be opened while a frozen process holds its lock
        assert cell.recovery == "transaction"
        return "busy"


def _retry(work: Work, on_refused: OnRefused) -> Script[str]:
    engine, deadline = engine_of(work), time.monotonic() + WAIT_S_MAX
    try:
        while True:
            try:
                result = yield _asked(engine, work)
            except OutcomeUnknown:
                return "in doubt"
            except (KeyBusy, StoreUnavailable) as refusal:
                assert time.monotonic() < deadline, "it never ends"
                if on_refused is not None:
                    on_refused(type(refusal).__name__)
                elif work.cell.recovery == "transaction":
                    return "busy"
            else:
                return "answer" if result == "done" else result
    finally:
        yield engine.close()


def _asked(engine: Any, work: Work) -> Awaitable[str] | str:
    if work.cell.fault == "client gone":
        return _ask(_guarded(engine, work))
    asked: Awaitable[str] | str = engine.run("k", work.handle, scope="s")
    return asked
