"""Redis Cluster: one `Server` for each master, and the map of which master owns which slot.

The slot of a record is computed from its id, so a batch is split into one pipeline for each
master. The map is read again when a server redirects a command, or does not answer.

redis-py's own `RedisCluster` is not used. It follows a redirection on another connection, where
WAIT would not see the write; it asks random nodes for the map, so that a frozen master delays
records of the others; and it does not understand nodes that do not name their host ("?").
"""

from __future__ import annotations

import os
import threading
from binascii import hexlify
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from coatcheck.core.identity import ID_BYTES
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis.client import Server
from coatcheck.stores.redis.errors import Reply, message_of
from coatcheck.stores.redis.records import Command
from coatcheck.stores.redis.safety import SafetyMonitor
from coatcheck.stores.redis.url import SENTINEL_EXAMPLE, Address, RedisConfig

# 3: a server may know an old map when it is asked for one, so the second may be wrong, too.
_ROUNDS_MAX = 3
_ASKING = Command(("ASKING",))


class Cluster:
    """The masters of a cluster."""

    is_cluster = True

    def __init__(self, config: RedisConfig, monitor: SafetyMonitor) -> None:
        self._config = config
        self._monitor = monitor
        self._servers: dict[Address, Server] = {}
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._masters: list[Address] = []
        self._unreachable: set[Address] = set()  # did not answer the last time
        self._is_outdated = True  # the map
        self._closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._mutex = threading.RLock()

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that may change records, each to the master that owns its key."""
        return self._send(commands, is_write=True)

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that change nothing, each to the master that owns its key."""
        return self._send(commands, is_write=False)

    def _send(self, commands: Sequence[Command], *, is_write: bool) -> list[Reply]:
        replies: list[Reply] = [None] * len(commands)
        left: Sequence[int] = range(len(commands))  # the positions of those without a final reply
        for _ in range(_ROUNDS_MAX):
            try:
                self._read_map_if_outdated()
            except StoreUnavailable as error:  # nothing of this round was sent
                for number in left:
                    replies[number] = error
                break
            for owner, numbers in self._by_owner(commands, left).items():
                some = [commands[number] for number in numbers]
                answers = self._send_to(owner, some, is_write=is_write)
                for number, answer in zip(numbers, answers, strict=True):
                    replies[number] = answer
            left = [number for number in left if type(replies[number]) is MovedError]
            if not left:
                break
        return replies

    def _by_owner(
        self, commands: Sequence[Command], numbers: Iterable[int]
    ) -> dict[Address | None, list[int]]:
        """Return which of *numbers* go to which server; None: no server owns their slots."""
        found: dict[Address | None, list[int]] = {}
        for number in numbers:
            found.setdefault(self._owners[slot_of(commands[number].id)], []).append(number)
        return found

    def _send_to(
        self, owner: Address | None, commands: Sequence[Command], *, is_write: bool
    ) -> list[Reply]:
        """Send *commands* to one server; return a reply for each, errors included."""
        if owner is None:
            self._is_outdated = True
            name, slot = self._config, slot_of(commands[0].id)
            error = StoreUnavailable(f"{name}: no server of the cluster serves slot {slot}")
            return [error] * len(commands)
        try:
            server = self._server(owner)
            replies = server.write(commands) if is_write else server.read(commands)
        except StoreUnavailable as error:
            self._is_outdated = True  # a replica may be the master now
            self._unreachable.add(owner)
            return [error] * len(commands)
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            if type(reply) is AskError:  # the slot is moving, and its record has moved already
                importing = _named_by(owner, reply.host, reply.port)
                both = (_ASKING, command)
                replies[number] = self._send_to(importing, both, is_write=is_write)[-1]
            elif isinstance(reply, MovedError | ClusterDownError):
                self._is_outdated = True
        return replies

    def _server(self, address: Address) -> Server:
        with self._mutex:
            self.check_open()
            server = self._servers.get(address)
            if server is None:
                server = Server(self._config, address, f"redis {address}", self._monitor)
                self._servers[address] = server
            return server

    def _read_map_if_outdated(self) -> None:
        self.check_open()
        if not self._is_outdated:
            return
        with self._mutex:
            if self._is_outdated:
                self._read_map()

    def _read_map(self) -> None:
        """
        Read the map from the first server that answers.

        While a master is unreachable, each request for its records makes the map outdated, and
        requests for other records read it again. So those servers come last that did not answer.
        """
        errors: list[StoreUnavailable] = []
        known = dict.fromkeys([*self._masters, *self._config.addresses])
        for address in sorted(known, key=self._unreachable.__contains__):
            try:
                reply = self._server(address).operators.ask("CLUSTER", "SLOTS")
            except StoreUnavailable as error:
                errors.append(error)
                self._unreachable.add(address)
                continue
            self._unreachable.discard(address)
            if isinstance(reply, ResponseError):
                # At first: the URL is wrong. Later: the server has changed.
                kind = StoreUnavailable if self._masters else Misconfigured
                raise kind(
                    f"redis {address}: {message_of(reply)}; write redis:// for a single server, "
                    f"or {SENTINEL_EXAMPLE} for Sentinel"
                )
            self._set_map(reply, address)
            return
        raise errors[-1]

    def _set_map(self, slots: Sequence[Reply], source: Address) -> None:
        """Take over the reply of *source* to CLUSTER SLOTS."""
        owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, master, *_replicas in slots:
            owner = _named_by(source, (master[0] or b"").decode(), master[1])
            owners[first : last + 1] = [owner] * (last + 1 - first)
        self._owners = owners
        self._masters = sorted({owner for owner in owners if owner is not None})
        self._is_outdated = False
        for address, server in self._servers.items():
            if address not in self._masters:
                server.disconnect_idle()

    def servers(self) -> Iterable[Server]:
        """Return each master, by a new map."""
        self._is_outdated = True
        self._read_map_if_outdated()
        return [self._server(address) for address in self._masters]

    def id_per_server(self) -> Sequence[bytes]:
        """Return a new id for each master, whose record it would hold."""
        self._read_map_if_outdated()
        ids: dict[Address, bytes] = {}
        while len(ids) < len(self._masters):
            id = os.urandom(ID_BYTES)
            if owner := self._owners[slot_of(id)]:
                ids.setdefault(owner, id)
        return list(ids.values())

    def check_open(self) -> None:
        """Raise if the store was closed."""
        if self._closed:
            raise StoreUnavailable(f"{self._config}: the store is closed")

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        with self._mutex:
            for server in self._servers.values():
                server.close()


# What the store uses: one server, or the masters of a cluster.
Topology: TypeAlias = Server | Cluster


def _named_by(source: Address, host: str, port: int) -> Address:
    """Return the address that *source* names; if it gives no host, the node is on its own."""
    return Address(source.host if host in ("", "?") else host, port)


def slot_of(id: bytes) -> int:
    """Return the slot of the record with this *id*, which is in braces in its key."""
    return key_slot(hexlify(id))
