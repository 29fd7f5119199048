"""The rules of steps, deferred work and operators; see `middle`."""

from __future__ import annotations

import functools
from typing import NamedTuple

from coatcheck.core.flow import run
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Executed,
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
    is_lease_over,
    legal_moves,
)
from coatcheck.core.recovery import Resolved

from .places import Kind
from .rules import Alone, require


class Done(NamedTuple):
    """An effect: of which step, in which generation, by which attempt of which client."""

    name: str
    generation: int
    attempt: int
    number: int


class Past(NamedTuple):
    """What has happened and is no longer in the store."""

    begun: tuple[tuple[int, int, bool], ...] = ()  # (generation, attempt, is it deferred work)
    once: tuple[Done, ...] = ()  # runs of what may happen at most once, without late ones
    asked: tuple[tuple[int, int], ...] = ()  # (generation, up to which attempt it was asked)
    completed: tuple[tuple[int, bytes | None], ...] = ()  # (generation, its answer in the store)
    unkept: tuple[tuple[str, int], ...] = ()  # (step, generation) whose result could not be kept


def answer_of(done: Done) -> bytes:
    """The result of the step whose effect was *done*."""
    return b"%s by %d of %d" % (done.name.encode(), done.attempt, done.number)


def begun(past: Past, claim: Record, *, is_work: bool) -> Past:
    """The attempt of *claim* executes."""
    execution = (claim.created_ms, claim.attempt, is_work)
    require(execution not in past.begun, "an attempt executes at most once")
    return past._replace(begun=tuple(sorted((*past.begun, execution))))


def ran(past: Past, done: Done, current: Record | None, *, nonce: int, is_once: bool) -> Past:
    """The effect *done* happens, while the store has the record *current*."""
    is_unkept = done[:2] in past.unkept
    require(not is_unkept, "no effect is repeated because its result cannot be kept")
    if current is not None and current.nonce == nonce:
        step = _progress(current.progress).step(done.name)
        is_done = step is not None and step.value is not None
        require(not is_done, "a step that is done does not run again")
    is_late = any(
        generation == done.generation and done.attempt <= to for generation, to in past.asked
    )
    if not is_once or is_late:
        return past
    is_first = all(before[:2] != done[:2] for before in past.once)
    require(is_first, "what may happen at most once happens once")
    return past._replace(once=(*past.once, done))


def unkept(past: Past, done: Done) -> Past:
    """The effect *done* has happened, and its result cannot be stored."""
    return past._replace(unkept=(*past.unkept, done[:2]))


def asked(past: Past, claim: Record) -> Past:
    """A process has asked downstream about all attempts up to that of *claim*."""
    return past._replace(asked=tuple(sorted({*past.asked, (claim.created_ms, claim.attempt)})))


def accepted(
    past: Past, change: tuple[Record | None, Record, int], *, nonce: int, is_operator: bool
) -> Past:
    """The attempt *nonce* has replaced a record with another at that time."""
    before, record, now_ms = change
    moves = legal_moves(before, record, now_ms)
    require(moves, "every accepted swap is a legal move")
    if before is not None and before.created_ms == record.created_ms:
        is_decision = is_operator and before.nonce != nonce
        _check_written(before, record, is_decision=is_decision)
        is_dead = is_lease_over(before, now_ms)
        require(
            is_dead or not is_decision, "an operator does not decide about an attempt that lives"
        )
        is_ended = record.state in (COMPLETED, FAILED) and before.nonce != nonce
        require(not is_ended or is_decision, "only its own client or an operator ends an attempt")
        is_taken = moves[0].name == "take over" and before.nonce != nonce
        require(is_dead or not is_taken, "an attempt that lives keeps its claim")
    if record.state == COMPLETED:
        _check_doubts(past, record, is_operator=is_operator)
        return past._replace(completed=(*past.completed, (record.created_ms, record.response)))
    return past


def _check_written(before: Record, record: Record, *, is_decision: bool) -> None:
    was, now = _progress(before.progress), _progress(record.progress)
    is_known = len(now.resolutions) - len(was.resolutions) == is_decision
    require(is_known, "every decision is stored with its author and its reason")
    for step in was.steps:
        later = now.step(step.name)
        if step.value is not None:
            is_kept = later is not None and later.value == step.value
            require(is_kept, "the result of a step stays")
        elif is_decision and record.state != COMPLETED:
            require(later is None, "a step that did not happen may run again")
        else:
            require(later is not None, "a step that was begun stays")


def _check_doubts(past: Past, record: Record, *, is_operator: bool) -> None:
    """An answer does not end a step that an earlier attempt began."""
    is_known = is_operator or (record.created_ms, record.attempt) in past.asked
    steps = _progress(record.progress).steps
    is_left = any(step.value is None and step.attempt < record.attempt for step in steps)
    require(is_known or not is_left, "no doubt vanishes with an answer")


@functools.cache
def _progress(written: bytes | None) -> Progress:
    return progress_of(GONE._replace(progress=written))


def answered(past: Past, answer: object, effects: tuple[Done, ...]) -> Past:
    """A client gets *answer*, while these *effects* have happened."""
    match answer:
        case Replay(record, response):
            generation = record.created_ms
        case Resolved(record) if record.state == COMPLETED:
            generation, response = record.created_ms, record.response or b""
        case _:
            return past
    require((generation, response) in past.completed, "an answer leaves after its record is safe")
    is_true = response in map(answer_of, effects)
    require(is_true, "a client that gets a success gets one that has happened")
    return past


@functools.cache
def check_progress(record: Record | None, now_ms: int, kind: Kind) -> None:
    """If all clients were gone now, a new one would succeed, or the record is in doubt."""
    if record is None:
        return
    now_ms = max(now_ms, record.lease_until_ms)
    fingerprint = record.fingerprint or kind.fingerprint
    alone = Alone(record, now_ms)
    answer = run(lifecycle(ClaimRequest(record.id, fingerprint, now_ms, 9_999), kind.policy), alone)
    is_refused = isinstance(answer, Refuse) and answer.problem.code == "outcome-unknown"
    is_seen = is_refused and (alone.current or GONE).state == IN_DOUBT
    require(
        is_seen or isinstance(answer, (Executed, Replay)),
        "a key is never stuck, unless it is in doubt",
    )
