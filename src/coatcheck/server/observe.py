"""Observe mode: requests run as if they were not guarded, and the log tells what would have been.

The store is used in background threads only, so that neither a slow store nor an outage changes
anything for the request. The records of observe mode have ids of their own: when a route changes to
record mode, they neither replay nor refuse anything. They hold no response.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from coatcheck.core.identity import ID_BYTES, LABEL_CHARS_MAX, label_of, operation_id
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import (
    ClaimRequest,
    first_attempt,
    outcome_kind_of_error,
    without_record,
    write_outcome,
)
from coatcheck.core.observe import Observation, observe
from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import GONE
from coatcheck.core.response import Response
from coatcheck.engine.attempts import LOG_EVERY_S, OUTAGES, Attempts
from coatcheck.engine.outcomes import is_failure, outcome_of_partial
from coatcheck.engine.periodic import AtMostEvery
from coatcheck.engine.runner import Runner
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Lease, Operation
from coatcheck.server.body import body_too_large
from coatcheck.server.guard import RequestGuard
from coatcheck.server.keys import ContentKey
from coatcheck.server.refusals import response_of_refusal
from coatcheck.server.request import Request
from coatcheck.server.routes import is_refused_early
from coatcheck.stores.batching import Batcher
from coatcheck.stores.contract import Store
from coatcheck.stores.fork import renew_after_fork
from coatcheck.telemetry import Decision, DecisionOutcome, Observed

logger = logging.getLogger("coatcheck")

# 4 threads: their calls share batches, so more would not write faster.
THREADS = 4
# Requests that wait for a thread. If the store is too slow for more, they are not observed.
PENDING_MAX = 1_000
# After a failed call the store is left alone for a while: each call may take its whole timeout.
OUTAGE_S = 5.0

_SUFFIX = " (observed)"
UNAVAILABLE = Observation("would_refuse", "store-unavailable")
NOT_OBSERVED = "coatcheck: a request could not be observed"


def unguarded_operation(attempts: Attempts, request: ClaimRequest, policy: Policy) -> Operation:
    """The operation of a handler that runs although nothing guards it."""
    claim = without_record(first_attempt(request, policy, GONE, request.now_ms))
    steps = attempts.unrecorded_steps
    return Operation(claim, policy, attempts.secret, request=request, steps=steps)


def unclaimed_operation(attempts: Attempts, label: str, policy: Policy) -> Operation:
    """The operation of a handler whose request is not claimed; another one for each request."""
    id, fingerprint = os.urandom(ID_BYTES), os.urandom(ID_BYTES)
    request = attempts.new_request(id, fingerprint, key="", caller="", label=label)
    return unguarded_operation(attempts, request, policy)


class ObservedRequest:
    """One observed request; its claim is written while it runs."""

    def __init__(self, request: ClaimRequest, policy: Policy, operation: Operation) -> None:
        self.request = request
        self.policy = policy
        self.operation = operation  # what the handler sees
        self.label = operation.label
        self.status = 0  # of the response, when it has begun
        self.claimed: Future[Observation | None] | None = None  # None: it is not observed
        self.lease: Lease | None = None

    def outcome(self, error: BaseException | None) -> Outcome | None:
        """What the end of the handler means for the claim; None: that is not known."""
        if error is not None or not self.status:
            is_known = error is None or is_failure(error)
            failure = error or RuntimeError()
            return Outcome(outcome_kind_of_error(failure, self.policy)) if is_known else None
        response = Response(self.status, [], b"")
        if is_refused_early(response, self.operation):
            return Outcome(OutcomeKind.REJECT)
        return outcome_of_partial(response, self.policy)


class Observations:
    """Claims the observed requests of one middleware in the background, and reports them."""

    def __init__(self, attempts: Attempts, store: Store, guard: RequestGuard) -> None:
        self.guard = guard
        self.attempts = attempts
        attempts.clock.guess()  # a request is not delayed for the store's own time
        batcher = Batcher(store)
        self._runner = Runner(batcher.swap, batcher.get)
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "coatcheck-observe")
        self._mutex = threading.Lock()
        self._pending = 0
        self._log_outage = AtMostEvery(LOG_EVERY_S)
        self._log_full = AtMostEvery(LOG_EVERY_S)
        self._failure = ""  # of the last call; "": it did not fail
        self._try_again = AtMostEvery(OUTAGE_S)

    # --- in the request ------------------------------------------------------------------------

    def begin(
        self, request: Request, policy: Policy, template: str | None, key: str | None
    ) -> ObservedRequest | None:
        """Claim *request* in the background; None: it is not to be guarded at all."""
        found: str | Problem | None = key
        if found is None:
            found = self.guard.natural_key_of(request, policy)
        if isinstance(found, ContentKey):
            policy = found.policy_of(policy)
            found = self.guard.key_of_content(request, policy, template)
        if found is None:
            return None
        if isinstance(found, Problem):
            self.would_refuse(found, request, template)
            return None
        guarded = self.guard.claim_request(request, policy, found, template)
        room = LABEL_CHARS_MAX - len(_SUFFIX)
        claim = guarded._replace(
            id=operation_id(caller="observe", route=guarded.id.hex(), key=""),
            label=label_of(guarded.label, room) + _SUFFIX,
        )
        operation = unguarded_operation(self.attempts, guarded, policy)
        observed = ObservedRequest(claim, policy, operation)
        with self._mutex:
            is_full = self._pending >= PENDING_MAX
            self._pending += not is_full
        if not is_full:
            observed.claimed = self._threads.submit(self._claim, observed)
        elif self._log_full.is_due():
            logger.warning("coatcheck: requests are not observed, because the store is too slow")
        return observed

    def end(self, observed: ObservedRequest, error: BaseException | None) -> None:
        """Write in the background how *observed* has ended."""
        if observed.claimed is not None:
            outcome = observed.outcome(error)
            took_ms = self.attempts.now_ms() - observed.request.now_ms
            is_failed = error is not None or not observed.status
            self._threads.submit(self._end, observed, outcome, took_ms, is_failed=is_failed)

    def would_refuse(self, refusal: Problem, request: Request, template: str | None) -> None:
        """Report a request that would have been refused before it could be claimed."""
        self._report(
            "would_refuse", "", f"{request.method} {template or request.path}", refusal.code
        )

    def would_refuse_caller(
        self, error: Exception, request: Request, found: tuple[Policy, str | None]
    ) -> None:
        """Report a request that `caller=` would have refused; raises *error* if it is a failure."""
        policy, template = found
        response = response_of_refusal(error, policy)
        if response is None:
            raise error
        refusal = problem("caller-refused", status=response.status)
        self.would_refuse(refusal, request, template)

    # --- in the background -----------------------------------------------------------------------

    def _claim(self, observed: ObservedRequest) -> Observation | None:
        with self._mutex:
            self._pending -= 1
        try:
            found = self._observe(observed)
        except OUTAGES as error:
            self._note_outage(error)
            found = UNAVAILABLE
        except Exception:
            logger.exception(NOT_OBSERVED)
            return None
        if found.claim is None:
            self._report_request(observed, found.outcome, found.code)
        else:
            observed.lease = Lease(found.claim, observed.policy.lease_ms)
            self.attempts.heartbeat.start_renewing(observed.lease)
        return found

    def _observe(self, observed: ObservedRequest) -> Observation:
        self._leave_alone_if_down()
        self.attempts.clock.look()
        found = self._runner.run(observe(observed.request, observed.policy))
        self._failure = ""
        return found

    def _leave_alone_if_down(self) -> None:
        if self._failure and not self._try_again.is_due():
            raise StoreUnavailable(self._failure)

    def _end(
        self, observed: ObservedRequest, outcome: Outcome | None, took_ms: int, *, is_failed: bool
    ) -> None:
        assert observed.claimed is not None
        # Begun before this, so that it never waits for a thread that this one takes.
        found = observed.claimed.result()
        lease = observed.lease
        if found is None or lease is None:
            return
        self.attempts.heartbeat.stop_renewing(lease)
        try:
            if outcome is not None:
                self._leave_alone_if_down()
                self._runner.run(write_outcome(lease.claim, outcome, is_fresh=found.is_fresh))
        except OUTAGES as error:
            self._note_outage(error)
        except Exception:
            logger.exception(NOT_OBSERVED)
        ended: DecisionOutcome = "failed" if is_failed else found.outcome
        attempt = 0 if is_failed else lease.claim.attempt
        self._report_request(observed, ended, attempt=attempt, took_ms=took_ms)

    def _note_outage(self, error: Exception) -> None:
        if not self._failure:
            self._try_again.is_due()  # not for a while
        self._failure = str(error) or type(error).__name__
        if self._log_outage.is_due():
            logger.error(
                "coatcheck: requests are not observed: the store is unavailable: %s", error
            )

    def _report_request(
        self,
        observed: ObservedRequest,
        outcome: DecisionOutcome,
        code: str = "",
        *,
        attempt: int = 0,
        took_ms: int = 0,
    ) -> None:
        self._report(
            *(outcome, reference_of(observed.request.id), observed.label, code),
            scope=observed.request.scope,
            attempt=attempt,
            took_ms=took_ms,
        )

    def _report(
        self,
        outcome: DecisionOutcome,
        reference: str,
        label: str,
        code: str,
        *,
        scope: str = "",
        attempt: int = 0,
        took_ms: int = 0,
    ) -> None:
        telemetry = self.attempts.telemetry
        telemetry.report(Decision(outcome, reference, label, scope, attempt, code, took_ms))
        telemetry.emit(Observed(reference, label, scope, attempt, outcome, code))


def refusal_of_length(length: int | None, policy: Policy) -> Problem | None:
    """The refusal of a body that is longer than the policy allows."""
    return body_too_large(policy) if length is not None and length > policy.body_bytes_max else None


def give_body(
    observations: Observations,
    request: Request,
    found: tuple[Policy, str | None],
    key: str | None,
    *,
    body: bytes | None,
    length: int | None,
) -> bool:
    """Give *request* its body; one that was not read is compared by its length."""
    policy, template = found
    if body is None and key is None:  # its key may be in the body
        return False
    refusal = None if body is None else refusal_of_length(len(body), policy)
    if refusal is not None:
        observations.would_refuse(refusal, request, template)
        return False
    request.body = b"%d bytes" % (length or 0) if body is None else body
    return True
