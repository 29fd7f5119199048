"""What share of the bare application's requests per second remains?

Every contender is a server process. All run at the same time on one processor, and are loaded in
turn from another processor. The system places PostgreSQL and Redis. idemkit's memory is emptied
before each slot.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import uvloop

from benchmarks.http_load import Address, Load, Loaded, request_of
from benchmarks.machine import pinned, scratch_directory
from benchmarks.measuring import Samples, interleave
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.servers import durable_postgres, server_for
from tests.support.servers.redis import Redis

CONNECTIONS = 64
# Many short rounds: a disturbance lasts for seconds, and then affects neighbours alike.
ROUNDS = 21
# More than elsewhere, because all ratios depend on the bare application.
ROUNDS_QUICK = 5
# Far fewer keys than the cache holds, so that all replays come from memory.
REPLAYED_KEYS = 512


class Lengths(NamedTuple):
    """The measured time of a slot, and the time before it."""

    wall_s: float
    warm_up_s: float


SLOT = Lengths(wall_s=0.1, warm_up_s=0.03)
SLOT_QUICK = Lengths(wall_s=0.05, warm_up_s=0.02)


class Variant(NamedTuple):
    """A server, and the requests that it gets."""

    contender: str
    store: str
    requests: str  # "new", "replay" or "keyless"


# No server is loaded twice in a row, because it would still be warm.
VARIANTS = {
    "bare": Variant("bare", "memory", "new"),
    "product unguarded": Variant("product", "memory", "keyless"),
    "bare unguarded": Variant("bare", "memory", "keyless"),
    "product memory": Variant("product", "memory", "new"),
    "idemkit unguarded": Variant("idemkit", "memory", "keyless"),
    "product sqlite": Variant("product", "sqlite", "new"),
    "idemkit memory": Variant("idemkit", "memory", "new"),
    "product postgres": Variant("product", "postgres", "new"),
    "floor memory": Variant("floor", "memory", "new"),
    "product redis": Variant("product", "redis", "new"),
    "idemkit replay": Variant("idemkit", "memory", "replay"),
    "product replay": Variant("product", "sqlite", "replay"),
    "floor replay": Variant("floor", "memory", "replay"),
    "idemkit postgres": Variant("idemkit", "postgres", "new"),
    "idemkit redis": Variant("idemkit", "redis", "new"),
}


class Line(NamedTuple):
    """A row of the table: its title, and the targets for its two ratios."""

    title: str
    of_bare_min: float | None = None
    of_memory_min: float | None = None


LINES = {
    "memory": Line("new keys, memory", of_bare_min=0.45),
    "sqlite": Line("new keys, SQLite", of_bare_min=0.30),
    "postgres": Line("new keys, PostgreSQL", of_memory_min=0.8),
    "redis": Line("new keys, Redis", of_memory_min=0.8),
    "replay": Line("replays", of_bare_min=1.0),
    "unguarded": Line("no key sent", of_bare_min=0.95),
}

COLUMNS = ("product", "idemkit", "floor")
NEW_KEYS = (b"key-%032d" % number for number in itertools.count())


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    slot = SLOT_QUICK if quick else SLOT
    with ExitStack() as stack:
        urls = _stores(stack, quick=quick)
        # Before this process is pinned, because a child inherits that.
        pairs = sorted({variant[:2] for variant in VARIANTS.values()})
        servers = stack.enter_context(servers_of(pairs, urls))
        where = stack.enter_context(pinned("last"))
        turns = {name: Turn(servers[v[:2]], v.requests, slot) for name, v in VARIANTS.items()}
        found = interleave(turns, ROUNDS_QUICK if quick else ROUNDS)
    cpu_us = {name: Samples(tuple(turn.cpu_us)) for name, turn in turns.items()}
    return Table(
        name="http",
        question="requests a second over HTTP with one uvicorn worker, 64 connections, as a share "
        "of the bare application's",
        rows=[*_rows(found), *_cpu_rows(cpu_us)],
        notes=[
            f"slots of {slot.wall_s} s; the load runs on {where}, the server on the first",
            "PostgreSQL with fsync, Redis with appendfsync everysec",
            "the bare application gets the same requests, with or without a key",
            "floor: a middleware of 60 lines that keeps responses in a dictionary",
            "replays: from the cache of the engine, with SQLite as the store",
        ],
    )


def _stores(stack: ExitStack, *, quick: bool) -> dict[str, str]:
    """Start the servers, and return the URL of each store; on SQLite, contenders have a file each."""
    directory = stack.enter_context(scratch_directory())
    postgres, redis = stack.enter_context(server_for(durable_postgres, quick=quick)), Redis()
    stack.callback(redis.remove)
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{directory}/{{contender}}.db",
        "postgres": postgres.url,
        "redis": redis.url,
    }


def _rows(found: dict[str, Samples]) -> list[Row]:
    rows = [Row(what="bare application, requests/s", floor=found["bare"])]
    for name, line in LINES.items():
        product, idemkit, floor = (found.get(f"{column} {name}") for column in COLUMNS)
        bare = _bare(found, name)
        assert product is not None
        of_bare, of_memory = product.over(bare), product.over(found["product memory"])
        ratios, targets = [("of bare", of_bare)], []
        if line.of_bare_min is not None:
            limit = line.of_bare_min
            targets.append(Target(measured=of_bare, bound="≥", limit=limit, unit="of bare"))
        if line.of_memory_min is not None:
            limit = line.of_memory_min
            ratios.append(("of memory", of_memory))
            targets.append(Target(measured=of_memory, bound="≥", limit=limit, unit="of memory"))
        ratios += [("idemkit's", idemkit.over(bare))] if idemkit else []
        ratios += [("floor's", floor.over(bare))] if floor else []
        row = Row(
            what=f"{line.title}, requests/s",
            product=product,
            idemkit=idemkit,
            floor=floor,
            ratios=ratios,
            targets=targets,
        )
        rows.append(row)
    return rows


def _cpu_rows(cpu_us: dict[str, Samples]) -> list[Row]:
    """Return the same rows as processor time of the server, which is steadier than a rate."""
    rows = [Row(what="bare application, server µs", floor=cpu_us["bare"])]
    for name, line in LINES.items():
        product, idemkit, floor = (cpu_us.get(f"{column} {name}") for column in COLUMNS)
        assert product is not None
        row = Row(
            what=f"{line.title}, server µs",
            product=product,
            idemkit=idemkit,
            floor=floor,
            ratios=[(f"{TIMES} bare", product.over(_bare(cpu_us, name)))],
        )
        rows.append(row)
    return rows


def _bare(found: dict[str, Samples], name: str) -> Samples:
    """Return the bare application's value for the same requests, with or without a key."""
    return found.get(f"bare {name}", found["bare"])


