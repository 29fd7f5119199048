"""The bank's processes: what serves transfers, to be stopped at a named step, and killed.

What is run here is `examples/bank`; on MySQL, which that does not speak, the same statements in a
guarded function. Where a process stops is told from the statements that pass through the connection
that it lends: its class is the driver's own, with a look at what was said.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import re
import signal
import socket
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import aiosqlite
import httpx
import psycopg
import pymysql
import uvicorn
from psycopg_pool import AsyncConnectionPool
from servers import START_S_MAX

from coatcheck import AsyncEngine, Engine, Policy, current_operation, lent
from coatcheck.lent.psycopg import PsycopgAsyncLent
from coatcheck.stores.ledger import Statement

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bank" / "app.py"

# Forked from a process that has imported what takes long and done nothing else: a new one is there
# in the blink of an eye, and inherits no thread, no lock and no connection of the tests'.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *(
            "pytest",
            "httpx",
            "uvicorn",
            "uvloop",
            "fastapi",
            "psycopg_pool",
            "aiosqlite",
            "pymysql",
        ),
        *("coatcheck.server.fastapi", "coatcheck.stores.postgres", "coatcheck.stores.mysql"),
    ]
)

# 30 s: a duplicate waits for the first as long as a slow machine may take to get there.
PATIENT = Policy(wait="30s")

# Where a process may stop, in their order; but for the last, nothing of it may remain.
PLACES = ("lent", "claimed", "debited", "credited", "written", "completed", "committed")

_STATEMENTS = {
    r"insert (or \w+ )?into \S*coatcheck_records": "claimed",
    r"update accounts set balance = balance -": "debited",
    r"update accounts set balance = balance \+": "credited",
    r"insert into transfers": "written",
    r"update \S*coatcheck_records": "completed",
    r"^commit$": "committed",
}


def _load_example() -> Any:
    spec = importlib.util.spec_from_file_location("bank_app", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = _load_example()


# ---------------------------------------------------------------------------------------- stops


class Pause(NamedTuple):
    """Says that its place is reached, and holds everything there until it may go on."""

    is_reached: Event
    may_go_on: Event


class Stop(NamedTuple):
    """Where a process stops, and whether it goes on from there; without a pause it is killed."""

    place: str
    pause: Pause | None = None

    def reach(self, place: str) -> None:
        """Stop, if this is the place."""
        if place != self.place:
            return
        if self.pause is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self.pause.is_reached.set()
            assert self.pause.may_go_on.wait(START_S_MAX)

    def said(self, statement: str) -> None:
        """Stop, if *statement*, which has just been executed, leads to the place."""
        for pattern, place in _STATEMENTS.items():
            if re.search(pattern, statement):
                self.reach(place)


class _Watched:
    """A connection whose statements are looked at when they have been executed."""

    stop: Stop


class WatchedPsycopg(_Watched, psycopg.AsyncConnection[Any]):
    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        cursor = await super().execute(query, *args, **kwargs)
        self.stop.said(query)
        return cursor


class WatchedLent(PsycopgAsyncLent):
    """What we say ourselves on such a connection: the end and the commit go together."""

    async def begin(self, claim: Statement) -> int:
        affected = await super().begin(claim)
        self.handle.stop.said(claim.text)
        return affected

    async def end(self, statement: Statement) -> bool:
        self.handle.stop.reach("completed")  # and on its way
        is_ended = await super().end(statement)
        self.handle.stop.said("commit")
        return is_ended


class WatchedSqlite(_Watched, sqlite3.Connection):
    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        cursor = super().execute(sql, *args)
        self.stop.said(sql)
        return cursor


class WatchedPymysql(_Watched, pymysql.Connection):
    def query(self, sql: Any, unbuffered: bool = False) -> int:
        affected = super().query(sql, unbuffered)
        self.stop.said(sql.decode("latin-1") if isinstance(sql, bytes) else sql)
        return affected

    def commit(self) -> None:
        super().commit()
        self.stop.said("commit")


def _lent(kind: str, place: Any, stop: Stop) -> Any:
    """A connection of the plain driver, watched."""
    stop.reach("lent")
    watched: type[_Watched] = {
        "sqlite": WatchedSqlite,
        "postgres": WatchedPsycopg,
        "mysql": WatchedPymysql,
    }[kind]
    watched.stop = stop
    if kind == "sqlite":
        return aiosqlite.connect(place, factory=watched)
    lent._KNOWN[WatchedPsycopg] = WatchedLent
    return WatchedPsycopg.connect(place) if kind == "postgres" else WatchedPymysql(**place)


# ------------------------------------------------------------------------------ one transfer


class Order(NamedTuple):
    """One transfer, and the database of its bank."""

    kind: str
    store: str
    place: Any
    key: str = "rent"
    amount: int = 30


class Reply(NamedTuple):
    """What a client gets."""

    status: int
    is_replayed: bool
    left: int | None = None


class Teller:
    """A process of its own that makes one transfer, from account 1 to account 2."""

    def __init__(self, order: Order, stop: Stop) -> None:
        self._replies, theirs = PROCESSES.Pipe(duplex=False)
        arguments = (order, stop, theirs)
        self.process = PROCESSES.Process(target=_transfer_once, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def reply(self) -> Reply | None:
        """What it says to its client; None if it dies before."""
        assert self._replies.poll(START_S_MAX)
        try:
            reply: Reply = self._replies.recv()
        except EOFError:
            return None
        finally:
            self.process.join(START_S_MAX)
        return reply

    def end(self) -> None:
        """End it, wherever it is."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._replies.close()


