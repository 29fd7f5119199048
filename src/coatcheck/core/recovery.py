"""Recovery: ends an operation whose attempt did not finish, without a retry of its client.

`recover` runs in the background. It does what a retry would do about an attempt that died, except
that it executes nothing. Under "manual" it marks the operation in doubt. Under "reconcile" it calls
the reconcile function and ends the operation with its answer. Under "retry" it does nothing: only a
retry brings the request again.

`resolve` and `rerun` are the decisions of an operator about an operation in doubt: it happened,
with this answer; it did not happen and may run again; or it shall run again now. The same swap
stores who decided, when and why. A decision that comes too late changes nothing. A later decision
may correct an earlier one, but never what an execution has returned.
"""

from __future__ import annotations

from typing import NamedTuple

from coatcheck.core.flow import Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    MarkInDoubt,
    Reconcile,
    Snapshot,
    TakeOver,
    ended,
    next_attempt,
    verdict,
    write_outcome,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import Resolution, encoded, progress_of
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    attempt_began_ms,
    is_lease_over,
)

# 6: from one minute to about one hour. An outcome that is unknown for so long needs an operator,
# and a downstream service that returns after a day is still asked within the hour.
DOUBLINGS_MAX = 6

# 20: enough for any operation that people look at; the log has all of them.
RESOLUTIONS_MAX = 20

HAPPENED = "happened"
DID_NOT_HAPPEN = "did not happen"
# The state that each decision ends in.
_DECIDED = {HAPPENED: COMPLETED, DID_NOT_HAPPEN: FAILED}


def recover(read: Snapshot, request: ClaimRequest, policy: Policy) -> Flow[OutcomeKind | None]:
    """
    End the operation of the record that was *read*, if its attempt has died; returns how it ended.

    None: there was nothing to do, or another process has done it. *request* is that of the record
    itself, so that the verdict is the one that a retry would get.
    """
    decided = verdict(read.record, request, policy, read.now_ms)
    if not isinstance(decided, (MarkInDoubt, TakeOver)):
        return None
    if isinstance(decided, TakeOver) and not decided.asks:
        return None
    claim = decided.claim
    conflict = yield from Swap(claim.id, read.record.version, claim)
    if conflict is not None:
        return None
    if isinstance(decided, MarkInDoubt):
        return OutcomeKind.IN_DOUBT
    known = yield from Reconcile(claim)
    conflict = yield from write_outcome(claim, known)
    return known.kind if conflict is None else None


def ask_from_ms(current: Record, every_ms: int) -> int:
    """
    When to call the reconcile function about *current*: the more attempts there were, the later.

    This depends on the record alone, so all nodes wait for the same moment, also after a restart.

    Retries of clients are attempts, too, and there may be many in a minute. So no pause is longer
    than twice the time that has passed since the first attempt.
    """
    began_ms = attempt_began_ms(current)
    pause_ms = every_ms << min(current.attempt - 1, DOUBLINGS_MAX)
    return began_ms + min(pause_ms, max(every_ms, 2 * (began_ms - current.created_ms)))


class Resolved(NamedTuple):
    """The decision was written; *record* is the result."""

    record: Record


class Unchanged(NamedTuple):
    """Nothing was written: *record* is the current record, and it is not in doubt."""

    record: Record


def resolve(
    read: Snapshot,
    outcome: Outcome,
    resolution: Resolution,
    *,
    abandoned: bool = False,
    correct: bool = False,
) -> Flow[Resolved | Unchanged]:
    """
    End the operation in doubt that was *read* with *outcome*.

    *abandoned*: see `can_resolve`. *correct*: instead, replace an operator's earlier decision.
    """
    can = can_correct(read.record) if correct else can_resolve(read, abandoned=abandoned)
    if not can:
        return Unchanged(read.record)
    may_run = outcome.kind is not OutcomeKind.COMPLETE
    doubt = _with_resolution(read.record, resolution, may_run=may_run)._replace(state=IN_DOUBT)
    record = ended(doubt, outcome)
    conflict = yield from Swap(record.id, read.record.version, record)
    return Resolved(record) if conflict is None else Unchanged(conflict)


def rerun(
    read: Snapshot,
    resolution: Resolution,
    request: ClaimRequest,
    policy: Policy,
    *,
    abandoned: bool = False,
) -> Flow[Executed | Unchanged]:
    """Execute the operation in doubt that was *read*, as its next attempt."""
    if not can_resolve(read, abandoned=abandoned):
        return Unchanged(read.record)
    current = _with_resolution(read.record, resolution, may_run=True)
    claim = next_attempt(current, request, policy, read.now_ms)
    conflict = yield from Swap(claim.id, read.record.version, claim)
    if conflict is not None:
        return Unchanged(conflict)
    outcome = yield from Execute(claim)
    conflict = yield from write_outcome(claim, outcome)
    if conflict is None or conflict.version == 0:  # gone: its whole retention passed while it ran
        return Executed(claim)
    return Unchanged(conflict)


def can_resolve(read: Snapshot, *, abandoned: bool) -> bool:
    """
    The record that was *read* is in doubt.

    Or its lease has expired, and the operator knows that its process is dead: *abandoned*.
    """
    if read.record.state == RUNNING:
        return abandoned and is_lease_over(read.record, read.now_ms)
    return read.record.state == IN_DOUBT


def can_correct(record: Record) -> bool:
    """An operator has decided how *record* ended, and no attempt has given an answer since."""
    last = progress_of(record).resolutions[-1:]
    return bool(last) and _DECIDED.get(last[0].outcome) == record.state


def _with_resolution(current: Record, resolution: Resolution, *, may_run: bool) -> Record:
    """
    *current* with *resolution* in its progress.

    If the operation *may_run* again, steps that were begun and not finished are removed: the
    operator has decided that they may run.
    """
    progress = progress_of(current).with_resolution(resolution)
    last = progress.resolutions[-RESOLUTIONS_MAX:]
    steps = tuple(step for step in progress.steps if step.value is not None or not may_run)
    return current._replace(progress=encoded(progress._replace(steps=steps, resolutions=last)))
