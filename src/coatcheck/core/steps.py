"""Steps: what a handler writes into its claim while it runs.

Every write is a swap against the version that was read last. So an attempt that has lost its claim
fails here, before it does anything more. If only the lease was renewed in between, the write is
repeated on top of the renewed claim.

A step runs once, and its result is stored. A step that may run at most once, or that has a probe,
is also written when it begins. If an attempt ends inside such a step, only the probe or an operator
can say what happened, whatever a later release of the handler declares. If the service that the
step calls remembers its key, this is written, too: until then the step runs again. Any other step
is written only when it is done, and runs again after a crash.

A step whose result cannot be stored counts as done: this is written, and the step raises. A step
does not begin if the record has no room for that.

`missing_steps` checks at the end of an attempt that it has asked for the steps of earlier attempts.
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
    Call the probe of the step *name*, inside which an earlier attempt ended.

    COMPLETE: it happened, with this result; RELEASE: it did not; IN_DOUBT: it is not known.
    """

    name: str


class StepPlan(NamedTuple):
    """A step that a handler asks for."""

    name: str
    at_most_once: bool = False
    has_probe: bool = False
    now_ms: int = 0
    asked: frozenset[str] = frozenset()  # the steps that this attempt has asked for before
    beside: Callable[[], tuple[str, ...]] = tuple  # returns the steps that run at the same time
    again_until_ms: int = 0  # see `Step`; the step is then written when it begins
    is_parallel: bool = False  # the steps beside it may still be to come


# What is sent at the end of the time that a service remembers a key may arrive after it: so a step
# does not run again in the last minute of that time, or in its last tenth if that is shorter.
LAST_MS = 60_000
# A time that never comes: the step may always run again.
ALWAYS_MS = 1 << 53


