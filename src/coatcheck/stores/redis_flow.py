"""Flows of the Redis store: what is sent for a swap or a read, and what the replies mean.

Between those who send, `redis.py` for threads and `redis_wire.py` for event loops, and
`redis_values.py`, which packs. All that is decided about an exchange is decided here, once.

Invariant: an error is ambiguous if, and only if, something of what was sent may have taken effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import GONE, RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import redis_values as values
from coatcheck.stores.redis_dangers import QUESTIONS, Watch
from coatcheck.stores.redis_replies import Refusal, Reply

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
        results: list[Record | None] = [None] * len(swaps)
        if not swaps:
            return results
        if self.watch.refused:
            yield from self._refuse_beginnings(swaps)
        calls = self.packer.calls_of(swaps)
        replies: list[Reply] = yield Send(calls)
        if any(replies) or b"" in replies:  # that is a value, too, though none of ours
            yield from self._repeated(calls, replies)
            self._read(calls, replies, results)
        if list in map(type, replies):
            self.packer.has_run = True
        return results

    def _repeated(self, calls: Sequence[values.Command], replies: list[Reply]) -> Flow[None]:
        """Call again, by the script's text, where the server did not know what was asked of it."""
        numbers = [number for number, reply in enumerate(replies) if _is_unknown(reply)]
        if not numbers:
            return
        if any(replies[number].code != "NOSCRIPT" for number in numbers):
            self.packer.is_old = True
        with in_doubt_if(len(numbers) < len(calls)):
            told = yield from Send([self.packer.by_text(calls[number]) for number in numbers])
        for number, reply in zip(numbers, told, strict=True):
            replies[number] = reply

    def _read(
        self,
        calls: Sequence[values.Command],
        replies: Sequence[Reply],
        results: list[Record | None],
    ) -> None:
        """Put into *results* what stands where somebody has lost."""
        try:
            refuse_refusals(self.name, replies)
            for call, reply in zip(calls, replies, strict=True):
                # A claim by the server's own command is answered by the value alone.
                standing = reply if type(reply) is list else (reply,)
                for place, value in enumerate(standing, call.start):
                    if value is not None:
                        id = call.swaps[place - call.start].id
                        results[place] = values.record_of(id, value) if value else GONE
        except values.UnreadableValue as error:
            raise self._of_one(error, results) from error
        except StoreUnavailable:
            self.packer.has_run = False  # perhaps it may run no more
            raise

    def _refuse_beginnings(self, swaps: Sequence[Swap]) -> Flow[None]:
        """Raise, if any of *swaps* is a claim and the danger is still there."""
        beginnings = sum(map(_begins, swaps))
        if not beginnings:
            return
        if not self.watch.is_spread:  # else several servers were asked already
            told = yield from Send(QUESTIONS)
            self.watch.learn({self.name: self.watch.health_of(self.name, told)})
        if self.watch.refused:
            mixed = beginnings < len(swaps)  # then each is asked for alone, and may end
            raise (values.UnreadableValue if mixed else StoreUnavailable)(self.watch.refused)

    def get(self, ids: Sequence[bytes]) -> Flow[list[Record | None]]:
        """The records that stand, in the order of *ids*."""
        if not ids:
            return []
        replies = yield from Send(list(self.packer.reads_of(ids)))
        try:
            refuse_refusals(self.name, replies)
            found = (value for reply in replies for value in reply)
            return [
                None if value is None else values.record_of(id, value)
                for id, value in zip(ids, found, strict=True)
            ]
        except values.UnreadableValue as error:
            raise self._of_one(error, ids) from error

    def _of_one(self, error: values.UnreadableValue, asked: Sequence[object]) -> Exception:
        """Whoever groups asks for each alone when this is raised, so that one fails alone."""
        return StoreUnavailable(f"{self.name}: {error}") if len(asked) == 1 else error


def _begins(swap: Swap) -> bool:
    """
    *swap* is a claim: whoever wins it executes.

    Whoever renews its own claim, or notes something in it, writes its next version; a claim begins
    with the time, which is long past that.
    """
    record = swap.record
    return record is not None and record.state == RUNNING and record.version > swap.expected + 1


def _is_unknown(reply: Reply) -> bool:
    """The server does not know the script, or not the command for a claim: nothing was done."""
    if type(reply) is not Refusal:
        return False
    # Its text is all that is said of the latter, and the driver takes the code off.
    return reply.code == "NOSCRIPT" or str(reply).endswith("syntax error")


@contextmanager
def in_doubt_if(is_done: bool) -> Iterator[None]:  # noqa: FBT001 - reads as a sentence
    """Whatever fails in here is a doubt about a write of which another part *is_done*."""
    try:
        yield
    except StoreUnavailable as error:
        error.is_ambiguous = error.is_ambiguous or is_done
        raise


def refuse_refusals(name: str, replies: Sequence[Reply]) -> None:
    """Raise, if any command was refused."""
    refusals = [reply for reply in replies if type(reply) is Refusal]
    for refusal in refusals:
        if refusal.code not in _OF_THE_SERVER:
            raise values.UnreadableValue(str(refusal))
    if refusals:
        raise StoreUnavailable(
            f"{name}: {refusals[0]}",
            is_ambiguous=len(refusals) < len(replies),  # some of the commands were performed
        )


def is_demoted(replies: Sequence[Reply]) -> bool:
    """Whoever has said this is the master no longer; connecting anew finds who is."""
    return any(type(reply) is Refusal and reply.code == "READONLY" for reply in replies)


@dataclass(frozen=True, slots=True)
class Wait:
    """How many replicas must have what was written, and how long an answer may take in all."""

    replicas: int = 0
    timeout_s: float = 0.0

    def command(self) -> bytes:
        """What is sent behind every write."""
        limit_ms = self.timeout_s * _WAIT_SHARE * 1_000
        return values.packed(b"WAIT", b"%d" % self.replicas, b"%d" % limit_ms)

    def refuse_too_few(self, name: str, replies: Sequence[Reply], waited: Reply) -> None:
        """Raise, if *replies* are of writes that fewer have; *waited* is the reply to `command`."""
        acknowledged = waited if type(waited) is int else 0  # none, where it refuses to wait
        is_done = any(type(reply) is not Refusal for reply in replies)
        if acknowledged < self.replicas and is_done:
            raise StoreUnavailable(
                f"{name}: acknowledged by {acknowledged} replicas, but wait={self.replicas}",
                is_ambiguous=True,
            )


# For whoever does not write, or trusts one server.
NO_WAIT = Wait()
