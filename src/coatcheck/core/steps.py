"""The flows of what a handler does while it runs: steps, notes, reports (L7).

Everything is written into the claim by a swap against the version that was seen. So whoever has
lost its claim learns it here, before it does anything more; and where the heart has renewed the
claim meanwhile, the same is written again on top of that.

A step runs once and its result is remembered. One that may happen at most once, or has a probe, is
written down when it begins; so of what was begun and not finished it is known that only a probe can
tell what became of it, or a person, whatever a later release of the handler says about it. Of any
other nothing is written before its end, and it is simply run again.

A step whose result cannot be kept is done as well: then that is written, and it fails loudly. It is
not begun where there would be no room for so much.

What earlier attempts have left counts at the end, too: see `missing_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.progress import (
    NOT_KEPT,
    PROGRESS_BYTES_MAX,
    STEP_BYTES_MAX,
    Progress,
    Step,
    noted,
    progress_of,
)
from coatcheck.core.record import Record, Swap, is_lease_over, is_same_attempt
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt, StepsChanged, Unreadable

StepProblem: TypeAlias = StepInDoubt | StepsChanged | Unreadable


@dataclass(slots=True)
class Run(Effect["bytes | Misconfigured"]):
    """Run the function of the step *name*; its encoded result, or why there is none."""

    name: str


@dataclass(slots=True)
class Probe(Effect[Outcome]):
    """
    Ask the application what became of the step *name*, in which an attempt has died.

    COMPLETE: it happened, with this result; RELEASE: it did not; IN_DOUBT: it is not known.
    """

    name: str


class StepPlan(NamedTuple):
    """What is asked for: which step, and what may become of it."""

    name: str
    at_most_once: bool = False
    has_probe: bool = False
    now_ms: int = 0
    asked: frozenset[str] = frozenset()  # the steps that this attempt has asked for before
    beside: Callable[[], tuple[str, ...]] = tuple  # the steps that are under way just now


_TAKEN_OVER = "another attempt has taken over; what this one does no longer counts"
_HAS_ENDED = "its answer was given already, so nothing more is noted of it: note before you answer"


def remember(
    claim: Record, change: Callable[[Progress], Progress], *, has_limit: bool = True
) -> Flow[Record]:
    """Write *change* into our *claim*; the claim as it stands then. Raises `ClaimLost`."""
    while True:
        record = noted(claim, change(progress_of(claim)))
        if has_limit:
            _check_room(record)
        lost = yield from Swap(claim.id, claim.version, record)
        if lost is None:
            return record
        if not is_same_attempt(lost, claim):
            raise ClaimLost(_HAS_ENDED if lost.nonce == claim.nonce else _TAKEN_OVER)
        claim = lost


def _check_room(record: Record) -> None:
    assert record.progress is not None
    if len(record.progress) > PROGRESS_BYTES_MAX:
        raise Misconfigured(
            f"the steps and notes of one operation take {len(record.progress)} bytes; "
            f"{PROGRESS_BYTES_MAX} are kept"
        )


def take(claim: Record, plan: StepPlan) -> Flow[tuple[Record, bytes]]:
    """Take the step of *plan* once; the claim afterwards, and the step's encoded result."""
    if is_lease_over(claim, plan.now_ms):  # it was stopped, and somebody may have taken over
        claim = yield from remember(claim, lambda progress: progress)
    progress = progress_of(claim)
    known = progress.step(plan.name)
    if known is None:
        _check_known(progress, plan)
    elif known.value:
        return claim, known.value
    told = (yield from _outcome_of(plan, known)) if known is not None else None
    if told is None:
        claim = yield from _begin(claim, plan)
        told = yield from Run(plan.name)
    done = Step(plan.name, claim.attempt, NOT_KEPT, plan.beside())
    return (yield from _finish(claim, done, told))


def _outcome_of(plan: StepPlan, known: Step) -> Flow[bytes | Misconfigured | None]:
    """What became of a step that is *known*, without a result: that, or None where it may run."""
    if plan.has_probe:
        outcome = yield from _probed(plan.name)
        if outcome.kind is OutcomeKind.COMPLETE:
            return outcome.response or Misconfigured(
                f"the probe of the step {plan.name!r} answered with what is neither JSON nor bytes"
            )
        if outcome.kind is OutcomeKind.RELEASE and known.value is None:
            return None
    if known.value is None:
        raise StepInDoubt(plan.name)
    raise StepInDoubt(plan.name, "it is done, but what it returned could not be kept")


def _probed(name: str) -> Flow[Outcome]:
    try:
        return (yield from Probe(name))
    except ClaimLost:  # it has written something, or tried to; another attempt asks for itself
        raise
    except Exception as error:  # whatever it was, nobody knows what happened
        raise StepInDoubt(name, "its probe has failed") from error


def _begin(claim: Record, plan: StepPlan) -> Flow[Record]:
    """Write down that the step begins, if its outcome matters; there is room for its end."""
    begun = Step(plan.name, claim.attempt)
    if plan.at_most_once or plan.has_probe:
        return (yield from remember(claim, lambda progress: progress.with_step(begun)))
    _check_room(noted(claim, progress_of(claim).with_step(begun)))
    return claim


def _finish(claim: Record, done: Step, told: bytes | Misconfigured) -> Flow[tuple[Record, bytes]]:
    """Write down that the step is *done*, and what it has *told* if that can be kept."""
    try:
        kept = done._replace(value=_kept(done.name, told))
        claim = yield from remember(claim, lambda progress: progress.with_step(kept))
    except Misconfigured:
        # What happened must not happen again because nobody knows what came of it. This little is
        # written whatever the room is: another step may have filled it while this one ran.
        yield from remember(claim, lambda progress: progress.with_step(done), has_limit=False)
        raise
    assert kept.value is not None
    return claim, kept.value


def _kept(name: str, told: bytes | Misconfigured) -> bytes:
    """What is remembered of what a step has *told*."""
    if isinstance(told, Misconfigured):
        raise told
    if len(told) > STEP_BYTES_MAX:
        raise Misconfigured(
            f"the step {name!r} returned {len(told)} bytes; {STEP_BYTES_MAX} are remembered: "
            "keep it where it belongs, and return where that is"
        )
    return told


def _check_known(progress: Progress, plan: StepPlan) -> None:
    """
    Refuse a step that no earlier attempt knew where it should have met one that it did.

    A step that was renamed would otherwise run a second time, under its new name. What was taken
    by whoever handed the work over is not asked for again.
    """
    left = _left(progress, plan.asked)
    was_beside = any(plan.name in step.beside for step in progress.steps)
    if left and not was_beside:
        raise StepsChanged(plan.name, left[0].name)


def missing_steps(claim: Record, asked: Collection[str], *, may_differ: bool) -> StepProblem | None:
    """
    Why an attempt that has *asked* for these steps may not give the final answer of *claim*.

    An earlier attempt died or failed in a step that may not simply run again, and this one has not
    asked what became of it: with a final answer nobody ever would. Or an earlier attempt has
    finished a step that this one does not know of, so that it says "done" of something else;
    unless it *may_differ*, because it refuses, or because a person has said what to run.
    """
    try:
        left = _left(progress_of(claim), asked)
    except Unreadable as error:
        return error
    begun = [step.name for step in left if step.value is None]
    if begun:
        return StepInDoubt(begun[0])
    return StepsChanged(None, left[0].name) if left and not may_differ else None


def _left(progress: Progress, asked: Collection[str]) -> list[Step]:
    """The steps of earlier attempts that nobody has asked for; those handed over are met."""
    met = {*asked, *(progress.handed or ())}
    return [step for step in progress.steps if step.name not in met]
