"""Actions of a saga: the functions of its steps and undos are called until their outcome is known.

A function that returns has had its effect. A function that raises an error has had none, except if
the error leaves the outcome unknown (see `unknown_errors`): a time-out, a lost connection, a 503.
An unknown outcome is settled before anything is undone or repeated:

    the service remembers the key     send it again, with the same key
    the step has a probe              ask it
    otherwise                         the saga is blocked, and a person decides

The answer to the last call counts: a service that remembers the key answers a repeated call as it
answered the first one. If the step has a probe, an error of a repeated call is checked with it.

An undo, and a step after the pivot, must succeed: it is retried, and then the saga is blocked.

Before a function is called again, the saga checks that its claim is still its own: while the
process was paused, another one may have taken over, and have undone the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from coatcheck.core.flow import Effect, Flow, Sleep
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.policy import Duration, duration_ms
from coatcheck.core.response import decode_value, encode_value
from coatcheck.core.saga.unknown_errors import UNKNOWN_ERRORS, is_outcome_unknown
from coatcheck.errors import Misconfigured, Uncertain, Unreadable

# 255: what most providers accept as a key.
KEY_CHARS_MAX = 255
# 90 of the 100 characters that the name of a recorded step may have: ":undo" is added.
NAME_CHARS_MAX = 90
# 300 characters of an error: enough to recognise it.
TEXT_CHARS_MAX = 300

LABEL_PREFIX = "saga "
UNDO = ":undo"
# Recorded as steps. The names of a saga's own steps have no colon.
UNDOING = ":undoing"
PIVOT = ":pivot"


def check_name(what: str, name: object) -> str:
    """*name*, if it can be part of a derived key; raises `Misconfigured`."""
    is_name = isinstance(name, str) and 1 <= len(name) <= NAME_CHARS_MAX and ":" not in name
    if not is_name or name == UNDO[1:]:
        raise Misconfigured(
            f"the name of a {what} is {name!r:.120}; it must be a text of 1 to {NAME_CHARS_MAX} "
            f"characters without a colon, and not {UNDO[1:]!r}"
        )
    return str(name)


def derived_key(saga: str, key: str, step: str) -> str:
    """
    The key of one step of a saga: "checkout:42:charge", and "checkout:42:charge:undo" of its undo.

    The names of sagas and steps have no colon, so no two steps have the same key. A key that no
    provider would accept, because it is too long, has a digest in its middle.
    """
    text = f"{saga}:{key}:{step}"
    if len(text) <= KEY_CHARS_MAX:
        return text
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{saga}:{digest}:{step}"


# --- how a step has ended, as its record stores it ----------------------------------------------


class Failure(NamedTuple):
    """A step, or the saga's function outside of its steps, has failed with an error."""

    step: str  # empty: outside of a step
    error: str  # the name of its type
    text: str
    may_have_happened: bool = False  # then its undo runs as well


class Ended(NamedTuple):
    """How a step has ended: with its *result*, as `encode_value` stores it, or its *failure*."""

    at_ms: int
    result: bytes = b""
    failure: Failure | None = None


_RESULT, _FAILURE = b"R", b"F"
_TIME_BYTES = 6


def encode_ended(ended: Ended) -> bytes:
    """*ended* as the value of a recorded step."""
    at = ended.at_ms.to_bytes(_TIME_BYTES, "big")
    if ended.failure is None:
        return _RESULT + at + ended.result
    return _FAILURE + at + json.dumps(ended.failure).encode()


def decode_ended(value: object) -> Ended:
    """The end in *value*, which `encode_ended` made; raises `Unreadable`."""
    kind = value[:1] if isinstance(value, bytes) else b""
    if not isinstance(value, bytes) or kind not in (_RESULT, _FAILURE):
        raise Unreadable("the stored steps of this operation are not those of a saga")
    at_ms = int.from_bytes(value[1 : 1 + _TIME_BYTES], "big")
    rest = value[1 + _TIME_BYTES :]
    if kind == _RESULT:
        return Ended(at_ms, rest)
    return Ended(at_ms, failure=Failure(*json.loads(rest)))


def decode_step(value: bytes) -> Ended:
    """The same for the bytes in a record."""
    return decode_ended(decode_value(value))


def failure_of(step: str, error: BaseException, *, may_have_happened: bool = False) -> Failure:
    """The failure of *step* by *error*."""
    return Failure(step, type(error).__name__, str(error)[:TEXT_CHARS_MAX], may_have_happened)


# --- calling a function -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a function is called, and how long to pause before each further call."""

    tries: int = 8
    pause: Duration = 0.1
    # The pause doubles up to this. With 8 tries, about 11 seconds pass before a saga is blocked.
    pause_max: Duration = 5.0

    def __post_init__(self) -> None:
        """Refuse what is not a number of tries, or not a duration."""
        tries: object = self.tries
        if not isinstance(tries, int) or isinstance(tries, bool) or not 1 <= tries <= 1_000:
            raise Misconfigured(f"tries is {tries!r}; it must be a number from 1 to 1000")
        for name in ("pause", "pause_max"):
            try:
                duration_ms(getattr(self, name))
            except (ValueError, OverflowError) as error:
                raise Misconfigured(f"{name}: {error}") from error

    def pause_s(self, tries: int) -> float:
        """How long to pause after so many *tries*."""
        pause_ms = duration_ms(self.pause) << min(tries - 1, 20)
        return min(pause_ms, duration_ms(self.pause_max)) / 1_000


