"""Question: what share of the bare application's requests per second is left?

Every contender is a server process of its own; all run at the same time, on the same processor,
and one at a time is loaded from another processor. PostgreSQL and Redis run where there is room.
The peer's memory is emptied before each slot.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import uvloop

from benchmarks.durable import durable_postgres, lent
from benchmarks.http_load import Address, Load, Loaded, request_of
from benchmarks.machine import pinned, workshop
from benchmarks.measuring import Samples, interleave
from benchmarks.report import TIMES, Row, Table, Target
from tests.support.servers.redis import Redis

CONNECTIONS = 64
# Many short rounds: what disturbs a machine lasts for seconds, and hits neighbours alike. Of 7 rounds
# of 0.35 s two servers that are the same came out at 0.93 of each other, or 1.02.
ROUNDS = 21
# More than elsewhere: the bare application is everybody's measure.
ROUNDS_QUICK = 5
# Keys that are replayed: far fewer than the cache holds, so that all of them stay warm.
REPLAYED_KEYS = 512


class Lengths(NamedTuple):
    """How long a slot is: what is counted, and what comes before."""

    wall_s: float
    warm_up_s: float


SLOT = Lengths(wall_s=0.1, warm_up_s=0.03)
SLOT_QUICK = Lengths(wall_s=0.05, warm_up_s=0.02)


class Variant(NamedTuple):
    """What is asked of which server."""

    contender: str
    store: str
    asks: str  # "new", "replay" or "keyless"


# No server is asked twice in a row: who has just been asked is warm.
VARIANTS = {
    "bare": Variant("bare", "memory", "new"),
    "product unguarded": Variant("product", "memory", "keyless"),
    "bare unguarded": Variant("bare", "memory", "keyless"),
    "product memory": Variant("product", "memory", "new"),
    "idemkit unguarded": Variant("idemkit", "memory", "keyless"),
    "product sqlite": Variant("product", "sqlite", "new"),
    "idemkit memory": Variant("idemkit", "memory", "new"),
    "product postgres": Variant("product", "postgres", "new"),
    "floor memory": Variant("handmade", "memory", "new"),
    "product redis": Variant("product", "redis", "new"),
    "idemkit replay": Variant("idemkit", "memory", "replay"),
    "product replay": Variant("product", "sqlite", "replay"),
    "floor replay": Variant("handmade", "memory", "replay"),
    "idemkit postgres": Variant("idemkit", "postgres", "new"),
    "floor sqlite": Variant("handmade", "sqlite", "new"),
    "idemkit redis": Variant("idemkit", "redis", "new"),
    "floor postgres": Variant("handmade", "postgres", "new"),
    "floor redis": Variant("handmade", "redis", "new"),
}


# What is asked, how it is called, and which share of the bare application it should leave.
ASKED = {
    "memory": ("new keys, memory", 0.65),
    "sqlite": ("new keys, SQLite", 0.33),
    "postgres": ("new keys, PostgreSQL", 0.45),
    "redis": ("new keys, Redis", 0.55),
    "replay": ("replays", 1.0),
    "unguarded": ("no key sent", 0.97),
}

COLUMNS = ("product", "idemkit", "floor")
NEW_KEYS = (b"key-%032d" % number for number in itertools.count())


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    slot = SLOT_QUICK if quick else SLOT
    with ExitStack() as stack:
        urls = _stores(stack, quick=quick)
        # Before we pin ourselves: a child inherits where its parent may run.
        servers = stack.enter_context(_servers(urls))
        where = stack.enter_context(pinned("last"))
        turns = {name: Turn(servers[v[:2]], v.asks, slot) for name, v in VARIANTS.items()}
        found = interleave(turns, ROUNDS_QUICK if quick else ROUNDS)
    cpu_us = {name: Samples(tuple(turn.cpu_us)) for name, turn in turns.items()}
    return Table(
        name="http",
        question="requests a second over HTTP with one uvicorn worker, 64 connections, as a share "
        "of the bare application's",
        rows=[*_rows(found), *_cpu_rows(cpu_us)],
        notes=[
            f"slots of {slot.wall_s} s; the load runs on {where}, the server on the first",
            "PostgreSQL with fsync, Redis with appendfsync everysec, wherever the system puts them",
            "the bare application gets the same requests, key and all; without one, both",
            "floor: a middleware written by hand that keeps responses and does nothing else",
            "replays: the product from its warm cache, in front of SQLite",
        ],
    )


def _stores(stack: ExitStack, *, quick: bool) -> dict[str, str]:
    """Where each kind of store is; SQLite's contenders have a file each."""
    directory = stack.enter_context(workshop())
    postgres, redis = stack.enter_context(lent(durable_postgres, quick=quick)), Redis()
    stack.callback(redis.remove)
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{directory}/{{contender}}.db",
        "postgres": postgres.url,
        "redis": redis.url,
    }


