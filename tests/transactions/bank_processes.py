"""Processes of `examples/bank` that are paused or killed at a named step of a transfer.

The example does not support MySQL, which has no `returning`; there, a route of its own does the
same. The step is recognised by the statements on the connection, whose class is a subclass of the
driver's own.
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
from fastapi import FastAPI, HTTPException
from psycopg_pool import AsyncConnectionPool

from coatcheck import AsyncEngine, Policy, transactions
from coatcheck.core.flow import Flow
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.stores.transaction_statements import Statement
from coatcheck.transactions.psycopg import PsycopgConnection
from tests.support.servers import START_S_MAX

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bank" / "app.py"

# Forked from a process that has only imported modules: new processes start fast, and inherit no
# thread, lock or connection of the tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("pytest", "httpx", "uvicorn", "uvloop", "fastapi", "psycopg_pool", "aiosqlite"),
        *("pymysql", "coatcheck.server.fastapi", "coatcheck.stores.postgres.store"),
        "coatcheck.stores.mysql.store",
    ]
)

# 30 s: a duplicate waits for the first as long as a slow machine may take to get there.
PATIENT = Policy(wait="30s")

# The steps at which a process may stop. Only after the last one anything may remain.
STEPS = ("acquired", "claimed", "debited", "credited", "written", "completed", "committed")
# Those of a transfer that is refused after its debit.
REFUSED_STEPS = ("debited", "undone", "completed", "committed")

_STATEMENTS = {
    r"insert (or \w+ )?into \S*coatcheck_records": "claimed",
    r"update accounts set balance = balance -": "debited",
    r"update accounts set balance = balance \+": "credited",
    r"insert into transfers": "written",
    r"^rollback to savepoint": "undone",
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
    """Signals that the step is reached, and blocks there until it may go on."""

    is_reached: Event
    may_go_on: Event


class Stop(NamedTuple):
    """The step at which a process stops; without a pause it kills itself."""

    place: str
    pause: Pause | None = None

    def reach(self, place: str) -> None:
        """Stop, if this is the step."""
        if place != self.place:
            return
        if self.pause is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self.pause.is_reached.set()
            assert self.pause.may_go_on.wait(START_S_MAX)

    def executed(self, statement: str) -> None:
        """Stop, if *statement*, which was just executed, is that of the step."""
        for pattern, place in _STATEMENTS.items():
            if re.search(pattern, statement):
                self.reach(place)


class _Watched:
    """A connection that reports its statements after they were executed."""

    stop: Stop


class WatchedPsycopg(_Watched, psycopg.AsyncConnection[Any]):
    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        cursor = await super().execute(query, *args, **kwargs)
        self.stop.executed(query)
        return cursor


class WatchedConnection(PsycopgConnection):
    """Reports our own statements on such a connection."""

    def write(self, statement: Statement) -> Flow[int]:
        affected = yield from super().write(statement)
        self.handle.stop.executed(statement.text)
        return affected

    def commit(self) -> Flow[None]:
        yield from super().commit()
        self.handle.stop.executed("commit")


class WatchedSqlite(_Watched, sqlite3.Connection):
    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        cursor = super().execute(sql, *args)
        self.stop.executed(sql)
        return cursor


class WatchedPymysql(_Watched, pymysql.Connection):
    def query(self, sql: Any, unbuffered: bool = False) -> int:
        affected = super().query(sql, unbuffered)
        self.stop.executed(sql.decode("latin-1") if isinstance(sql, bytes) else sql)
        return affected

    def commit(self) -> None:
        super().commit()
        self.stop.executed("commit")


def _connect(kind: str, place: Any, stop: Stop) -> Any:
    """Open a watched connection of the plain driver."""
    stop.reach("acquired")
    watched: type[_Watched] = {
        "sqlite": WatchedSqlite,
        "postgres": WatchedPsycopg,
        "mysql": WatchedPymysql,
    }[kind]
    watched.stop = stop
    if kind == "sqlite":
        return aiosqlite.connect(place, factory=watched)
    transactions._adapter_of_type[WatchedPsycopg] = WatchedConnection
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
    """The answer to a client."""

    status: int
    is_replayed: bool
    left: int | None = None


class TransferProcess:
    """A process of its own that makes one transfer, from account 1 to account 2."""

    def __init__(self, order: Order, stop: Stop) -> None:
        self._replies, theirs = PROCESSES.Pipe(duplex=False)
        arguments = (order, stop, theirs)
        self.process = PROCESSES.Process(target=_transfer_once, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def reply(self) -> Reply | None:
        """Its answer to the client; None if it dies before."""
        assert self._replies.poll(START_S_MAX)
        try:
            reply: Reply = self._replies.recv()
        except EOFError:
            return None
        finally:
            self.process.join(START_S_MAX)
        return reply

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._replies.close()


def _transfer_once(order: Order, stop: Stop, replies: Connection) -> None:
    connect = partial(_connect, order.kind, order.place, stop)
    replies.send(asyncio.run(_post_once(order, connect)))


async def _post_once(order: Order, connect: Callable[[], Awaitable[Any]]) -> Reply:
    async with AsyncExitStack() as stack:
        engine = AsyncEngine(order.store, PATIENT, transactions=connect)
        await stack.enter_async_context(engine)
        bank_app = _mysql_bank_app if order.kind == "mysql" else example.bank_app
        transport = httpx.ASGITransport(bank_app(engine=engine))
        client = httpx.AsyncClient(transport=transport, base_url="http://bank")
        await stack.enter_async_context(client)
        body = {"source": 1, "target": 2, "amount": order.amount}
        response = await client.post("/transfers", json=body, headers=key_header(order.key))
        is_replayed = "idempotent-replayed" in response.headers
        left = response.json()["left"] if response.is_success else None
        return Reply(response.status_code, is_replayed, left)


def key_header(key: str) -> dict[str, str]:
    return {"Idempotency-Key": f'"{key}"'}


def _mysql_bank_app(engine: AsyncEngine) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, engine=engine)

    @app.post("/transfers", status_code=201)
    @idempotent(mode="transaction")
    def transfer(order: example.Transfer, operation: CurrentOperation) -> dict[str, int]:
        amount = order.amount
        with operation.connection.cursor() as cursor:
            cursor.execute("update accounts set balance = balance - %s where id = 1", (amount,))
            cursor.execute("select balance from accounts where id = 1")
            ((left,),) = cursor.fetchall()
            if left < 0:
                raise HTTPException(402)
            cursor.execute("update accounts set balance = balance + %s where id = 2", (amount,))
            row = (operation.key, 1, 2, amount)
            cursor.execute("insert into transfers values (%s, %s, %s, %s)", row)
        return {"left": left}

    return app


# ------------------------------------------------------------------------------------- a server


class ServerProcess:
    """A server of the bank, in a process that may be killed and started again."""

    def __init__(self, url: str, listening: socket.socket, *, has_pool: bool) -> None:
        self._arguments = (url, listening, has_pool)
        self.start()

    def start(self) -> None:
        """Start serving."""
        self.process = PROCESSES.Process(target=_serve, args=self._arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(url: str, listening: socket.socket, has_pool: bool) -> None:
    asyncio.run(_serve_until_killed(url, listening, has_pool=has_pool))


async def _serve_until_killed(url: str, listening: socket.socket, *, has_pool: bool) -> None:
    """Serve, with a pool of the application or with the store's own connections."""
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"store": url}
        if has_pool:
            pool = AsyncConnectionPool(url, min_size=1, max_size=10, timeout=1, open=False)
            options["transactions"] = await stack.enter_async_context(pool)
        config = uvicorn.Config(example.bank_app(**options), log_config=None, lifespan="off")
        await uvicorn.Server(config).serve(sockets=[listening])
