"""A cluster: single servers, each with its share of the slots, and the map of who has which.

Beside `redis_places.py`. The slot of a key is computed from the key, so that a batch goes to all
its servers at once; the map is asked for again when a server says that it is wrong, or is gone.

The driver's own cluster client is not used: it sends a command again whose answer was lost, where
we have to say that it may have taken effect; and its pipelines cannot wait for replicas.
"""

from __future__ import annotations

import os
import threading
from binascii import crc_hqx, hexlify
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coatcheck.core.scope import ID_BYTES
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.contract import Wire
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis_dangers import Watch
from coatcheck.stores.redis_flow import Flows, Wait
from coatcheck.stores.redis_line import Ask, Line, connector, exchange
from coatcheck.stores.redis_places import Single
from coatcheck.stores.redis_replies import Refusal, Reply
from coatcheck.stores.redis_url import SENTINEL_EXAMPLE, Address, Target
from coatcheck.stores.redis_values import Command, packed

SLOTS = 16_384
# 3: once by an old map, once by the new one, and once to where a slot is just moving.
_ROUNDS_MAX = 3
_ASKING = packed(b"ASKING")


class _Share(NamedTuple):
    """What of some commands is for one server."""

    node: Single
    address: Address
    numbers: list[int]
    is_asking: bool  # it is to answer for slots that are only on their way to it

    def ask(self, commands: Sequence[Command], *, is_write: bool) -> Ask:
        """What it is sent. To ask for nothing in particular does no harm to the others."""
        line = self.node.writer if is_write else self.node.reader
        before = _ASKING if self.is_asking else b""
        words = [before + commands[number].packed for number in self.numbers]
        return Ask(line, b"".join(words), len(words) * (1 + self.is_asking))

    def take(self, answers: Sequence[Reply] | StoreUnavailable, replies: list[Reply]) -> None:
        """Put *answers* where they belong, without those to ASKING; or why there are none."""
        if isinstance(answers, StoreUnavailable):
            own: Sequence[Reply] = [answers] * len(self.numbers)
        else:
            own = answers[1::2] if self.is_asking else answers
        for number, answer in zip(self.numbers, own, strict=True):
            replies[number] = answer


