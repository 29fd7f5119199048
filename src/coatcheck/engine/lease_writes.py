"""Lease writes: what the heartbeat writes, many swaps in one call, each with its own outcome.

One record that cannot be written, or one dead shard of a cluster, makes a whole call fail. If the
store says what became of each member (`stores/batch_errors.py`), that is used; otherwise the
members are written one by one. A member that failed alone is left out of the next bulk call, so
that lasting trouble with one claim costs the others nothing. All of it is bounded: a store that is
down is not called once for each claim, with a time-out each.

Beside renewals, two kinds of writes are pending until the store accepts them. *Completions* of
executions whose clients got a 503: the work is done, and if that is never written, it is done
again; until then their leases stay, and duplicates in this process wait. And *claims that no
process is left to execute*: whether such a claim was written is not known, and the write may still
be under way. So it is written once more, which makes no difference if it was, and then released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Claim, release_of_claim
from coatcheck.core.progress import has_notes
from coatcheck.core.record import IN_DOUBT, RUNNING, Record, Swap, is_same_write
from coatcheck.errors import StoreUnavailable, Unreadable
from coatcheck.operation import Lease
from coatcheck.stores.batch_errors import BatchError, Outcome

logger = logging.getLogger("coatcheck")

# 3 failures and no success: then the store is down. If it was only one dead shard, the next tick
# begins with other claims.
FAILURES_MAX = 3

# None: it is written. `Unreadable`: the current record is encrypted with a key that is not here.
Written: TypeAlias = Record | Unreadable | None


@dataclass(slots=True)
class SwapAll(Effect["Sequence[Record | None]"]):
    """Write several records in one call of the store."""

    swaps: Sequence[Swap]


class LeaseWrite(NamedTuple):
    """What became of the *swap* for a *lease*."""

    lease: Lease
    swap: Swap
    conflict: Written


class IndividualWrites:
    """
    Writes what one tick has to write of one kind.

    Args:
        budget_s: how long to go on after a failure; a try that is under way then still ends.
    """

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failure: Exception | None = None  # the first of those that failed alone
        self._budget_s = budget_s
        self._clock = clock
        self._until_s: float | None = None  # nothing has failed
        self._unanswered = 0
        self._is_answered = False

    def write(self, swaps: Sequence[tuple[Lease, Swap]]) -> Flow[list[LeaseWrite]]:
        """Return the outcome of each swap, without those that failed or were not tried."""
        sound = [one for one in swaps if not one[0].failures]
        suspect = [one for one in swaps if one[0].failures]
        outcomes = (yield from self._in_one_batch(sound)) if len(sound) > 1 else None
        # Those that were tried least come first, so that each has its turn.
        alone = sorted(suspect, key=lambda one: one[0].failures)
        if outcomes is None:
            outcomes, alone = [], [*sound, *alone]
        written = [
            self._counted(*one, outcome) for one, outcome in zip(sound, outcomes, strict=False)
        ]
        for one in alone:
            if not self._is_over():
                outcome = yield from self._alone(one[1])
                written.append(self._counted(*one, outcome))
        return [one for one in written if one is not None]

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def _in_one_batch(self, swaps: Sequence[tuple[Lease, Swap]]) -> Flow[Sequence[Outcome] | None]:
        """The outcome of each; None: all failed, because of one of them or of the store."""
        try:
            return (yield from SwapAll([swap for _, swap in swaps]))
        except BatchError as error:
            if not all(isinstance(outcome, StoreUnavailable) for outcome in error.outcomes):
                return error.outcomes
        except Exception:  # noqa: BLE001, S110 - writing them one by one will show which failed
            pass
        self._start_budget()
        return None

    def _alone(self, swap: Swap) -> Flow[Outcome]:
        try:
            (outcome,) = yield from SwapAll([swap])
        except Exception as error:  # noqa: BLE001 - of this claim, or of the store
            return error
        return outcome

    def _counted(self, lease: Lease, swap: Swap, outcome: Outcome) -> LeaseWrite | None:
        if isinstance(outcome, Exception) and not isinstance(outcome, Unreadable):
            self._start_budget()
            lease.failures += 1
            self._unanswered += isinstance(outcome, StoreUnavailable)
            self._failure = self._failure or outcome
            return None
        lease.failures = 0
        self._is_answered = True
        return LeaseWrite(lease, swap, outcome)

    def _start_budget(self) -> None:
        if self._until_s is None:
            self._until_s = self._clock() + self._budget_s

    def _is_over(self) -> bool:
        """No more is tried: the store is down, or this has taken too long."""
        if self._until_s is None:
            return False
        is_down = self._unanswered >= FAILURES_MAX and not self._is_answered
        return is_down or self._clock() >= self._until_s


# 10 000: without a limit, a store that is down for long would exhaust the memory of the process.
PENDING_MAX = 10_000


class PendingCompletions:
    """Completions that are still to be written; *on_written* is called with each that was."""

    def __init__(self, on_written: Callable[[Record], None]) -> None:
        self._on_written = on_written
        # Several per record, if the claims of duplicates are to be released.
        self._leases: dict[Lease, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease, completion: Swap) -> None:
        """Write the *completion* of *lease* as soon as the store accepts it."""
        if len(self._leases) >= PENDING_MAX:
            _log_given_up(lease, f"{PENDING_MAX} others are pending already")
            return
        lease.pending = completion
        self._leases[lease] = None

    def write(self, writes: IndividualWrites, now_ms: int) -> Flow[list[Lease]]:
        """Write what can be written; the leases that are settled: written, or too late."""
        settled: list[Lease] = []
        leases = list(self._leases)
        while leases:
            one_each = {lease.claim.id: lease for lease in leases}
            again = [lease for lease in leases if one_each[lease.claim.id] is not lease]
            swaps = [(lease, lease.pending) for lease in one_each.values() if lease.pending]
            for lease, swap, conflict in (yield from writes.write(swaps)):
                lease.pending = self._next(swap, conflict)
                (settled if lease.pending is None else again).append(lease)
            leases = again
        # After its window no retry expects it any more; so nothing is kept for ever.
        for lease in [one for one in list(self._leases) if one.claim.window_until_ms <= now_ms]:
            _log_given_up(lease, "its window is over")
            lease.pending = None
            settled.append(lease)
        for lease in settled:
            self._leases.pop(lease, None)
        return settled

    def _next(self, swap: Swap, conflict: Written) -> Swap | None:
        """What to write after *swap* met *conflict*; None: nothing more."""
        record = swap.record
        assert record is not None
        is_written = conflict is None or (
            isinstance(conflict, Record) and is_same_write(conflict, record)
        )
        if isinstance(swap, Claim):
            return release_of_claim(swap) if is_written else None
        if is_written:
            self._on_written(record)
            logger.info(
                "coatcheck: the result of operation %s is stored after all", reference_of(swap.id)
            )
            return None
        # On top of our own renewal, or of "in doubt" that another process wrote when our lease
        # had expired: we know the outcome.
        if (
            conflict is None
            or isinstance(conflict, Unreadable)
            or conflict.nonce != record.nonce
            or conflict.state not in (RUNNING, IN_DOUBT)
            or conflict.state == record.state
        ):
            logger.warning(
                "coatcheck: the result of operation %s came too late and is dropped: another "
                "attempt has taken over",
                reference_of(swap.id),
            )
            return None
        completion = record._replace(version=conflict.version + 1, progress=conflict.progress)
        if has_notes(conflict):  # then the key stays bound; see `lifecycle.ended`
            completion = completion._replace(fingerprint=conflict.fingerprint)
        return Swap(swap.id, conflict.version, completion)


def _log_given_up(lease: Lease, why: str) -> None:
    logger.error(
        "coatcheck: the result of operation %s could not be stored: %s; check what it did before "
        "it is run again",
        *(reference_of(lease.claim.id), why),
    )
