"""The desk: all that a sync and an async engine have in common, which is all but the waiting.

It makes tickets, knows what can be answered from memory, notices what was written, and tells the
observers. Engines add the words that perform effects.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from coatcheck.core.call import fingerprint_of_call
from coatcheck.core.flow import Effect
from coatcheck.core.key import reference_of
from coatcheck.core.not_awaited import check_function
from coatcheck.core.policy import Policy, changed
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    MARK_BITS,
    RUNNING,
    Record,
    Swap,
    is_same_write,
)
from coatcheck.core.replay import Fate, Response, decode_value, encode_response, encode_value
from coatcheck.core.scope import LABEL_CHARS_MAX, SCOPE_CHARS, label_of, operation_id
from coatcheck.core.serve import (
    Answer,
    Claim,
    Ending,
    Executed,
    Refuse,
    Replay,
    Ticket,
    Watch,
    fate_of_error,
    new_ticket,
    verdict,
)
from coatcheck.engine.bell import Doorbell
from coatcheck.engine.cache import Cache
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.crowd import Crowd
from coatcheck.engine.heart import Heart
from coatcheck.engine.settings import every, observing, secret_of
from coatcheck.engine.sweeping import Archive
from coatcheck.engine.waiting import Line
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.operation import DidNotHappen, Happened, Operation, Unknown
from coatcheck.stores import Store
from coatcheck.stores.contract import bell_of
from coatcheck.stores.fork import renew_after_fork
from coatcheck.telemetry import Decision, Observer, log_decision

logger = logging.getLogger("coatcheck")

T = TypeVar("T")

# About how often each engine sweeps; a sweep looks at an index and takes small batches.
SWEEP_EVERY_S = 60.0


class Desk:
    """What both engines share."""

    def __init__(
        self,
        store: Store,
        policy: Policy | str | None,
        *,
        secret: bytes | str,
        clock: Callable[[], int] | None,
        observers: Sequence[Observer],
        sweep_every_s: float | None,
        archive: Archive | None,
    ) -> None:
        self.policy = policy_of(policy)
        self._together: Policy | None = None
        self.secret = secret_of(secret)
        self.clock = StoreClock(store, clock)
        self.now_ms = self.clock.now_ms
        self._observers = observing(observers)
        self._store = store
        self._sweep_every_s = every("sweep_every_s", sweep_every_s)
        for name, function in (("clock", clock), ("archive", archive)):
            if function is not None:
                check_function(name, function)
        self._archive = archive
        self._bell = bell_of(store)
        # What the heart does beside its own work, at each beat; none of it may take long.
        self.chores: list[Callable[[int], None]] = []
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Make what belongs to one process: a child of a fork has no heart and nobody waiting."""
        self.cache = Cache()
        self._crowd = Crowd()
        self.line = Line()
        # What is claimed here in a transaction that is still open; see `together.py`.
        self.under_way: dict[bytes, Record] = {}
        # Counted from a random place, so that no two attempts anywhere share one. The place is
        # from the system's source, never from `random`: an application that seeds that one the
        # same way in two processes must not make their attempts look like one.
        first = int.from_bytes(os.urandom(8), "big") >> MARK_BITS + 2
        self._nonces = itertools.count(first << MARK_BITS, 1 << MARK_BITS)
        self.heart = Heart(
            self._store,
            self.clock,
            sweep_every_s=self._sweep_every_s,
            archive=self._archive,
            line=self.line,
            tell=functools.partial(_remember, self.cache, self.line),
            chores=self.chores,
        )
        self.doorbell = Doorbell(self._bell, self.line, (self.heart.held, self.under_way))
        weakref.finalize(self, self.doorbell.end)  # an engine that is forgotten ends its thread

    def close(self) -> None:
        """End the threads."""
        self.heart.stop()
        self.doorbell.close()

    def ticket(
        self, id: bytes, fingerprint: bytes, *, key: str, caller: str, route: str, mark: int
    ) -> Ticket:
        """
        A request at the counter, now; *id* is its `operation_id`.

        *mark* is that of the policy by which it is recovered.
        """
        nonce, scope = next(self._nonces) | mark, caller[:SCOPE_CHARS]
        label = route if len(route) <= LABEL_CHARS_MAX else label_of(route)
        return new_ticket((id, fingerprint, self.now_ms(), nonce, label, scope, key))

    def ticket_of_call(
        self,
        key: str,
        scope: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        policy: Policy,
    ) -> Ticket:
        """The ticket of a guarded function's call with *arguments*."""
        if not 1 <= len(key) <= policy.key_chars_max:
            reason = f"a key has 1 to {policy.key_chars_max} characters, this has {len(key)}"
            raise problem("key-invalid", reason=reason).error()
        id = operation_id(caller="", route=scope, key=key, secret=self.secret)
        fingerprint = fingerprint_of_call(*arguments)
        return self.ticket(id, fingerprint, key=key, caller="", route=scope, mark=policy.mark)

    def together(self, policy: Policy | None) -> Policy:
        """*policy*, else the default one, in transaction mode."""
        if policy is None:
            self._together = self._together or changed(self.policy, {"mode": "transaction"})
            return self._together
        return changed(policy, {"mode": "transaction"}) if policy.mode == "record" else policy

    def recall(self, ticket: Ticket, policy: Policy) -> Replay | Refuse | None:
        """The answer to *ticket*, if memory holds it: the replay of a completed record."""
        record = self.cache.get(ticket.id)
        # After the window another engine may have begun a new life: only the store knows.
        if record is None or record.window_until_ms <= ticket.now_ms:
            return None
        decided = verdict(record, ticket, policy, ticket.now_ms)
        return decided if isinstance(decided, (Replay, Refuse)) else None

    def ended_since(self, watch: Watch) -> Record | None:
        """What is waited for, if it ended here before whoever waits stood in line."""
        record = self.cache.get(watch.id)
        return record if record is not None and record.version > watch.version else None

    def may_claim(self, ticket: Ticket, policy: Policy) -> bool:
        """The caller may use this key, of as many as *policy* allows it."""
        keys_max, now_ms = policy.live_keys_max, ticket.now_ms
        return keys_max is None or self._crowd.admits(
            *(ticket.scope, ticket.id),
            now_ms=now_ms,
            ends_ms=now_ms + policy.window_ms,
            keys_max=keys_max,
        )

    def noticed(self, swap: Swap, lost: Record | None) -> Record | None:
        """
        *lost*, unless it is our own record: then the swap took effect, but nobody heard of it.

        Of what we have written a final answer is remembered, and who waits for it is woken.
        """
        record = swap.record
        if record is None:
            return lost
        if lost is not None and not is_same_write(lost, record):
            # Of our own attempt it is to be known how it stands; of another's, whether it lives.
            return lost if lost.nonce == record.nonce else self.standing(lost)
        if record.state != RUNNING:
            if record.response is not None:
                self.cache.put(record)
            self.line.tell(record)
        else:
            if self.doorbell.is_idle:  # what is executed here may be waited for elsewhere
                self.doorbell.listen()
            if 0 < swap.expected < record.created_ms:
                logger.warning("late retry: %s began a new life", reference_of(record.id))
        return None

    def standing(self, record: Record) -> Record:
        """
        *record* as it stands in this process: what lives here is held, whatever its lease says.

        The store may have been away for longer than a lease; and somebody may have parked it, who
        saw that run out. But its executor is here, or its end, which is only still to be written.
        """
        held = self.heart.held.get(record.id)
        if held is None or held.claim.nonce != record.nonce or held.is_stopped():
            return record
        if held.end is not None:
            self.heart.wake()  # the store has just answered, so it may take the end
        if record.state in (COMPLETED, FAILED):
            return record
        # Beyond all that its lease may be compared with: whoever asks may have come before our
        # clock was last set right, in either direction.
        end_ms = max(record.window_until_ms, record.lease_until_ms, self.now_ms())
        return record._replace(state=RUNNING, lease_until_ms=end_ms + held.lease_ms)

    def give_up(self, effect: Effect[Any], failure: Exception) -> None:
        """*effect* has failed for good; the end of an execution is left to the heart."""
        if isinstance(failure, StoreUnavailable):
            _leave_end(self.heart, effect)

    def interrupt(self, effect: Effect[Any] | None, interruption: BaseException) -> None:
        """
        Whoever performs *effect* is cancelled, or ends.

        What it has executed stays executed, and what it has not, others may.
        """
        if isinstance(interruption, Exception):
            return
        if isinstance(effect, Claim):
            self.heart.give_back(effect)
        else:
            _leave_end(self.heart, effect)

    def tell(self, ticket: Ticket, answer: Answer | None) -> None:
        """Tell the observers what became of *ticket*; None: its handler failed."""
        level = logging.WARNING if isinstance(answer, Refuse) else logging.INFO
        if self._observers or logger.isEnabledFor(level):
            self._publish(_decision(ticket, answer, self.now_ms()))

    def tell_refusal(self, refusal: Problem, label: str) -> None:
        """Tell the observers of a request that was refused before it had a ticket."""
        self._publish(Decision("refused", refusal.reference or "", label, "", 0, refusal.code, 0))

    def _publish(self, decision: Decision) -> None:
        log_decision(decision)
        for observer in self._observers:
            try:
                observer(decision)
            except Exception:  # the work is done, and must not look undone because of this
                logger.exception("an observer failed")

    def tell_failure(self, ticket: Ticket, error: Exception) -> None:
        """Tell the observers that a transaction came to nothing."""
        if isinstance(error, StoreUnavailable):
            self.tell_outage(ticket, error)
        else:
            self.tell(ticket, None)

    def tell_outage(self, ticket: Ticket, error: StoreUnavailable) -> None:
        """Tell the observers that the store did not answer."""
        refusal = problem("store-unavailable", key=ticket.key, id=ticket.id, reason=str(error))
        self.tell(ticket, Refuse(refusal))

    def result_of(
        self, ticket: Ticket, answer: Answer, response: bytes | None, result: object
    ) -> Any:  # noqa: ANN401 - what the user's function returned
        """
        What the caller of a guarded function gets; *response* keeps what its own call returned.

        Decoded from the stored bytes even the first time, so that a retry gets nothing else. Only
        a *result* that could not be kept goes to its first caller as it is.
        """
        self.tell(ticket, answer)
        if isinstance(answer, Refuse):
            raise answer.problem.error()
        if isinstance(answer, Replay):
            response = answer.response
        return result if response is None else decode_value(response)


