"""Outcomes: what a response, a result, an error or a reconcile answer means for the claim.

Invariant: what is not known of an answer never makes its work run again. A `keep=` function is
called for whole answers only, and one that raises counts as "keep it"; where a failure leaves the
operation in doubt, so does an answer that is not final.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from coatcheck.core.answers import DidNotHappen, Happened, Unknown
from coatcheck.core.keep import COMPLETE, Outcome, OutcomeKind, outcome_kind_of
from coatcheck.core.lifecycle import ClaimRequest, outcome_kind_of_error
from coatcheck.core.policy import Policy
from coatcheck.core.response import Response, encode_response, encode_value
from coatcheck.core.values import Codec, NotStorable, codec_of
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation

logger = logging.getLogger("coatcheck")

# Logged by the middlewares with the handler's error, because the server does not get to see it.
OUTCOME_UNKNOWN = "coatcheck: operation %s (%s) failed, and its client gets 409 outcome-unknown"


def outcome_of_response(response: Response, policy: Policy) -> Outcome:
    """What the handler's *response* means for its claim."""
    if len(response.body) > policy.response_bytes_max:
        return outcome_of_partial(response, policy)
    try:
        kind = outcome_kind_of(response, policy.keep, reruns=policy.reruns)
    except Exception:
        if not callable(policy.keep):
            raise
        logger.exception(
            "coatcheck: keep= raised; the answer is kept, so that its work does not run again"
        )
        kind = COMPLETE if policy.reruns else _final_or_in_doubt(response)
    if kind is not COMPLETE:
        failure = f"answered with status {response.status}"
        return Outcome(kind, failure=failure, policy=policy.words)
    blob = encode_response(response, with_cookies=policy.replay_cookies)
    return Outcome(COMPLETE, blob, response.status)


def outcome_of_partial(response: Response, policy: Policy) -> Outcome:
    """The same for a response that is too large to keep, or never ends: its status decides."""
    keep = "final" if callable(policy.keep) else policy.keep
    kind = outcome_kind_of(response, keep, reruns=policy.reruns)
    return Outcome(kind, status=response.status)


def outcome_of_accepted(response: Response, policy: Policy) -> Outcome:
    """
    The same for an operation whose client polls for the answer.

    An early refusal (401, 403 …) is kept here: the client would never see it otherwise.
    """
    outcome = outcome_of_response(response, policy)
    if outcome.kind is not OutcomeKind.REJECT:
        return outcome
    is_kept = len(response.body) <= policy.response_bytes_max
    if not is_kept:
        return Outcome(COMPLETE, None, response.status)
    blob = encode_response(response, with_cookies=policy.replay_cookies)
    return Outcome(COMPLETE, blob, response.status)


def _final_or_in_doubt(response: Response) -> OutcomeKind:
    is_final = outcome_kind_of(response, "final", reruns=False) is COMPLETE
    return COMPLETE if is_final else OutcomeKind.IN_DOUBT


def outcome_of_result(
    request: ClaimRequest, result: object, policy: Policy, codec: Codec[Any] | None = None
) -> Outcome:
    """
    What a guarded function's *result* means for its claim.

    A result that cannot be stored completes the operation without one, because its work is done; in
    transaction mode it raises `Misconfigured`, and nothing is committed.
    """
    response = encode_value(result) if codec is None else None
    if response is None:
        try:
            response = stored_result(result, codec)
        except Misconfigured:
            if policy.mode == "transaction":
                raise
            _log_not_kept(request, result, "which cannot be stored")
            return Outcome(COMPLETE)
    if len(response) > policy.response_bytes_max:
        limit = f"over response_bytes_max, which is {policy.response_bytes_max:,}"
        _log_not_kept(request, result, limit)
        return Outcome(COMPLETE)
    return Outcome(COMPLETE, response)


def _log_not_kept(request: ClaimRequest, result: object, why: str) -> None:
    logger.error(
        "coatcheck: %s returned a value of type %s, %s: it is not kept, and a retry raises "
        "ResultUnavailable",
        *(request.label, type(result).__name__, why),
    )


def stored_result(result: object, codec: Codec[Any] | None) -> bytes:
    """*result* as a record stores it; raises `Misconfigured` if it cannot be stored."""
    try:
        stored = encode_value(result if codec is None else codec.encode(result))
        if stored is None:
            raise NotStorable("it is neither JSON nor bytes")
    except Exception as error:  # also what the application's own codec raises
        reason = error if isinstance(error, NotStorable) else type(error).__name__
        raise Misconfigured(
            f"the function returned a value of type {type(result).__name__}, which cannot be "
            f"stored for a retry ({reason}): annotate what the function returns, or give codec="
        ) from error
    return stored


def outcome_of_error(operation: Operation, error: BaseException) -> Outcome:
    """What the *error* of a handler means for its claim."""
    failure = f"raised {type(error).__name__}"  # its text may have what a client has sent
    operation.failure = f"attempt {operation.attempt} {failure}"
    kind = outcome_kind_of_error(error, operation.policy)
    outcome = Outcome(kind, failure=failure, policy=operation.policy.words)
    return with_step_problems(operation, outcome)


def with_step_problems(operation: Operation, outcome: Outcome, *, status: int = 200) -> Outcome:
    """*outcome*; or in doubt, or released, if the operation's steps or its handler decide that."""
    if outcome.kind is COMPLETE:
        problem = operation.check_steps(may_differ=status >= HTTPStatus.BAD_REQUEST)
        if problem is not None:
            operation.failure = str(problem)
    if operation.is_in_doubt:
        return Outcome(OutcomeKind.IN_DOUBT, failure=outcome.failure, policy=outcome.policy)
    if operation.is_resumable and outcome.kind is OutcomeKind.IN_DOUBT:
        return outcome._replace(kind=OutcomeKind.RELEASE)
    return outcome


def outcome_of_reconcile(answer: object, *, as_value: bool) -> Outcome:
    """What a reconcile function's *answer* means for the claim."""
    match answer:
        case Happened() if as_value:
            return Outcome(COMPLETE, _encoded(answer.value))
        case Happened():
            return Outcome(COMPLETE, encode_response(response_of(answer)))
        case DidNotHappen():
            return Outcome(OutcomeKind.RELEASE)
        case Unknown():
            return Outcome(OutcomeKind.IN_DOUBT)
        case _:
            kind = type(answer).__name__  # not its value, which may hold what a provider returned
            logger.error(
                "coatcheck: a reconcile function returned a value of type %s, not Happened, "
                "DidNotHappen or Unknown",
                kind,
            )
            return Outcome(OutcomeKind.IN_DOUBT)


def _encoded(value: object) -> bytes | None:
    """
    The *value* of `Happened`, as a function that is annotated with its type would store it.

    None if it cannot be stored. JSON is taken as it is.
    """
    stored = encode_value(value)
    if stored is not None:
        return stored
    try:
        return stored_result(value, codec_of(type(value)))
    except Misconfigured:
        return None


def response_of(happened: Happened) -> Response:
    """The response that *happened* describes."""
    headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in happened.headers]
    return Response(happened.status, headers, happened.body)


def is_failure(error: BaseException) -> bool:
    """
    *error* is the handler's own failure, and not a cancellation from outside.

    A handler that awaits a cancelled task gets the same exception as one that is cancelled itself.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # not on an event loop
            return False
        return task is not None and not task.cancelling()
    return isinstance(error, Exception)
