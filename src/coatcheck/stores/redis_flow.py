"""Flows of the Redis store: what is sent for a swap or a read, and what the replies mean.

Between those who send, `redis.py` for threads and `redis_wire.py` for event loops, and
`redis_values.py`, which packs. All that is decided about an exchange is decided here, once.

Invariant: an error is ambiguous if, and only if, something of what was sent may have taken effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import GONE, RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import redis_values as values
from coatcheck.stores.fates import Fate, results_of
from coatcheck.stores.redis_dangers import QUESTIONS, Watch
from coatcheck.stores.redis_replies import Refusal, Reply
from coatcheck.stores.unread import Unread

# Said of the server, not of one record: everybody in the batch would be told the same.
_OF_THE_SERVER = frozenset(
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOAUTH"),
        *("NOPERM", "NOREPLICAS", "NOSCRIPT", "OOM", "READONLY", "TRYAGAIN"),
    )
)
# Half of the time-out: the server, which looks ten times a second whose wait is over, says how many
# replicas have answered before we stop listening for it.
_WAIT_SHARE = 0.5


@dataclass(slots=True)
class Send(Effect["list[Reply]"]):
    """Send *commands*; the result is a reply for each, a `Refusal` where it was not performed."""

    commands: Sequence[values.Command]


@dataclass(frozen=True, slots=True)
class Flows:
    """
    The exchanges with one store.

    Args:
        name: the servers, for people.
        packer: makes commands.
        watch: knows whether anything may begin here.
    """

    name: str
    packer: values.Packer
    watch: Watch

    def swap(self, swaps: Sequence[Swap]) -> Flow[list[Record | None]]:
        """Write each record if the version its caller saw still stands."""
        fates: list[Fate] = [None] * len(swaps)
        if not swaps:
            return []
        if self.watch.refused:
            yield from self._refuse_beginnings(swaps)
        calls = self.packer.calls_of(swaps)
        replies: list[Reply] = yield Send(calls)
        if any(replies):
            yield from self._repeated(calls, replies)
        self._learn(replies)
        for call, reply in zip(calls, replies, strict=True):
            standing = self._values_of(bare(reply), len(call.swaps))
            for place, value in enumerate(standing, call.start):
                if value is not None:
                    fates[place] = self._fate(swaps[place].id, value) if value else GONE
            _refuse_unacknowledged(call, reply, fates)
        return results_of(fates)

    def _repeated(self, calls: Sequence[values.Command], replies: list[Reply]) -> Flow[None]:
        """Call again, by the script's text, where the server did not know what was asked of it."""
        numbers = [number for number, reply in enumerate(replies) if _is_unknown(reply)]
        if not numbers:
            return
        if any(replies[number].code != "NOSCRIPT" for number in numbers):
            self.packer.is_old = True
        try:
            told = yield from Send([self.packer.by_text(calls[number]) for number in numbers])
        except StoreUnavailable as error:  # the others are answered
            told = [error] * len(numbers)
        for number, reply in zip(numbers, told, strict=True):
            replies[number] = reply

    def _learn(self, replies: Sequence[Reply]) -> None:
        """Whether the script may run, which is answered by a list."""
        kinds = set(map(type, replies))
        if list in kinds or Refusal in kinds:
            self.packer.has_run = Refusal not in kinds

    def _refuse_beginnings(self, swaps: Sequence[Swap]) -> Flow[None]:
        """Raise, if any of *swaps* is a claim and the danger is still there."""
        beginnings = sum(map(_begins, swaps))
        if not beginnings:
            return
        if not self.watch.is_spread:  # else several servers were asked already
            told = [bare(reply) for reply in (yield from Send(QUESTIONS))]
            self.watch.learn({self.name: self.watch.health_of(self.name, told)})
        if self.watch.refused:
            mixed = beginnings < len(swaps)  # then each is asked for alone, and may end
            raise (values.UnreadableValue if mixed else StoreUnavailable)(self.watch.refused)

    def get(self, ids: Sequence[bytes]) -> Flow[list[Record | None]]:
        """The records that stand, in the order of *ids*."""
        if not ids:
            return []
        replies = yield from Send(list(self.packer.reads_of(ids)))
        fates: list[Fate] = []
        for reply in replies:
            some = ids[len(fates) : len(fates) + self.packer.read_max]
            found = zip(some, self._values_of(reply, len(some)), strict=True)
            fates += [None if value is None else self._fate(id, value) for id, value in found]
        return results_of(fates)

    def _values_of(self, reply: Reply, count: int) -> Sequence[Reply]:
        """What a *reply* about *count* records has of each: a value, or an error of it alone."""
        if type(reply) is Refusal:
            if count > 1 and not _is_of_the_server(reply):
                # Of one of them: whoever groups asks for each alone when this is raised.
                raise values.UnreadableValue(str(reply))
            kind = StoreUnavailable if _is_of_the_server(reply) else Unread
            reply = kind(f"{self.name}: {reply}")
        # A claim by the server's own command is answered by the value alone.
        return reply if type(reply) is list else [reply] * count

    def _fate(self, id: bytes, value: Reply) -> Fate:
        if isinstance(value, StoreUnavailable):
            return value
        try:
            return values.record_of(id, value)
        except values.UnreadableValue as error:
            return Unread(f"{self.name}: {error}")