def again_until_ms(now_ms: int, remembered_ms: int) -> int:
    """Until when a step that is first sent now may be sent again; 0: it may not."""
    if remembered_ms >= ALWAYS_MS:
        return ALWAYS_MS
    return now_ms + remembered_ms - min(LAST_MS, remembered_ms // 10) if remembered_ms else 0


_TAKEN_OVER = "another attempt has taken over this operation; stop, its result counts"
_HAS_ENDED = "this operation has its final answer already; write steps and notes before you answer"


def remember(
    claim: Record, change: Callable[[Progress], Progress], *, has_limit: bool = True
) -> Flow[Record]:
    """Apply *change* to the progress of our *claim*; returns the new claim, raises `ClaimLost`."""
    while True:
        record = noted(claim, change(progress_of(claim)))
        if has_limit:
            _check_room(record)
        conflict = yield from Swap(claim.id, claim.version, record)
        if conflict is None:
            return record
        if not is_same_attempt(conflict, claim):
            raise ClaimLost(_HAS_ENDED if conflict.nonce == claim.nonce else _TAKEN_OVER)
        claim = conflict


def _check_room(record: Record) -> None:
    assert record.progress is not None
    if len(record.progress) > PROGRESS_BYTES_MAX:
        raise Misconfigured(
            f"the steps and notes of one operation would take {len(record.progress)} bytes; "
            f"{PROGRESS_BYTES_MAX} can be stored"
        )


def take(claim: Record, plan: StepPlan) -> Flow[tuple[Record, bytes]]:
    """Run the step of *plan* once; returns the new claim and the encoded result."""
    if is_lease_over(claim, plan.now_ms):  # the process was paused: check that the claim is ours
        claim = yield from remember(claim, lambda progress: progress)
    progress = progress_of(claim)
    known = progress.step(plan.name)
    if known is None:
        _check_known(progress, plan)
    elif known.value:
        return claim, known.value
    result = (yield from _known_result(plan, known)) if known is not None else None
    if result is None:
        claim = yield from _begin(claim, plan, known)
        result = yield from Run(plan.name)
    done = Step(plan.name, claim.attempt, NOT_KEPT, plan.beside())
    return (yield from _finish(claim, done, result))


def _known_result(plan: StepPlan, known: Step) -> Flow[bytes | Misconfigured | None]:
    """
    The result of a step that an earlier attempt began, from its probe; None if it may run.

    Raises `StepInDoubt` if the probe does not know, or if there is none.
    """
    if known.value is None and plan.now_ms < known.again_until_ms:
        return None
    if plan.has_probe:
        outcome = yield from _probed(plan.name)
        if outcome.kind is OutcomeKind.COMPLETE:
            return outcome.response or Misconfigured(
                f"the probe of the step {plan.name!r} returned a value that is neither JSON nor "
                "bytes, so it cannot be stored"
            )
        if outcome.kind is OutcomeKind.RELEASE and known.value is None:
            return None
    if known.value is None:
        raise StepInDoubt(plan.name)
    raise StepInDoubt(plan.name, "it is done, but its result could not be stored")


def _probed(name: str) -> Flow[Outcome]:
    try:
        return (yield from Probe(name))
    except ClaimLost:  # the probe tried to write; the attempt that took over calls it again
        raise
    except Exception as error:
        raise StepInDoubt(name, "its probe raised an error") from error


def _begin(claim: Record, plan: StepPlan, known: Step | None) -> Flow[Record]:
    """Write that the step begins, if it may not simply run again; check the room for its end."""
    # The time counts from the first call: later ones do not make the service remember it longer.
    until_ms = plan.again_until_ms if known is None else known.again_until_ms
    begun = Step(plan.name, claim.attempt, again_until_ms=until_ms)
    if plan.at_most_once or plan.has_probe or until_ms:
        return (yield from remember(claim, lambda progress: progress.with_step(begun)))
    _check_room(noted(claim, progress_of(claim).with_step(begun)))
    return claim


def _finish(claim: Record, done: Step, result: bytes | Misconfigured) -> Flow[tuple[Record, bytes]]:
    """Write that the step is *done*, with its *result* if that can be stored."""
    try:
        value = _storable(done.name, result)
        kept = done._replace(value=value)
        claim = yield from remember(claim, lambda progress: progress.with_step(kept))
    except Misconfigured:
        # The step must not run again only because its result is lost. This is written without a
        # limit: another step may have used the room while this one ran.
        yield from remember(claim, lambda progress: progress.with_step(done), has_limit=False)
        raise
    return claim, value


def _storable(name: str, result: bytes | Misconfigured) -> bytes:
    """*result*, if it can be stored."""
    if isinstance(result, Misconfigured):
        raise result
    if len(result) > STEP_BYTES_MAX:
        raise Misconfigured(
            f"the step {name!r} returned {len(result)} bytes; {STEP_BYTES_MAX} can be stored: save "
            "the result elsewhere, and return its address"
        )
    return result


def _check_known(progress: Progress, plan: StepPlan) -> None:
    """
    Raise `StepsChanged` for a new step while steps of an earlier attempt are still to come.

    Otherwise a step that was renamed would run a second time, under its new name.
    """
    if plan.is_parallel:
        return
    left = _left(progress, plan.asked)
    was_beside = any(plan.name in step.beside for step in progress.steps)
    if left and not was_beside:
        raise StepsChanged(plan.name, left[0].name)


def missing_steps(claim: Record, asked: Collection[str], *, may_differ: bool) -> StepProblem | None:
    """
    Why an attempt that has *asked* for these steps may not give the final answer of *claim*.

    `StepInDoubt`: an earlier attempt ended inside a step that may not simply run again, and this
    attempt has not asked for it. `StepsChanged`: an earlier attempt has finished a step that this
    one has not asked for, so the two do not answer the same. *may_differ* allows the latter: the
    attempt refuses the request, or an operator has decided to run it.
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
    """The stored steps that were not *asked* for, except for those of a handler that deferred."""
    known = {*asked, *(progress.handed or ())}
    return [step for step in progress.steps if step.name not in known]