class Cluster:
    """The masters of a cluster."""

    is_spread = True

    def __init__(self, target: Target, wait: Wait, watch: Watch) -> None:
        self._target = target
        self._wait = wait
        self._watch = watch
        self._nodes: dict[Address, Single] = {}
        self._owners: list[Address | None] = [None] * SLOTS
        self._masters: list[Address] = []
        self._away: set[Address] = set()  # who has not answered when it was asked last
        self._is_outdated = True
        self._closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._mutex = threading.RLock()

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what may change something, each command to who owns its key."""
        return self._call(commands, is_write=True)

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what changes nothing, each command to who owns its key."""
        return self._call(commands, is_write=False)

    def _call(self, commands: Sequence[Command], *, is_write: bool) -> list[Reply]:
        replies: list[Reply] = [None] * len(commands)
        left = list(range(len(commands)))
        moving: dict[int, Address] = {}  # whose slot is on its way, and where to
        for _ in range(_ROUNDS_MAX):
            try:
                self._learn_if_outdated()
                shares = self._shares(commands, left, moving, replies)
            except StoreUnavailable as error:  # nothing of this round was sent
                for number in left:
                    replies[number] = error
                break
            told = exchange([share.ask(commands, is_write=is_write) for share in shares])
            for share, answers in zip(shares, told, strict=True):
                share.take(answers, replies)
            asked = {number: share.address for share in shares for number in share.numbers}
            left, moving = self._redirected(replies, asked)
            if not left:
                break
        return replies

    def _shares(
        self,
        commands: Sequence[Command],
        numbers: Sequence[int],
        moving: dict[int, Address],
        replies: list[Reply],
    ) -> list[_Share]:
        """Who is to be sent which of *numbers*; what nobody serves is answered here."""
        numbers_of: dict[Address, list[int]] = {}
        for number in numbers:
            slot = slot_of(commands[number].id)
            address = moving.get(number) or self._owners[slot]
            if address is None:
                self._is_outdated = True
                message = f"{self._target.name}: nobody serves slot {slot}"
                replies[number] = StoreUnavailable(message)
            else:
                numbers_of.setdefault(address, []).append(number)
        return [
            _Share(self._node(address), address, some, not moving.keys().isdisjoint(some))
            for address, some in sorted(numbers_of.items())
        ]

    def _redirected(
        self, replies: Sequence[Reply], asked: Mapping[int, Address]
    ) -> tuple[list[int], dict[int, Address]]:
        """Which of those *asked* sent us elsewhere; and where to, unless the new map will say."""
        left: list[int] = []
        moving: dict[int, Address] = {}
        for number, teller in asked.items():
            reply = replies[number]
            if isinstance(reply, StoreUnavailable):
                self._is_outdated = True  # a replica may be the master by now
                self._away.add(teller)
            if type(reply) is not Refusal:
                continue
            if reply.code in ("MOVED", "CLUSTERDOWN"):
                self._is_outdated = True
            if reply.code in ("MOVED", "ASK"):
                left.append(number)
            if reply.code == "ASK":  # "ASK slot host:port"
                host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
                moving[number] = _told_by(teller, host, int(port))
        return left, moving

    def _node(self, address: Address) -> Single:
        with self._mutex:
            self.refuse_if_closed()
            node = self._nodes.get(address)
            if node is None:
                connect = connector(self._target, address, self._wait.timeout_s)
                node = Single(connect, f"redis {address}", self._wait, self._watch)
                self._nodes[address] = node
            return node

    def _learn_if_outdated(self) -> None:
        self.refuse_if_closed()
        if not self._is_outdated:
            return
        with self._mutex:
            if self._is_outdated:
                self._learn()

    def _learn(self) -> None:
        """
        Ask whoever answers for the map; those first that were in it last, and answered.

        While a master is away the map is asked for again and again, also by those whose keys are
        elsewhere: they must not wait each time for the one that is away.
        """
        errors: list[StoreUnavailable] = []
        known = dict.fromkeys([*self._masters, *self._target.addresses])
        for address in sorted(known, key=self._away.__contains__):
            try:
                told = self._node(address).operator.ask("CLUSTER", "SLOTS")
            except StoreUnavailable as error:
                errors.append(error)
                self._away.add(address)
                continue
            self._away.discard(address)
            if type(told) is Refusal:
                # Found when the store is opened; later, it is a server that has changed.
                kind = StoreUnavailable if self._masters else Misconfigured
                message = f"redis {address}: {told}; redis:// is for a single server"
                raise kind(f"{message}, {SENTINEL_EXAMPLE} for one that Sentinels watch")
            self._adopt(told, address)
            return
        raise errors[-1]

    def _adopt(self, told: Sequence[Reply], teller: Address) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for first, last, master, *_replicas in told:
            owner = _told_by(teller, (master[0] or b"").decode(), master[1])
            owners[first : last + 1] = [owner] * (last + 1 - first)
        self._owners = owners
        self._masters = sorted({owner for owner in owners if owner is not None})
        self._is_outdated = False
        for address, node in self._nodes.items():
            if address not in self._masters:
                node.hang_up()

    def servers(self) -> Iterable[Line]:
        """A line to each master, for operators."""
        self._is_outdated = True
        self._learn_if_outdated()
        return [self._node(address).operator for address in self._masters]

    def an_id_each(self) -> Sequence[bytes]:
        """Drawn until every master has one."""
        self._learn_if_outdated()
        ids: dict[Address, bytes] = {}
        while len(ids) < len(self._masters):
            id = os.urandom(ID_BYTES)
            if owner := self._owners[slot_of(id)]:
                ids.setdefault(owner, id)
        return list(ids.values())

    def wire(self, flows: Flows) -> Wire:
        """None: who has several servers to ask asks all of them from one thread."""
        del flows
        raise NotImplementedError

    def refuse_if_closed(self) -> None:
        """Raise, if nothing can be asked any more."""
        if self._closed:
            raise StoreUnavailable(f"{self._target.name}: the store is closed")

    def close(self) -> None:
        """Let go of all connections."""
        self._closed = True
        with self._mutex:
            for node in self._nodes.values():
                node.close()


def _told_by(teller: Address, host: str, port: int) -> Address:
    """Where *teller* sends us; a node that it cannot name, or will not, is where it is itself."""
    return Address(teller.host if host in ("", "?") else host, port)


def slot_of(id: bytes) -> int:
    """The slot of a record, whose key is placed by what stands in its braces."""
    return crc_hqx(hexlify(id), 0) % SLOTS