def _begins(swap: Swap) -> bool:
    """
    *swap* is a claim: whoever wins it executes.

    Whoever renews its own claim, or notes something in it, writes its next version; a claim begins
    with the time, which is long past that.
    """
    record = swap.record
    return record is not None and record.state == RUNNING and record.version > swap.expected + 1


def _refuse_unacknowledged(call: values.Command, reply: Reply, fates: list[Fate]) -> None:
    """Those of *call* that have written something, where too few replicas have it."""
    if type(reply) is Unacknowledged:
        for place, swap in enumerate(call.swaps, call.start):
            if _has_written(swap, fates[place]):
                fates[place] = reply.outage


def _has_written(swap: Swap, fate: Fate) -> bool:
    """*swap* took effect: now, or before, where its writer has come again and found its own."""
    if not isinstance(fate, Record):
        return fate is None
    if swap.record is None:
        return fate is GONE
    # Not by what is sealed, which is never the same twice.
    return (fate.version, fate.nonce) == (swap.record.version, swap.record.nonce)


def _is_unknown(reply: Reply) -> bool:
    """The server does not know the script, or not the command for a claim: nothing was done."""
    if type(reply) is not Refusal:
        return False
    # Its text is all that is said of the latter, and the driver takes the code off.
    return reply.code == "NOSCRIPT" or str(reply).endswith("syntax error")


def _is_of_the_server(refusal: Refusal) -> bool:
    # What it calls a command that was renamed, or that a proxy does not pass on, has no code.
    return refusal.code in _OF_THE_SERVER or "unknown " in str(refusal).lower()


def refuse_refusal(name: str, reply: Reply) -> None:
    """Raise, if a command was refused that changes nothing."""
    if type(reply) is Refusal:
        raise StoreUnavailable(f"{name}: {reply}")


def is_demoted(replies: Sequence[Reply]) -> bool:
    """Whoever has said this is the master no longer; connecting anew finds who is."""
    return any(type(reply) is Refusal and reply.code == "READONLY" for reply in replies)


class Unacknowledged(NamedTuple):
    """A *reply* to what may have written something; if it has, too few have it: the *outage*."""

    reply: Reply
    outage: StoreUnavailable


def bare(reply: Reply) -> Reply:
    """*reply* to what has written nothing."""
    return reply.reply if type(reply) is Unacknowledged else reply


@dataclass(frozen=True, slots=True)
class Wait:
    """How many replicas must have what was written, and how long an answer may take in all."""

    replicas: int = 0
    timeout_s: float = 0.0

    def command(self) -> bytes:
        """What is sent behind every write."""
        limit_ms = self.timeout_s * _WAIT_SHARE * 1_000
        return values.packed(b"WAIT", b"%d" % self.replicas, b"%d" % limit_ms)

    def judged(self, name: str, replies: Sequence[Reply], waited: Reply) -> list[Reply]:
        """*replies*, and that few know of them where it is so, by the reply to `command`."""
        acknowledged = waited if type(waited) is int else 0  # none, where it refuses to wait
        if acknowledged >= self.replicas:
            return list(replies)
        outage = StoreUnavailable(
            f"{name}: acknowledged by {acknowledged} replicas, but wait={self.replicas}",
            is_ambiguous=True,
        )
        return [r if type(r) is Refusal else Unacknowledged(r, outage) for r in replies]


# For whoever does not write, or trusts one server.
NO_WAIT = Wait()
