"""The flows of a person's decision about an operation that nobody else can decide (L6).

An operation in doubt stands until a person has found out what happened: it did, with this answer;
it did not, and may run again; or it shall run again now. Who, when and why is written into the
record with the same swap, so that no decision is without its reason. Whoever decides too late, or
about what is not in doubt, changes nothing and is told what stands.

Where it did not happen, or shall run again, the steps that were begun and not finished are free: a
person has answered the question that they had left.
"""

from __future__ import annotations

from typing import NamedTuple

from coatcheck.core.flow import Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    Snapshot,
    ended,
    next_attempt,
    write_outcome,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import Resolution, encoded, progress_of
from coatcheck.core.record import IN_DOUBT, RUNNING, Record, Swap, is_lease_over

# 20: a record has room for so many, each with its reason; the log has them all.
RESOLUTIONS_MAX = 20


class Resolved(NamedTuple):
    """It is decided: *record* stands now."""

    record: Record


class Stands(NamedTuple):
    """Nothing was changed: *record* stands, and there is nothing to decide about it."""

    record: Record


def resolve(
    seen: Snapshot, outcome: Outcome, resolution: Resolution, *, abandoned: bool = False
) -> Flow[Resolved | Stands]:
    """End the doubt about the record that was *seen*; *abandoned*: see `is_undecided`."""
    if not is_undecided(seen, abandoned=abandoned):
        return Stands(seen.record)
    frees = outcome.kind is not OutcomeKind.COMPLETE
    record = ended(_decided(seen.record, resolution, frees=frees), outcome)
    lost = yield from Swap(record.id, seen.record.version, record)
    return Resolved(record) if lost is None else Stands(lost)


def rerun(
    seen: Snapshot,
    resolution: Resolution,
    request: ClaimRequest,
    policy: Policy,
    *,
    abandoned: bool = False,
) -> Flow[Executed | Stands]:
    """Run again what was *seen* in doubt, as its next attempt."""
    if not is_undecided(seen, abandoned=abandoned):
        return Stands(seen.record)
    standing = _decided(seen.record, resolution, frees=True)
    claim = next_attempt(standing, request, policy, seen.now_ms)
    lost = yield from Swap(claim.id, seen.record.version, claim)
    if lost is not None:
        return Stands(lost)
    outcome = yield from Execute(claim)
    lost = yield from write_outcome(claim, outcome)
    # Gone: its whole retention passed while it ran.
    return Executed(claim) if lost is None or lost.version == 0 else Stands(lost)


def is_undecided(seen: Snapshot, *, abandoned: bool) -> bool:
    """
    A person may decide about the record that was *seen*: it is in doubt.

    Or it is running no more, because its lease is over, and the person knows it as *abandoned*.
    """
    if seen.record.state == RUNNING:
        return abandoned and is_lease_over(seen.record, seen.now_ms)
    return seen.record.state == IN_DOUBT


def _decided(standing: Record, resolution: Resolution, *, frees: bool) -> Record:
    """*standing* with *resolution* written into it; *frees* the steps that were only begun."""
    progress = progress_of(standing).with_resolution(resolution)
    last = progress.resolutions[-RESOLUTIONS_MAX:]
    steps = tuple(step for step in progress.steps if not frees or step.value is not None)
    return standing._replace(progress=encoded(progress._replace(steps=steps, resolutions=last)))
