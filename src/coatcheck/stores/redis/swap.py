"""The flows of the Redis store: which commands a swap or a read sends, and what the replies mean.

Both executors run them: `store.py` for threads, `async_backend.py` for event loops. Everything that
is decided about an exchange with the server is decided here, once.

Invariant: an error is ambiguous if, and only if, something that was sent may have been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redis import exceptions

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import GONE, RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import Outcome, UndecodableRecord, results_of
from coatcheck.stores.contract import compact_swap
from coatcheck.stores.redis.errors import Reply, is_server_error, message_of
from coatcheck.stores.redis.records import Command, Commands, UnreadableValue, Words, decode
from coatcheck.stores.redis.safety import QUESTIONS, SafetyMonitor

# Half of the timeout: the server checks ten times a second whose WAIT is over, and must answer
# before we give up on it.
_WAIT_SHARE = 0.5


@dataclass(slots=True)
class Send(Effect["list[Reply]"]):
    """Send *commands* in one round trip; the result is one reply for each."""

    commands: Sequence[Command]
    is_write: bool = False


@dataclass(frozen=True, slots=True)
class Flows:
    """The exchanges with one store."""

    name: str  # the servers, for error messages
    commands: Commands
    monitor: SafetyMonitor  # knows whether claims are refused because the server could lose records
    compact: bool = False  # keep neither scope nor key; see `compact_record`

    def swap(self, swaps: Sequence[Swap]) -> Flow[list[Record | None]]:
        """Write each record if its version is still the expected one."""
        if not swaps:
            return []
        if self.compact:
            swaps = [compact_swap(swap) for swap in swaps]
        if self.monitor.refusal:
            yield from self._refuse_claims(swaps)
        calls = self.commands.swap(swaps)
        replies: list[Reply] = yield Send(calls, is_write=True)
        if any(replies):  # an empty list: all were applied
            yield from self._send_script(calls, replies)
        outcomes: list[Outcome] = [None] * len(swaps)
        for call, reply in zip(calls, replies, strict=True):
            is_missing = type(reply) is NotReplicated
            current = self._values_of(reply.reply if is_missing else reply, len(call.swaps))
            for place, value in enumerate(current, call.start):
                if value is not None:
                    outcomes[place] = self._outcome(swaps[place].id, value) if value else GONE
                if is_missing and _is_written(swaps[place], outcomes[place]):
                    outcomes[place] = reply.error  # but a replay is answered
        return results_of(outcomes)

    def _send_script(self, calls: Sequence[Command], replies: list[Reply]) -> Flow[None]:
        """Repeat with the script's text the calls whose server did not have the script."""
        numbers = [n for n, reply in enumerate(replies) if type(reply) is exceptions.NoScriptError]
        if not numbers:
            return
        repeated = [self.commands.with_script_text(calls[number]) for number in numbers]
        try:
            again = yield from Send(repeated, is_write=True)
        except StoreUnavailable as error:  # the other calls have their replies
            again = [error] * len(numbers)
        for number, reply in zip(numbers, again, strict=True):
            replies[number] = reply

    def _refuse_claims(self, swaps: Sequence[Swap]) -> Flow[None]:
        """Ask the server again; raise if any of *swaps* is a claim and claims are still refused."""
        claims = sum(map(_is_claim, swaps))
        if not claims:
            return
        if not self.monitor.is_cluster:  # the store has asked all servers of a cluster already
            replies = yield from Send([Command(question) for question in QUESTIONS])
            self.monitor.update({self.name: self.monitor.health_of(self.name, replies)})
        if self.monitor.refusal:
            # ValueError: the batcher then sends each member alone, and completions succeed.
            is_mixed = claims < len(swaps)
            raise (UnreadableValue if is_mixed else StoreUnavailable)(self.monitor.refusal)

    def get(self, ids: Sequence[bytes]) -> Flow[list[Record | None]]:
        """Read the records with these *ids*, in their order."""
        if not ids:
            return []
        replies = yield from Send(list(self.commands.get(ids)))
        outcomes: list[Outcome] = []
        for reply in replies:
            some = ids[len(outcomes) : len(outcomes) + self.commands.read_max]
            found = zip(some, self._values_of(reply, len(some)), strict=True)
            outcomes += [None if value is None else self._outcome(id, value) for id, value in found]
        return results_of(outcomes)

    def _values_of(self, reply: Reply, count: int) -> Sequence[Reply]:
        """Return what *reply* has for each of *count* records: a value, None or an error."""
        if isinstance(reply, exceptions.ResponseError):
            is_of_server = is_server_error(reply)
            if count > 1 and not is_of_server:
                # About one record, but not which: the batcher then sends each member alone.
                raise UnreadableValue(message_of(reply))
            kind = StoreUnavailable if is_of_server else UndecodableRecord
            reply = kind(f"{self.name}: {message_of(reply)}")
        if isinstance(reply, StoreUnavailable):
            return [reply] * count
        return reply or [None] * count

    def _outcome(self, id: bytes, value: Reply) -> Outcome:
        if isinstance(value, StoreUnavailable):
            return value
        try:
            return decode(id, value)
        except UnreadableValue as error:
            return UndecodableRecord(f"{self.name}: {error}")


def _is_claim(swap: Swap) -> bool:
    """
    Return whether *swap* starts an execution.

    A renewal or a note writes the next version; a claim's version is the current time in
    milliseconds, which is far beyond that.
    """
    record = swap.record
    return record is not None and record.state == RUNNING and record.version > swap.expected + 1


def _is_written(swap: Swap, outcome: Outcome) -> bool:
    """Return whether *swap* was applied, now or by an earlier try of the same writer."""
    if not isinstance(outcome, Record):
        return outcome is None
    if swap.record is None:
        return outcome is GONE
    # Not by comparing whole records: encrypted parts differ each time.
    return (outcome.version, outcome.nonce) == (swap.record.version, swap.record.nonce)


class NotReplicated(NamedTuple):
    """The *reply* to a write that too few replicas acknowledged, and the *error* of its callers."""

    reply: Reply
    error: StoreUnavailable


@dataclass(frozen=True, slots=True)
class Wait:
    """How many replicas must acknowledge a write, and the timeout of one answer."""

    replicas: int = 0
    timeout_s: float = 0.0

    def commands(self) -> list[Words]:
        """Return what to send behind every write, on the same connection."""
        limit_ms = int(self.timeout_s * _WAIT_SHARE * 1_000)
        return [("WAIT", self.replicas, limit_ms)] if self.replicas else []

    def checked(self, name: str, replies: list[Reply]) -> list[Reply]:
        """Return *replies* without the one to WAIT, marked if too few replicas have the write."""
        if not self.replicas:
            return replies
        *replies, waited = replies
        acknowledged = waited if type(waited) is int else 0  # an error: the server refuses WAIT
        if acknowledged >= self.replicas:
            return replies
        error = StoreUnavailable(
            f"{name}: the write reached {acknowledged} replicas, but the URL has "
            f"wait={self.replicas}; check the replicas, or lower wait=",
            is_ambiguous=True,
        )
        return [
            reply if isinstance(reply, Exception) else NotReplicated(reply, error)
            for reply in replies
        ]
