"""Redis Cluster: one `Server` for each master, and the map of which master owns which slot.

The slot of a record is computed from its id, so a batch is split into one pipeline for each
master. The map is read again when a server says that it is wrong, or does not answer.

redis-py's own `RedisCluster` is not used. It follows a redirection on another connection, where
WAIT would not see the write; it asks random nodes for the map, so that a frozen master delays
records of the others; and it does not understand nodes that do not name their host ("?").
"""

from __future__ import annotations

import os
import threading
from binascii import hexlify
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from coatcheck.core.identity import ID_BYTES
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis.client import Server
from coatcheck.stores.redis.records import Command
from coatcheck.stores.redis.safety import SafetyMonitor
from coatcheck.stores.redis.swap import Reply, Wait, message_of
from coatcheck.stores.redis.url import SENTINEL_EXAMPLE, Address, Target

# 3: once by an old map, once by the new one, and once to where a slot is moving at the moment.
_ROUNDS_MAX = 3
_ASKING = Command(("ASKING",))


class _Share(NamedTuple):
    """The commands of a batch that go to one server."""

    server: Server
    address: Address
    numbers: list[int]  # their positions in the batch
    is_asking: bool  # the server is importing the slot of some of them

    def send(self, commands: Sequence[Command], *, is_write: bool) -> list[Reply]:
        """Send this share of *commands*; return a reply for each, errors included."""
        own = [commands[number] for number in self.numbers]
        if self.is_asking:  # before each: it is valid for one command, and does no harm to others
            own = [sent for command in own for sent in (_ASKING, command)]
        try:
            replies = self.server.write(own) if is_write else self.server.read(own)
        except StoreUnavailable as error:
            return [error] * len(self.numbers)
        return replies[1::2] if self.is_asking else replies


class Cluster:
    """The masters of a cluster."""

    is_cluster = True

    def __init__(self, target: Target, wait: Wait, monitor: SafetyMonitor) -> None:
        self._target = target
        self._wait = wait
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
        left = list(range(len(commands)))
        importing: dict[int, Address] = {}  # where to ask for a command whose slot is moving
        for _ in range(_ROUNDS_MAX):
            try:
                self._read_map_if_outdated()
                shares = self._shares(commands, left, importing, replies)
            except StoreUnavailable as error:  # nothing of this round was sent
                for number in left:
                    replies[number] = error
                break
            asked: dict[int, Address] = {}
            for share in shares:
                answers = share.send(commands, is_write=is_write)
                for number, answer in zip(share.numbers, answers, strict=True):
                    replies[number] = answer
                    asked[number] = share.address
            left, importing = self._redirected(replies, asked)
            if not left:
                break
        return replies

    def _shares(
        self,
        commands: Sequence[Command],
        numbers: Sequence[int],
        importing: dict[int, Address],
        replies: list[Reply],
    ) -> list[_Share]:
        """Split *numbers* by server; put an error into *replies* where no server owns the slot."""
        numbers_of: dict[Address, list[int]] = {}
        for number in numbers:
            slot = slot_of(commands[number].id)
            address = importing.get(number) or self._owners[slot]
            if address is None:
                self._is_outdated = True
                message = f"{self._target.name}: no server of the cluster serves slot {slot}"
                replies[number] = StoreUnavailable(message)
            else:
                numbers_of.setdefault(address, []).append(number)
        return [
            _Share(self._server(address), address, some, not importing.keys().isdisjoint(some))
            for address, some in numbers_of.items()
        ]

    def _redirected(
        self, replies: Sequence[Reply], asked: Mapping[int, Address]
    ) -> tuple[list[int], dict[int, Address]]:
        """Return which commands to send again, and where to if their slot is moving."""
        left: list[int] = []
        importing: dict[int, Address] = {}
        for number, address in asked.items():
            reply = replies[number]
            if isinstance(reply, StoreUnavailable):
                self._is_outdated = True  # a replica may be the master now
                self._unreachable.add(address)
            elif isinstance(reply, MovedError):  # before AskError, which it is a subclass of
                self._is_outdated = True
                left.append(number)
            elif isinstance(reply, AskError):
                left.append(number)
                importing[number] = _named_by(address, reply.host, reply.port)
            elif isinstance(reply, ClusterDownError):
                self._is_outdated = True
        return left, importing

    def _server(self, address: Address) -> Server:
        with self._mutex:
            self.check_open()
            server = self._servers.get(address)
            if server is None:
                server = Server(
                    self._target,
                    address,
                    name=f"redis {address}",
                    wait=self._wait,
                    monitor=self._monitor,
                )
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
        known = dict.fromkeys([*self._masters, *self._target.addresses])
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
            raise StoreUnavailable(f"{self._target.name}: the store is closed")

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
