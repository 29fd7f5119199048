"""Attempts: begin, complete and fail, the seam that every door is built on.

A door builds a `ClaimRequest`, begins it, runs user code if it got an `Operation`, and completes
or fails that. Everything around user code is here and exists once: replays from memory, waiting,
retried writes, outages, step checks, reports of decisions, and releasing a claim that no request
is left to execute. All of it is flows (`core/flow.py`): `Engine` and `AsyncEngine` only run them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from coatcheck.core.flow import Call, Effect, Flow, Sleep
from coatcheck.core.identity import LABEL_CHARS_MAX, SCOPE_CHARS, label_of
from coatcheck.core.keep import Outcome
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import (
    Answer,
    Claim,
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    Replay,
    Snapshot,
    WaitForChange,
    lifecycle,
    new_claim_request,
    verdict,
)
from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    RUNNING,
    Get,
    Record,
    Swap,
    is_same_write,
)
from coatcheck.core.transaction import IN_TRANSACTION, transactional
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.key_quota import KeyQuota
from coatcheck.engine.leases import Heartbeat
from coatcheck.engine.outcomes import (
    is_failure,
    outcome_of_error,
    outcome_of_reconcile,
    with_step_problems,
)
from coatcheck.engine.periodic import AtMostEvery
from coatcheck.engine.reconcile_calls import (
    ReconcileCalls,
    outcome_of_failure,
    reconcile_call,
)
from coatcheck.engine.replay_cache import ReplayCache
from coatcheck.engine.steps import StepWriter, UnrecordedSteps
from coatcheck.engine.transactions import OperationTransaction
from coatcheck.engine.waiters import Waiter, Waiters, has_changed, poll_pauses_s
from coatcheck.engine.write_retry import WriteRetry
from coatcheck.errors import ClaimLost, StoreUnavailable, Unreadable
from coatcheck.operation import Lease, Loop, Operation
from coatcheck.stores.contract import Store
from coatcheck.stores.fork import renew_after_fork
from coatcheck.telemetry import (
    ENDS,
    STILL_UNKNOWN,
    Claimed,
    Decision,
    Telemetry,
    Waited,
    decision_of,
)

logger = logging.getLogger("coatcheck")

T = TypeVar("T")

# The store does not answer, or holds what this process cannot read: then nothing may run.
OUTAGES = (StoreUnavailable, Unreadable)

NOT_RUN = "it is not known whether this request ran before, so it was not run"
NOT_RECORDED = "this request ran, but its outcome could not be recorded"
COMMIT_UNKNOWN = "it is not known whether the work of this request is committed"

# How often an outage is logged while requests run unguarded; each has a decision of its own.
LOG_EVERY_S = 10.0
# 63 bits, because databases have signed integers of 64.
NONCE_BITS = 63


class Attempts:
    """
    The attempts of one engine.

    Args:
        store: for threads; an async engine runs the flows on its own.
        new_waiter: makes what a waiting thread or task waits on.
        is_async: the flows are run on event loops.
        running_loop: the event loop that runs the caller, if there is one.
    """

    steps: StepWriter  # set by the engine, which needs the attempts for it
    unrecorded_steps: UnrecordedSteps  # the same for an operation that has no record

    def __init__(
        self,
        store: Store,
        *,
        secret: bytes,
        clock: StoreClock,
        telemetry: Telemetry,
        new_waiter: Callable[[], Waiter],
        is_async: bool,
        running_loop: Callable[[], Loop | None],
    ) -> None:
        self.secret = secret
        self.clock = clock
        self.now_ms = clock.now_ms
        self.telemetry = telemetry
        self.reconcile_calls = ReconcileCalls()
        # What the heartbeat does beside its own work, at each tick; none of it may take long.
        self.tasks: list[Callable[[int], None]] = []
        self._store = store
        self.new_waiter = new_waiter
        wait = functools.partial(self.reconcile_calls.wait, loop=None)
        self._ask = self.reconcile_calls.answer if is_async else wait
        self._running_loop = running_loop
        # An async engine begins only on event loops: there the library's own function will do.
        self._loop_of_begin = asyncio.get_running_loop if is_async else running_loop
        self._log_unguarded = AtMostEvery(LOG_EVERY_S)
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Make what belongs to one process: a forked child has no heartbeat and no waiters."""
        self.replay_cache = ReplayCache()
        self.waiters = Waiters()
        self.key_quota = KeyQuota()
        # Claims of open transactions of this process; see `transactions.py`.
        self.in_transaction: dict[bytes, Record] = {}
        # Counted from a random number, so that no two attempts anywhere share one. It comes from
        # the operating system, not from `random`, which an application may seed the same way in
        # two processes.
        first = int.from_bytes(os.urandom(8), "big") >> (64 - NONCE_BITS + 1)
        self._nonces = itertools.count(first)
        self.heartbeat = Heartbeat(
            self._store,
            self.clock,
            waiters=self.waiters,
            on_written=functools.partial(
                _written_later, self.replay_cache, self.waiters, self.telemetry
            ),
            tasks=self.tasks,
            telemetry=self.telemetry,
        )

    def new_request(
        self, id: bytes, fingerprint: bytes, *, key: str, caller: str, label: str
    ) -> ClaimRequest:
        """The request of a door, now; *id* is its `operation_id`."""
        if len(label) > LABEL_CHARS_MAX:
            label = label_of(label)
        nonce, scope = next(self._nonces), caller[:SCOPE_CHARS]
        now_ms = self.now_ms()
        return new_claim_request((id, fingerprint, now_ms, nonce, label, scope, key, None, b""))

    def request_for(self, record: Record) -> ClaimRequest:
        """A request for the operation of *record* itself: for operators and the background."""
        return ClaimRequest(
            record.id,
            record.fingerprint,
            self.now_ms(),
            next(self._nonces),
            record.label,
            record.scope,
            record.key,
        )

    # --- the seam -----------------------------------------------------------------------------

    def begin(
        self,
        request: ClaimRequest,
        policy: Policy,
        transaction: OperationTransaction | None = None,
        *,
        flow: Flow[Any] | None = None,
    ) -> Flow[Any]:
        """
        Claim *request*: the operation to execute, or the answer that it has already.

        *transaction*: for a policy in transaction mode. *flow*: runs in place of the lifecycle; it
        may return something else.
        """
        if flow is None:
            if self.replay_cache.knows(request.id):
                known = self.find_replay(request, policy)
                if known is not None:
                    return known
            may_claim = policy.live_keys_max is None or self._is_within_quota(request, policy)
            run = lifecycle if transaction is None else transactional
            flow = run(request, policy, may_claim=may_claim)
        try:
            started = yield from self.advance(flow, policy, transaction)
        except OUTAGES as error:
            logger.error(  # noqa: TRY400 - its trace says nothing more
                "coatcheck: operation %s gets 503: the store is unavailable: %s",
                *(reference_of(request.id), error),
            )
            refusal = problem("store-unavailable", key=request.key, id=request.id, reason=NOT_RUN)
            started = Refuse(refusal, cause=error)
        if type(started) is Execute and not started.claim.version:
            started = self._unguarded(started, request)
        if type(started) is not Execute:
            if isinstance(started, (Executed, Replay, Refuse)):
                self.report(request, started)
            return started
        steps = self.steps if started.claim.version else self.unrecorded_steps
        operation = Operation(
            started.claim,
            policy,
            self.secret,
            request=request,
            flow=flow,
            steps=steps if transaction is None else None,
            transaction=transaction,
            loop=self._loop_of_begin(),
        )
        if transaction is None and started.claim.version:
            self.heartbeat.start_renewing(operation)
        return operation

    def _unguarded(self, execute: Execute, request: ClaimRequest) -> Execute | Refuse:
        """Execute without a claim, as the policy says; refuse what has begun in this process."""
        if request.id in self.heartbeat.leases:  # it runs, or its completion is to be written
            refusal = problem("store-unavailable", key=request.key, id=request.id, reason=NOT_RUN)
            return Refuse(refusal)
        if self._log_unguarded.is_due():
            logger.error("coatcheck: requests run unguarded: the store is unavailable")
        return execute

    def complete(self, operation: Operation, outcome: Outcome, *, status: int = 200) -> Flow[Any]:
        """
        End *operation* with *outcome*; the answer that its client gets.

        *status*: of the response; one that refuses may take other steps than earlier attempts. In
        transaction mode it raises what the commit raised, or `Repeat`: then nothing is committed.
        """
        flow, operation.flow = operation.flow, None
        assert flow is not None  # an operation ends once
        assert operation.request is not None
        operation.is_ending = True
        transaction: Any = operation._transaction  # noqa: SLF001 - the engine's part of it
        if operation.has_notes:
            outcome = with_step_problems(operation, outcome, status=status)
        tracing = self.telemetry.tracing
        if tracing is not None:
            outcome = self.telemetry.traced(tracing, operation.request, outcome, self.now_ms())
        try:
            answer = yield from self.advance(flow, operation.policy, transaction, outcome)
        except OUTAGES as error:
            answer = self._not_recorded(operation, error, transaction)
        except Exception as error:
            if transaction is not None:
                transaction.raise_if_repeatable(error, operation)
            self.report(operation.request, None)
            raise
        else:
            if not isinstance(answer, Executed):
                self.heartbeat.taken_over(operation)
            if operation.has_notes and operation.is_in_doubt:
                key, id = operation.key, operation.claim.id
                answer = Refuse(problem("outcome-unknown", key=key, id=id))
        finally:
            # Only now: waiters of this process rely on it, and do not poll.
            self.heartbeat.stop_renewing(operation)
        if isinstance(answer, (Executed, Replay, Refuse)):
            self.report(operation.request, answer)
        return answer

    def fail(self, operation: Operation, error: BaseException) -> Flow[Replay | Refuse | None]:
        """
        End *operation*, whose handler raised *error*.

        Returns the answer of a newer attempt that has taken over, if there is one: the client gets
        it. None: raise the error. Raises `Repeat` if the database asks for another run.
        """
        flow, operation.flow = operation.flow, None
        if flow is None:  # it has ended already
            return None
        assert operation.request is not None
        operation.is_ending = True
        transaction: Any = operation._transaction  # noqa: SLF001 - the engine's part of it
        answer: Any = None
        try:
            if is_failure(error):
                outcome = outcome_of_error(operation, error)
                answer = yield from self.advance(flow, operation.policy, transaction, outcome)
                if answer is not None and not isinstance(answer, Executed):
                    self.heartbeat.taken_over(operation)
            elif transaction is not None:
                yield from transaction.abandon()
        except OUTAGES:
            pass  # scheduled, or its lease expires; the handler's own error matters more
        finally:
            self.heartbeat.stop_renewing(operation)
        if not is_failure(error):  # cancelled from outside: its lease is left to expire
            return None
        if transaction is not None and isinstance(error, Exception):
            transaction.raise_if_repeatable(error, operation)
        if isinstance(error, ClaimLost) and isinstance(answer, (Replay, Refuse)):
            self.report(operation.request, answer)
            return answer
        self.report(operation.request, None)
        return None

    def _not_recorded(
        self,
        operation: Operation,
        error: Exception,
        transaction: OperationTransaction | None,
    ) -> Executed | Refuse:
        """The answer for a client whose operation ran, but could not be written."""
        logger.error(
            "coatcheck: operation %s ran and is not stored yet: the store is unavailable: %s",
            *(operation.reference, error),
        )
        is_recorded_later = transaction is None and not operation.is_in_doubt
        if is_recorded_later and operation.policy.unrecorded == "answer":
            return Executed(operation.claim)  # and the heartbeat writes it
        reason = NOT_RECORDED if transaction is None else COMMIT_UNKNOWN
        refusal = problem("store-unavailable", id=operation.claim.id, reason=reason)
        return Refuse(refusal, cause=error)

    # --- running the lifecycle ------------------------------------------------------------------

    def advance(
        self,
        flow: Flow[T],
        policy: Policy,
        transaction: OperationTransaction | None = None,
        outcome: Outcome | None = None,
    ) -> Flow[Execute | T]:
        """Run *flow* until it asks for the execution, or to its end."""
        retry: WriteRetry | None = None
        effect: Effect[Any] | None = None
        began_s = 0.0 if outcome is None else time.monotonic()
        try:
            effect = flow.send(outcome)
            while type(effect) is not Execute:
                try:
                    if isinstance(effect, Swap):
                        swap_s = time.perf_counter() if self.telemetry.listeners else None
                        conflict: Record | None = yield effect
                        result: Any = self.after_write(effect, conflict, began_s=swap_s)
                    else:
                        result = yield from self._perform(effect, policy, transaction)
                except Exception as failure:  # noqa: BLE001 - the flow decides what it means
                    if retry is None:
                        limit_s = 0 if outcome is None else policy.patience_ms / 1_000
                        retry = WriteRetry(limit_s, began_s or None)
                    pause_s = retry.pause_s(effect, failure)
                    if pause_s is None:
                        self._schedule(effect, failure)
                        effect = flow.throw(failure)
                    else:
                        yield from Sleep(pause_s)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            answer: T = done.value
            return answer
        except BaseException as interruption:
            self._interrupted(effect, interruption)
            if transaction is not None:  # cancelled during its commit: it must not stay open
                yield from transaction.abandon()
            raise
        return effect

    def _perform(
        self, effect: Effect[Any], policy: Policy, transaction: OperationTransaction | None
    ) -> Flow[Any]:
        """Perform an effect of the lifecycle that is not a plain write."""
        if transaction is not None and isinstance(effect, IN_TRANSACTION):
            return (yield from transaction.perform(effect))
        if isinstance(effect, WaitForChange):
            return (yield from self._wait(effect, policy.waiters_max))
        assert isinstance(effect, Reconcile)
        return (yield from self.reconcile(effect.claim, policy))

    def _wait(self, wait: WaitForChange, waiters_max: int) -> Flow[Snapshot | None]:
        """Wait for another attempt: woken by its completion in this process, else by polling."""
        started_ms = self.now_ms()
        if wait.until_ms <= started_ms:
            return (yield from self.read(wait.id))
        waiter = self.new_waiter()
        if not self.waiters.join(wait.id, waiter.wake, waiters_max):
            return None
        try:
            completed = self._completed_since(wait)
            if completed is not None:
                return Snapshot(completed, self.now_ms())
            for pause_s in self._poll_pauses_s(wait.id):
                left_s = max(0.0, (wait.until_ms - self.now_ms()) / 1_000)
                yield from Call(waiter.wait, (min(pause_s, left_s),))
                if waiter.record is None:
                    current = yield from self.read(wait.id)
                else:
                    current = Snapshot(waiter.record, self.now_ms())
                if waiter.record is not None or has_changed(current, wait):
                    waited_ms = self.now_ms() - started_ms
                    self.telemetry.happened(Waited, current.record, waited_ms)
                    return current
        finally:
            self.waiters.leave(wait.id, waiter.wake)
        raise AssertionError  # the pauses never end

    def _poll_pauses_s(self, id: bytes) -> Iterator[float]:
        for pause_s in poll_pauses_s():
            # A completion in this process wakes its waiters: they need not poll.
            is_here = id in self.heartbeat.leases or id in self.in_transaction
            yield math.inf if is_here else pause_s

    def _completed_since(self, wait: WaitForChange) -> Record | None:
        """The record, if it was completed here just before the waiter joined."""
        record = self.replay_cache.get(wait.id)
        return record if record is not None and record.version > wait.version else None

    def read(self, id: bytes) -> Flow[Snapshot]:
        """The record of *id* as this process should see it."""
        record = yield from Get(id)
        return Snapshot(GONE if record is None else self.current(record), self.now_ms())

    def reconcile(self, claim: Record, policy: Policy) -> Flow[Outcome]:
        """Ask the application what became of the attempt before *claim*."""
        lease = Lease(claim, policy.lease_ms, self._running_loop())
        self.heartbeat.start_renewing(lease)
        try:
            answer = yield from Call(self._ask, (reconcile_call(claim, policy, self.secret),))
            return outcome_of_reconcile(answer, as_value=is_of_function(claim))
        except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is not known
            return outcome_of_failure(error, claim)
        finally:
            self.heartbeat.stop_renewing(lease)

    # --- what this process knows ----------------------------------------------------------------

    def find_replay(self, request: ClaimRequest, policy: Policy) -> Replay | Refuse | None:
        """The answer to *request* from memory, if its completed record is there; it is reported."""
        record = self.replay_cache.get(request.id)
        # After the window another engine may have begun a new generation: only the store knows.
        if record is None or record.window_until_ms <= request.now_ms:
            return None
        decided = verdict(record, request, policy, request.now_ms)
        if not isinstance(decided, (Replay, Refuse)):
            return None
        self.report(request, decided)
        return decided

    def _is_within_quota(self, request: ClaimRequest, policy: Policy) -> bool:
        assert policy.live_keys_max is not None
        return self.key_quota.admits(
            *(request.scope, request.id),
            now_ms=request.now_ms,
            ends_ms=request.now_ms + policy.window_ms,
            keys_max=policy.live_keys_max,
        )

    def after_write(
        self, swap: Swap, conflict: Record | None, *, why: str = "", began_s: float | None = None
    ) -> Record | None:
        """
        Return *conflict*, unless it is our own record: then the write was applied after all.

        A final answer that was written is remembered, and its waiters are woken. *why*: of a doubt.
        *began_s*: when the write began, if that was measured.
        """
        record = swap.record
        if record is None:
            return conflict
        if conflict is not None and not is_same_write(conflict, record):
            # For our own attempt the stored state matters; for another one, whether it lives here.
            return conflict if conflict.nonce == record.nonce else self.current(conflict)
        if record.state != RUNNING:
            self.replay_cache.put(record)
            if self.waiters.waiting:
                self.waiters.wake(record)
            if record.state == IN_DOUBT:
                self.telemetry.became_in_doubt(record, why or self._why_in_doubt(record))
        elif 0 < swap.expected < record.created_ms and record.key != record.fingerprint.hex():
            # A key that is the fingerprint (`keys.by_content`) names a new action after its window.
            logger.warning(
                "coatcheck: late retry: operation %s (%s) runs again, because its window was over",
                *(reference_of(record.id), record.label),
            )
        if self.telemetry.listeners:
            kind = Claimed if isinstance(swap, Claim) else ENDS.get(record.state)
            if kind is not None:
                write_s = None if began_s is None else time.perf_counter() - began_s
                self.telemetry.happened(kind, record, write_s)
        return None

    def _why_in_doubt(self, record: Record) -> str:
        lease = self.heartbeat.leases.get(record.id)
        if isinstance(lease, Operation) and lease.claim.nonce == record.nonce:
            return lease.failure or f"attempt {record.attempt} gave no final answer"
        if record.lease_until_ms > self.now_ms():  # it was claimed only to call the function
            return STILL_UNKNOWN
        return f"attempt {record.attempt} never finished"

    def current(self, record: Record) -> Record:
        """
        The record as this process should see it.

        If we are still executing the operation, treat it as running even when its lease has
        expired in the store, or another process has marked it in doubt because of that. The same
        holds while its completion is still to be written.
        """
        lease = self.heartbeat.leases.get(record.id)
        if lease is None or lease.claim.nonce != record.nonce or lease.is_stopped():
            return record
        if lease.pending is not None:  # the store has just answered, so it may accept that
            self.heartbeat.wake()
        if record.state in (COMPLETED, FAILED):
            return record
        # Later than anything its lease is compared with: a waiting request may have come before
        # our clock was last set, in either direction.
        end_ms = max(record.window_until_ms, record.lease_until_ms, self.now_ms())
        return record._replace(state=RUNNING, lease_until_ms=end_ms + lease.lease_ms)

    def _schedule(self, effect: Effect[Any], failure: Exception) -> None:
        """Leave a completion that the store did not accept to the heartbeat."""
        if isinstance(failure, StoreUnavailable):
            self._schedule_completion(effect)

    def _interrupted(self, effect: Effect[Any] | None, interruption: BaseException) -> None:
        """
        The request that performs *effect* was cancelled, or its thread ends.

        A completion is still written; a claim is released.
        """
        if isinstance(interruption, Exception):
            return
        if isinstance(effect, Claim):
            self.heartbeat.release(effect)
        else:
            self._schedule_completion(effect)

    def _schedule_completion(self, effect: Effect[Any] | None) -> None:
        if isinstance(effect, Swap):
            record, lease = effect.record, self.heartbeat.leases.get(effect.id)
            if record is None or lease is None or record.state == RUNNING:
                return
            if lease.claim.nonce == record.nonce:  # the lease may be of another request by now
                self.heartbeat.schedule_completion(lease, effect)

    # --- reports --------------------------------------------------------------------------------

    def report(self, request: ClaimRequest, answer: Answer | None) -> None:
        """Report what became of *request*; None: its handler failed."""
        is_unguarded = isinstance(answer, Executed) and not answer.record.version
        level = logging.WARNING if is_unguarded else logging.INFO
        if self.telemetry.observers or logger.isEnabledFor(level):
            self.telemetry.report(decision_of(request, answer, self.now_ms()))

    def report_refusal(self, refusal: Problem, label: str) -> None:
        """Report a request that was refused before it could be claimed."""
        decision = Decision("refused", refusal.reference or "", label, "", 0, refusal.code, 0)
        self.telemetry.report(decision)


def _written_later(
    cache: ReplayCache, waiters: Waiters, telemetry: Telemetry, record: Record
) -> None:
    """The heartbeat has written the end of an attempt."""
    cache.put(record)
    waiters.wake(record)
    if record.state == IN_DOUBT:
        telemetry.became_in_doubt(record, f"attempt {record.attempt} gave no final answer")
    telemetry.happened(ENDS[record.state], record)


def is_of_function(record: Record) -> bool:
    """A guarded function made *record*, not an HTTP request: those have a caller."""
    return not record.scope
