"""Redis, with an append-only file in a directory of the tests' own; alone, watched, and in slots."""

from __future__ import annotations

import os
import signal
from functools import cache
from itertools import count
from typing import Any

import redis

from tests.support.servers import Server, find_program, free_port, until

# Another that speaks the same, as Valkey does, may take its place: `make test-valkey`.
PROGRAM = os.environ.get("COATCHECK_REDIS", "redis-server")
SETTINGS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "databases": "1024",  # one for each store, so that a search meets only its own keys
    "maxmemory-policy": "noeviction",
    "repl-diskless-sync-delay": "0",  # else a replica waits for others to come
}


class Redis(Server):
    """One server; stores keep apart by the prefix of their keys."""

    def __init__(self, *, on_disk: bool = False, **settings: str) -> None:
        self._program = find_program(PROGRAM, package="redis-server")
        super().__init__("redis", on_disk=on_disk)
        self._numbers = count()
        self._settings = {**SETTINGS, **{k.replace("_", "-"): v for k, v in settings.items()}}
        self.start()

    @property
    def url(self) -> str:
        """The server's first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def fresh_url(self) -> str:
        """A fresh store."""
        number = next(self._numbers)
        return f"redis://127.0.0.1:{self.port}/{number % 1024}?prefix=laws{number}:"

    def start(self) -> None:
        """Start it, again where it has ended."""
        settings = [
            word
            for name, value in self._settings.items()
            for word in (f"--{name}", *(value.split() or [""]))
        ]
        command = [self._program, "--port", str(self.port), "--dir", str(self.directory)]
        self.launch([*command, *settings], self._is_ready)

    def stop(self) -> None:
        """End it as an operator does."""
        self.kill(signal.SIGTERM)

    def ask(self, *words: Any) -> Any:
        """What it says to one command."""
        return said_by(self.port, *words)

    def is_master(self) -> bool:
        """Whether it takes writes; its promotion closes all connections."""
        try:
            return b"role:master" in self.ask("INFO", "replication")
        except redis.exceptions.ConnectionError:
            return False

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.exceptions.AuthenticationError:
            return True
        except redis.exceptions.ConnectionError:
            return False


class Sentinel(Server):
    """One of those who watch a master, and say who it is."""

    SERVICE = "records"

    def __init__(self, master: Redis, down_after_ms: int, *settings: str) -> None:
        self._program = find_program(PROGRAM, package="redis-server")
        super().__init__("sentinel")
        service = self.SERVICE
        (self.directory / "conf").write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {self.directory}\n"
            f"sentinel monitor {service} 127.0.0.1 {master.port} 2\n"
            f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
            f"sentinel failover-timeout {service} 2000\n"
            + "".join(f"{setting}\n" for setting in settings)
        )
        self.launch([self._program, self.directory / "conf", "--sentinel"], self._is_ready)

    def ask(self, *words: Any) -> Any:
        """What it says to one command."""
        return said_by(self.port, *words)

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.exceptions.AuthenticationError:
            return True
        except redis.exceptions.ConnectionError:
            return False


class SentinelSet:
    """A master, its replica, and three Sentinels of which two decide."""

    def __init__(self, *, down_after_ms: int = 500) -> None:
        self._numbers = count()
        self.master = Redis()
        self.replica = Redis(replicaof=f"127.0.0.1 {self.master.port}")
        until(lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"))
        self.sentinels = [Sentinel(self.master, down_after_ms) for _ in range(3)]
        until(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))

    def _knows_all(self, sentinel: Sentinel) -> bool:
        others = sentinel.ask("SENTINEL SENTINELS", sentinel.SERVICE)
        replicas = sentinel.ask("SENTINEL REPLICAS", sentinel.SERVICE)
        return len(others) == 2 and len(replicas) == 1

    @property
    def url(self) -> str:
        """The master, as the Sentinels know it."""
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/{Sentinel.SERVICE}/0"

    def fresh_url(self) -> str:
        """A fresh store."""
        number = next(self._numbers)
        return f"{self.url.removesuffix('0')}{number % 1024}?prefix=laws{number}:"

    def remove(self) -> None:
        """End all of them."""
        for server in (*self.sentinels, self.replica, self.master):
            server.remove()


class Cluster:
    """Three masters with a third of the slots each, and a replica for each of them."""

    MASTERS = 3

    def __init__(self, *, down_after_ms: int = 1_000) -> None:
        settings = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(down_after_ms),
            "databases": "1",
        }
        self._numbers = count()
        # The second port is named, because the usual one may lie beyond the last there is.
        nodes = [Redis(**settings, cluster_port=str(free_port())) for _ in range(2 * self.MASTERS)]
        self.masters, self.replicas = nodes[: self.MASTERS], nodes[self.MASTERS :]
        share = 16_384 // self.MASTERS + 1
        for number, node in enumerate(self.masters):
            first, last = number * share, min((number + 1) * share, 16_384) - 1
            node.ask("CLUSTER ADDSLOTSRANGE", first, last)
        for node in nodes[1:]:
            bus = node._settings["cluster-port"]
            nodes[0].ask("CLUSTER MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(len(node.ask("CLUSTER NODES").splitlines()) == 6 for node in nodes))
        for master, replica in zip(self.masters, self.replicas, strict=True):
            name = master.ask("CLUSTER MYID")
            until(lambda: name in replica.ask("CLUSTER NODES"))  # noqa: B023 - used at once
            replica.ask("CLUSTER REPLICATE", name)
        until(lambda: all(b"cluster_state:ok" in node.ask("CLUSTER INFO") for node in nodes))
        until(lambda: all(b"link_status:up" in r.ask("INFO", "replication") for r in self.replicas))

    def say(self, *words: Any) -> None:
        """Have all nodes do the same."""
        for node in (*self.masters, *self.replicas):
            node.ask(*words)

    @property
    def url(self) -> str:
        """The cluster, by two of its nodes."""
        places = ",".join(f"127.0.0.1:{node.port}" for node in self.masters[:2])
        return f"redis+cluster://{places}"

    def fresh_url(self) -> str:
        """A fresh store."""
        return f"{self.url}?prefix=laws{next(self._numbers)}:"

    def remove(self) -> None:
        """End all of them."""
        for node in (*self.masters, *self.replicas):
            node.remove()


def said_by(port: int, *words: Any) -> Any:
    """What the server there says to one command."""
    connection = redis.Connection(port=port, protocol=2)
    try:
        connection.send_command(*words)
        return connection.read_response()
    finally:
        connection.disconnect()


@cache
def redis_server() -> Redis:
    """The one of this process."""
    return Redis()


# 60 s: a server that lives must not count as dead because the machine is busy.
PATIENT_MS = 60_000


@cache
def sentinel_set() -> SentinelSet:
    """The one of this process; its master stays the master."""
    return SentinelSet(down_after_ms=PATIENT_MS)


@cache
def cluster() -> Cluster:
    """The one of this process; its masters stay the masters."""
    return Cluster(down_after_ms=PATIENT_MS)