def _rows(found: dict[str, Samples]) -> list[Row]:
    rows = [Row(what="bare application, requests/s", floor=found["bare"])]
    for asked, (label, share_min) in ASKED.items():
        product, idemkit, floor = (found.get(f"{name} {asked}") for name in COLUMNS)
        bare = _bare(found, asked)
        assert product is not None
        share = product.over(bare)
        ratios = [("of bare", share)]
        ratios += [("idemkit's", idemkit.over(bare))] if idemkit else []
        ratios += [("floor's", floor.over(bare))] if floor else []
        reach = Target(measured=share, bound="≥", limit=share_min, unit="of bare")
        row = Row(
            what=f"{label}, requests/s",
            product=product,
            idemkit=idemkit,
            floor=floor,
            ratios=ratios,
            targets=[reach],
        )
        rows.append(row)
    return rows


def _cpu_rows(cpu_us: dict[str, Samples]) -> list[Row]:
    """The same as processor time of the server: steadier than requests/s on a busy machine."""
    rows = [Row(what="bare application, server µs", floor=cpu_us["bare"])]
    for asked, (label, _) in ASKED.items():
        product, idemkit, floor = (cpu_us.get(f"{name} {asked}") for name in COLUMNS)
        assert product is not None
        row = Row(
            what=f"{label}, server µs",
            product=product,
            idemkit=idemkit,
            floor=floor,
            ratios=[(f"{TIMES} bare", product.over(_bare(cpu_us, asked)))],
        )
        rows.append(row)
    return rows


def _bare(found: dict[str, Samples], asked: str) -> Samples:
    """The bare application, asked the same: with a header that it does not know, or without."""
    return found.get(f"bare {asked}", found["bare"])


@contextmanager
def _servers(urls: Mapping[str, str]) -> Iterator[dict[tuple[str, str], Server]]:
    """A server for each contender and kind of store; all of them answer before one is loaded."""
    pairs = sorted({variant[:2] for variant in VARIANTS.values()})
    words = [word for name, store in pairs for word in (name, urls[store].format(contender=name))]
    command = [sys.executable, "-m", "benchmarks.http_apps", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = (process.stdout.readline().split() for _ in pairs)
        servers = {
            pair: Server(" on ".join(pair), Address(int(port), int(pid)))
            for pair, (port, pid) in zip(pairs, lines, strict=True)
        }
        for server in servers.values():
            server.forget()
        yield servers
    finally:
        process.communicate()


class Turn:
    """What a contender does in its slot."""

    def __init__(self, server: Server, asks: str, slot: Lengths) -> None:
        self._server = server
        self._asks = asks
        self._slot = slot
        self.cpu_us: list[float] = []

    def __call__(self) -> float:
        """Requests a second."""
        self._server.forget()
        try:
            loaded = uvloop.run(self._load())
        except RuntimeError as error:
            raise RuntimeError(f"{self._server.name}, {self._asks}: {error}") from error
        self.cpu_us.append(loaded.server_us)
        return loaded.per_second

    async def _load(self) -> Loaded:
        address = self._server.address
        requests: Iterator[bytes]
        if self._asks == "keyless":
            requests = itertools.repeat(request_of(None))
        elif self._asks == "new":
            requests = (request_of(key) for key in NEW_KEYS)
        else:
            asked_before = [request_of(b"replayed-%028d" % n) for n in range(REPLAYED_KEYS)]
            await Load(address, iter(asked_before), connections=8, replayed=None).run_out()
            requests = itertools.cycle(asked_before)
        # Whoever opens connections to a store has them before anything is counted.
        first = itertools.islice(requests, CONNECTIONS)
        await Load(address, first, connections=CONNECTIONS, replayed=None).run_out()
        is_replay = self._asks == "replay"
        load = Load(address, requests, connections=CONNECTIONS, replayed=is_replay)
        return await load.run(self._slot.wall_s, self._slot.warm_up_s)


class Server(NamedTuple):
    """One contender's process."""

    name: str
    address: Address

    def forget(self) -> None:
        """Empty the peer's store; the other contenders need no such favour."""
        urllib.request.urlopen(f"http://127.0.0.1:{self.address.port}/forget").close()
