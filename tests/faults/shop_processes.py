"""The processes of `examples/shop`: a provider that keeps running, and servers that are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from coatcheck import AsyncEngine, Policy, open_store
from coatcheck.stores import open_async_store
from coatcheck.verify import crash
from tests.faults.outcomes import Recovery
from tests.faults.victims import PROCESSES, async_points

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shop"
# 2 s: a busy machine renews in time, and it can be waited for.
POLICY = Policy(required=True, lease="2s", wait="200ms")


def load(name: str) -> Any:
    """A file of the example, as a module."""
    spec = importlib.util.spec_from_file_location(f"shop_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Death(NamedTuple):
    """A server kills itself, the *number*-th time that it reaches *point*."""

    point: crash.Point
    number: int


class Shop(NamedTuple):
    """What servers of one shop have in common."""

    store: str
    provider_port: int
    recovery: Recovery
    listening: socket.socket


class Server:
    """A server of the shop; it serves until it dies."""

    def __init__(self, shop: Shop, death: Death | None = None) -> None:
        self.death = death
        self.process = PROCESSES.Process(target=_serve_shop, args=(shop, death), daemon=True)
        self.process.start()

    def kill(self) -> None:
        """Kill it from outside."""
        self.process.kill()
        self.process.join()

    @property
    def has_killed_itself(self) -> bool:
        """It has reached its point."""
        return self.process.exitcode == -signal.SIGKILL


def _serve_shop(shop: Shop, death: Death | None) -> None:
    os.environ["PROVIDER"] = f"http://127.0.0.1:{shop.provider_port}"
    asyncio.run(_serve(_application(shop, death), shop.listening))


def _application(shop: Shop, death: Death | None) -> Any:
    example = load("app")
    if death is None:
        return example.shop_app(engine=AsyncEngine(shop.store, POLICY))
    injector = crash.Injector(death.point, crash.kill, death.number)
    example.provider.take = injector.effect(example.provider.take)
    example.write_sale = injector.effect(example.write_sale)
    store = open_async_store(shop.store)
    if shop.recovery != "transaction":
        store = async_points(store, injector)
    return injector.asgi(example.shop_app(engine=AsyncEngine(store, POLICY)))


def _serve_provider(ledger: str, listening: socket.socket) -> None:
    asyncio.run(_serve(load("provider").provider_app(ledger), listening))


async def _serve(app: Any, listening: socket.socket) -> None:
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    await uvicorn.Server(config).serve(sockets=[listening])


class Deployment:
    """A shop with two servers and its provider."""

    SERVERS = 2

    def __init__(self, url: str, ledger: str, recovery: Recovery) -> None:
        open_store(url).close()
        if recovery == "transaction":
            load("app").open_sales(url)
        load("provider").open_ledger(ledger).close()
        self._listening = [socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(2)]
        ports = [listening.getsockname()[1] for listening in self._listening]
        self.port = ports[0]
        self._provider = PROCESSES.Process(
            target=_serve_provider, args=(ledger, self._listening[1]), daemon=True
        )
        self._provider.start()
        self.shop = Shop(url, ports[1], recovery, self._listening[0])
        self.servers = [Server(self.shop) for _ in range(self.SERVERS)]

    def replace(self, number: int, death: Death | None = None) -> Server:
        """A new server in the place of one that is dead."""
        self.servers[number] = Server(self.shop, death)
        return self.servers[number]

    def close(self) -> None:
        """Kill all processes."""
        for process in (self._provider, *(server.process for server in self.servers)):
            process.kill()
            process.join()
        for listening in self._listening:
            listening.close()