def _leave_end(heart: Heart, effect: Effect[Any] | None) -> None:
    """Have *heart* write what *effect* was to write, if that is the end of an execution."""
    if isinstance(effect, Swap):
        record, held = effect.record, heart.held.get(effect.id)
        if record is None or held is None or record.state == RUNNING:
            return
        if held.claim.nonce == record.nonce:  # else it is another visit's, of the same key
            heart.finish(held, effect)


def _remember(cache: Cache, line: Line, record: Record) -> None:
    """An attempt has ended: a final answer is remembered, and who waits for it is woken."""
    if record.response is not None:
        cache.put(record)
    line.tell(record)


def _decision(ticket: Ticket, answer: Answer | None, now_ms: int) -> Decision:
    outcome: Literal["executed", "replayed", "refused", "failed"] = "failed"
    attempt, code = 0, ""
    match answer:
        case Executed(record):
            outcome, attempt = "executed", record.attempt
        case Replay(record):
            outcome, attempt = "replayed", record.attempt
        case Refuse(refusal):
            outcome, code = "refused", refusal.code
        case None:
            pass
    duration_ms = now_ms - ticket.now_ms
    reference = reference_of(ticket.id)
    return Decision(outcome, reference, ticket.label, ticket.scope, attempt, code, duration_ms)


