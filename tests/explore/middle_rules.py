"""The rules of what happens in the middle; see `middle`. They look at what happened, never at why."""

from __future__ import annotations

import functools
from typing import NamedTuple

from coatcheck.core.flow import run
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    Replay,
    lifecycle,
)
from coatcheck.core.progress import Progress, progress_of
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    Record,
    Swap,
    is_lease_over,
    legal_moves,
)
from coatcheck.core.recovery import Resolved

from .places import Kind
from .rules import require

# More than any client alone needs: claim, lose, take over, ask, execute, end.
PROBE_EFFECTS_MAX = 10


class Done(NamedTuple):
    """An effect: of which step, in which life, by which attempt of whom."""

    name: str
    life: int
    attempt: int
    number: int


class Past(NamedTuple):
    """What happened so far and is not in the store any more."""

    begun: tuple[
        tuple[int, int, bool], ...
    ] = ()  # (life, attempt, is it work that was handed over)
    once: tuple[Done, ...] = ()  # runs of what may happen at most once, but for what came too late
    asked: tuple[tuple[int, int], ...] = ()  # (life, up to which attempt somebody has asked)
    completed: tuple[tuple[int, bytes | None], ...] = ()  # (life, its answer in the store)
    unkept: tuple[tuple[str, int], ...] = ()  # (step, life) whose result could not be kept


def answer_of(done: Done) -> bytes:
    """What the step returned whose effect was *done*."""
    return b"%s by %d of %d" % (done.name.encode(), done.attempt, done.number)


def begun(past: Past, claim: Record, *, is_work: bool) -> Past:
    """The attempt of *claim* executes."""
    execution = (claim.created_ms, claim.attempt, is_work)
    require(execution not in past.begun, "an attempt executes at most once")
    return past._replace(begun=tuple(sorted((*past.begun, execution))))


def ran(past: Past, done: Done, standing: Record | None, *, nonce: int, is_once: bool) -> Past:
    """The effect *done* happens, while *standing* is in the store."""
    is_unkept = done[:2] in past.unkept
    require(not is_unkept, "no effect is repeated because its result cannot be kept")
    if standing is not None and standing.nonce == nonce:
        step = _progress(standing.progress).step(done.name)
        is_done = step is not None and step.value is not None
        require(not is_done, "a step that is done does not run again")
    is_late = any(life == done.life and done.attempt <= to for life, to in past.asked)
    if not is_once or is_late:
        return past
    is_first = all(before[:2] != done[:2] for before in past.once)
    require(is_first, "what may happen at most once happens once")
    return past._replace(once=(*past.once, done))


def unkept(past: Past, done: Done) -> Past:
    """The effect *done* has happened, and nobody can write down what came of it."""
    return past._replace(unkept=(*past.unkept, done[:2]))


def asked(past: Past, claim: Record) -> Past:
    """Somebody was told the truth about all attempts up to that of *claim*."""
    return past._replace(asked=tuple(sorted({*past.asked, (claim.created_ms, claim.attempt)})))


def accepted(
    past: Past, change: tuple[Record | None, Record, int], *, nonce: int, is_person: bool
) -> Past:
    """Whoever has *nonce* has put a record in the place of another, at that time."""
    before, record, now_ms = change
    moves = legal_moves(before, record, now_ms)
    require(moves, "every accepted swap is a legal move")
    if before is not None and before.created_ms == record.created_ms:
        is_decision = is_person and before.nonce != nonce
        _check_written(before, record, is_decision=is_decision)
        is_dead = is_lease_over(before, now_ms)
        require(is_dead or not is_decision, "nobody decides about what is alive")
        is_ended = record.state in (COMPLETED, FAILED) and before.nonce != nonce
        require(not is_ended or is_decision, "only its executor ends an attempt, or a person")
        is_taken = moves[0].name == "take over" and before.nonce != nonce
        require(is_dead or not is_taken, "a living executor keeps its claim")
    if record.state == COMPLETED:
        _check_doubts(past, record, is_person=is_person)
        return past._replace(completed=(*past.completed, (record.created_ms, record.response)))
    return past


def _check_written(before: Record, record: Record, *, is_decision: bool) -> None:
    was, now = _progress(before.progress), _progress(record.progress)
    is_told = len(now.resolutions) - len(was.resolutions) == is_decision
    require(is_told, "no decision is without its author and its reason")
    for step in was.steps:
        later = now.step(step.name)
        if step.value is not None:
            is_kept = later is not None and later.value == step.value
            require(is_kept, "what a step has returned stays")
        elif is_decision and record.state != COMPLETED:
            require(later is None, "what a person says did not happen may be taken again")
        else:
            require(later is not None, "what was begun stays")


def _check_doubts(past: Past, record: Record, *, is_person: bool) -> None:
    """What an earlier attempt began is not ended by an answer that knows nothing of it."""
    is_told = is_person or (record.created_ms, record.attempt) in past.asked
    steps = _progress(record.progress).steps
    is_left = any(step.value is None and step.attempt < record.attempt for step in steps)
    require(is_told or not is_left, "no doubt vanishes with an answer")


@functools.cache
def _progress(written: bytes | None) -> Progress:
    return progress_of(GONE._replace(progress=written))


def answered(past: Past, answer: object, effects: tuple[Done, ...]) -> Past:
    """Somebody was told *answer*, while these *effects* have happened."""
    match answer:
        case Replay(record, response):
            life = record.created_ms
        case Resolved(record) if record.state == COMPLETED:
            life, response = record.created_ms, record.response or b""
        case _:
            return past
    require((life, response) in past.completed, "an answer leaves after its record is safe")
    is_true = response in map(answer_of, effects)
    require(is_true, "a success was told, so it has happened")
    return past


@functools.cache
def check_progress(record: Record | None, now_ms: int, kind: Kind) -> None:
    """If everybody vanished now, a new client would get through, or what is in doubt is visible."""
    if record is None:
        return
    now_ms = max(now_ms, record.lease_until_ms)
    fingerprint = record.fingerprint or kind.fingerprint
    alone = _Alone(record)
    answer = run(lifecycle(ClaimRequest(record.id, fingerprint, now_ms, 9_999), kind.policy), alone)
    is_refused = isinstance(answer, Refuse) and answer.problem.code == "outcome-unknown"
    is_seen = is_refused and alone.standing.state == IN_DOUBT
    require(
        is_seen or isinstance(answer, (Executed, Replay)),
        "a key is never stuck, unless it is in doubt where people look",
    )


class _Alone:
    """Performs the effects of a client that nobody disturbs."""

    def __init__(self, standing: Record) -> None:
        self.standing = standing
        self._count = 0

    def __call__(self, effect: object) -> object:
        self._count += 1
        require(self._count <= PROBE_EFFECTS_MAX, "a key is never stuck: a lone client goes round")
        match effect:
            case Swap(_, expected, record):
                if self.standing.version != expected:
                    return self.standing
                self.standing = record or GONE
                return None
            case Execute():
                return Outcome(OutcomeKind.COMPLETE, b"probed")
            case Reconcile():
                return Outcome(OutcomeKind.RELEASE)
        raise AssertionError(effect)