def _transfer_once(order: Order, stop: Stop, replies: Connection) -> None:
    lent = partial(_lent, order.kind, order.place, stop)
    if order.kind == "mysql":
        replies.send(_call_once(order, lent))
    else:
        replies.send(asyncio.run(_post_once(order, lent)))


async def _post_once(order: Order, lent: Callable[[], Awaitable[Any]]) -> Reply:
    async with AsyncExitStack() as stack:
        engine = AsyncEngine(order.store, PATIENT, transactions=lent)
        await stack.enter_async_context(engine)
        transport = httpx.ASGITransport(example.bank_app(engine=engine))
        client = httpx.AsyncClient(transport=transport, base_url="http://bank")
        await stack.enter_async_context(client)
        body = {"source": 1, "target": 2, "amount": order.amount}
        response = await client.post("/transfers", json=body, headers=key_header(order.key))
        is_replayed = "idempotent-replayed" in response.headers
        left = response.json()["left"] if response.is_success else None
        return Reply(response.status_code, is_replayed, left)


def key_header(key: str) -> dict[str, str]:
    return {"Idempotency-Key": f'"{key}"'}


def _call_once(order: Order, lent: Callable[[], Any]) -> Reply:
    ran = []

    def transfer(amount: int) -> int:
        ran.append(amount)
        operation = current_operation()
        assert operation is not None
        with operation.connection.cursor() as cursor:
            cursor.execute("update accounts set balance = balance - %s where id = 1", (amount,))
            cursor.execute("update accounts set balance = balance + %s where id = 2", (amount,))
            row = (operation.key, 1, 2, amount)
            cursor.execute("insert into transfers values (%s, %s, %s, %s)", row)
            cursor.execute("select balance from accounts where id = 1")
            ((left,),) = cursor.fetchall()
        return int(left)

    with Engine(order.store, PATIENT, transactions=lent) as engine:
        left = engine.transaction(order.key, transfer, order.amount, scope="transfers")
    return Reply(201, not ran, left)


# ------------------------------------------------------------------------------------- a server


class Branch:
    """A server of the bank, in a process that may be killed and started again."""

    def __init__(self, url: str, listening: socket.socket, *, has_pool: bool) -> None:
        self._arguments = (url, listening, has_pool)
        self.start()

    def start(self) -> None:
        """Begin to answer."""
        self.process = PROCESSES.Process(target=_serve, args=self._arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """End it where it stands."""
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(url: str, listening: socket.socket, has_pool: bool) -> None:
    asyncio.run(_serve_until_killed(url, listening, has_pool=has_pool))


async def _serve_until_killed(url: str, listening: socket.socket, *, has_pool: bool) -> None:
    """Serve, on connections of a pool of the application's own or on those of the store."""
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"store": url}
        if has_pool:
            pool = AsyncConnectionPool(url, min_size=1, max_size=10, timeout=1, open=False)
            options["transactions"] = await stack.enter_async_context(pool)
        config = uvicorn.Config(example.bank_app(**options), log_config=None, lifespan="off")
        await uvicorn.Server(config).serve(sockets=[listening])