def judged(operation: Operation, ending: Ending, *, status: int = 200) -> Ending:
    """*ending*, unless more is known of it than the handler's answer of this *status* says."""
    if ending.fate is Fate.KEEP:
        doubt = operation.unmet(may_differ=status >= HTTPStatus.BAD_REQUEST)
        if doubt is not None:
            logger.error("an operation is in doubt: %s", doubt)
    if operation.is_in_doubt:
        return Ending(Fate.DOUBT)
    if operation.is_resumable and ending.fate is Fate.DOUBT:
        return Ending(Fate.RELEASE)
    return ending


def ending_of_error(operation: Operation, error: BaseException, policy: Policy) -> Ending:
    """What the *error* of a handler means for its claim."""
    return judged(operation, Ending(fate_of_error(error, policy)))


def ending_of_reconcile(answer: object, *, as_value: bool) -> Ending:
    """What a reconcile function's *answer* means for the claim."""
    match answer:
        case Happened() if as_value:
            return Ending(Fate.KEEP, encode_value(answer.value))
        case Happened():
            headers = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in answer.headers
            ]
            response = Response(answer.status, headers, answer.body)
            return Ending(Fate.KEEP, encode_response(response))
        case DidNotHappen():
            return Ending(Fate.RELEASE)
        case Unknown():
            return Ending(Fate.DOUBT)
        case _:
            kind = type(answer).__name__  # not what it is: often all that a provider has told
            logger.error("reconcile answered a %s, not Happened, DidNotHappen or Unknown", kind)
            return Ending(Fate.DOUBT)


def policy_of(policy: Policy | str | None) -> Policy:
    """A policy, or the preset of that name."""
    if policy is None:
        policy = Policy()
    elif isinstance(policy, str):
        policy = Policy.preset(policy)
    elif not isinstance(policy, Policy):
        raise Misconfigured(f"{policy!r} is no policy; give a Policy, or the name of a preset")
    return policy