@contextmanager
def servers_of(
    pairs: Sequence[tuple[str, str]], urls: Mapping[str, str]
) -> Iterator[dict[tuple[str, str], Server]]:
    """Start a server for each contender and store; all of them answer before one is loaded."""
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
    """One slot of a contender."""

    def __init__(self, server: Server, requests: str, slot: Lengths) -> None:
        self._server = server
        self._kind = requests
        self._slot = slot
        self.cpu_us: list[float] = []

    def __call__(self) -> float:
        """Requests a second."""
        self._server.forget()
        try:
            loaded = uvloop.run(self._load())
        except RuntimeError as error:
            raise RuntimeError(f"{self._server.name}, {self._kind}: {error}") from error
        self.cpu_us.append(loaded.server_us)
        return loaded.per_second

    async def _load(self) -> Loaded:
        address = self._server.address
        requests: Iterator[bytes]
        if self._kind == "keyless":
            requests = itertools.repeat(request_of(None))
        elif self._kind == "new":
            requests = (request_of(key) for key in NEW_KEYS)
        else:
            replayed = [request_of(b"replayed-%028d" % n) for n in range(REPLAYED_KEYS)]
            await Load(address, iter(replayed), connections=8, replayed=None).run_out()
            requests = itertools.cycle(replayed)
        # Not measured: connecting to the store.
        first = itertools.islice(requests, CONNECTIONS)
        await Load(address, first, connections=CONNECTIONS, replayed=None).run_out()
        is_replay = self._kind == "replay"
        load = Load(address, requests, connections=CONNECTIONS, replayed=is_replay)
        return await load.run(self._slot.wall_s, self._slot.warm_up_s)


class Server(NamedTuple):
    """One contender's process."""

    name: str
    address: Address

    def forget(self) -> None:
        """Empty idemkit's memory; it does nothing on other servers."""
        urllib.request.urlopen(f"http://127.0.0.1:{self.address.port}/forget").close()