class Blocked(Uncertain):
    """The saga cannot continue by itself; the engine then marks it in doubt."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(f"blocked at {step!r}: {why}" if step else f"blocked: {why}")
        self.step = step
        self.why = why

    def __reduce__(self) -> tuple[type[Blocked], tuple[str, str]]:
        return type(self), (self.step, self.why)


class NotStored(Exception):
    """The function has returned, but its result cannot be stored."""


@dataclass(slots=True)
class Act(Effect[bytes]):
    """Call the function of the step; its encoded result. Raises what it raises, or `NotStored`."""


@dataclass(slots=True)
class Confirm(Effect[None]):
    """Check that the claim is still ours; raises `ClaimLost`."""


@dataclass(slots=True)
class Ask(Effect[Outcome]):
    """Call the probe of the step."""


@dataclass(slots=True)
class Now(Effect[int]):
    """Read the store's clock, in milliseconds."""


class ActionPlan(NamedTuple):
    """One step or undo, and what is known of it."""

    name: str
    retry: Retry = Retry()
    retries_errors: bool = False  # also errors that are no unknown outcome
    must_succeed: bool = False
    has_probe: bool = False
    again_until_ms: int = 0  # until then an unknown outcome is sent again; see `Step`
    was_begun: bool = False  # an earlier attempt ended inside it
    unknown_errors: tuple[type[Exception], ...] = UNKNOWN_ERRORS


def act(plan: ActionPlan) -> Flow[Ended]:
    """Call the function of *plan* until its outcome is known; raises `Blocked`."""
    tries, is_unclear = 0, plan.was_begun
    while True:
        if tries:
            yield from Confirm()
        tries += 1
        try:
            result = yield from Act()
        except NotStored as error:
            if plan.must_succeed:
                raise Blocked(plan.name, str(error)) from error
            failure = failure_of(plan.name, error, may_have_happened=True)
            return Ended((yield from Now()), failure=failure)
        except Exception as error:  # noqa: BLE001 - every error means something for the saga
            settled = yield from _after_error(plan, error, tries, is_unclear=is_unclear)
            if isinstance(settled, Ended):
                return settled
            is_unclear = settled
        else:
            return Ended((yield from Now()), result)


def _after_error(
    plan: ActionPlan, error: Exception, tries: int, *, is_unclear: bool
) -> Flow[Ended | bool]:
    """
    How the step has ended that raised *error*; or call its function again: is it unclear by now.

    *is_unclear*: the outcome of an earlier call is not known.
    """
    is_last = tries >= plan.retry.tries
    if is_outcome_unknown(error, plan.unknown_errors, is_repeated=is_unclear):
        now_ms = yield from Now()
        is_unclear = now_ms < plan.again_until_ms and not is_last
        if not is_unclear:
            known = yield from _asked(plan, error, tries)
            if known is not None:
                return known
    elif not plan.must_succeed and not plan.retries_errors:
        is_last = True
    if not is_last:
        yield from Sleep(plan.retry.pause_s(tries))
        return is_unclear
    if plan.must_succeed:
        raise Blocked(plan.name, _tried(error, tries)) from error
    if is_unclear and plan.has_probe:  # an earlier call may have had its effect
        known = yield from _asked(plan, error, tries)
        if known is not None:
            return known
    return Ended((yield from Now()), failure=failure_of(plan.name, error))


def _asked(plan: ActionPlan, error: Exception, tries: int) -> Flow[Ended | None]:
    """What the probe knows of an unknown outcome; None: it did not happen. Raises `Blocked`."""
    if not plan.has_probe:
        raise Blocked(plan.name, f"its outcome is not known: {_tried(error, tries)}") from error
    try:
        outcome = yield from Ask()
    except Exception as problem:
        why = f"its outcome is not known, and its probe raised {type(problem).__name__}"
        raise Blocked(plan.name, why) from problem
    if outcome.kind is OutcomeKind.RELEASE:
        return None
    if outcome.kind is OutcomeKind.IN_DOUBT or not outcome.response:
        why = "its outcome is not known, and its probe does not know it either"
        raise Blocked(plan.name, why) from error
    ended = decode_step(outcome.response)
    return ended._replace(at_ms=(yield from Now()))


def _tried(error: Exception, tries: int) -> str:
    often = "once" if tries == 1 else f"{tries} times"
    raised = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX].rstrip(": ")
    return f"it was called {often} and last raised {raised}"


def encoded_result(result: object, encode: Callable[[Any], object] | None, room: int) -> bytes:
    """*result* as a step stores it; raises `NotStored`."""
    try:
        stored = encode_value(result if encode is None else encode(result))
    except Exception as error:
        raise NotStored(f"its result cannot be stored: {type(error).__name__}") from error
    if stored is None:
        raise NotStored(
            f"its result is a {type(result).__name__}, which is neither JSON nor bytes: annotate "
            "what the function returns"
        )
    if len(stored) > room:
        raise NotStored(
            f"its result has {len(stored)} bytes, and {max(0, room)} can be stored: save it "
            "elsewhere, and return its address"
        )
    return stored
