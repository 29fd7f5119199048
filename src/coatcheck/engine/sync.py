"""The engine for sync code: any function, guarded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from coatcheck.core.flow import Flow
from coatcheck.core.not_awaited import check_function
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.replay import Response
from coatcheck.core.serve import Answer, Execute, Executed, Refuse, Replay, Seen, Ticket
from coatcheck.engine.desk import ending_of_error, policy_of
from coatcheck.engine.driver import Driver
from coatcheck.engine.functions import (
    arguments_of,
    checked,
    ending_of_result,
    has_run,
    key_of_call,
    name_of,
)
from coatcheck.engine.held import Held
from coatcheck.engine.resolving import Case, id_among, query_of
from coatcheck.engine.resuming import Work
from coatcheck.engine.together import Lender
from coatcheck.engine.transaction import Transaction
from coatcheck.errors import ClaimLost, StoreUnavailable
from coatcheck.operation import DidNotHappen, Happened, Operation, enter, leave

P = ParamSpec("P")
T = TypeVar("T")


class Engine(Driver):
    """
    Guards functions and, through the adapters, requests: each key executes once.

    Args:
        store: a URL (`sqlite:///orders.db`) or a store.
        policy: a `Policy`, the name of a preset, or None for the default.
        secret: makes operation ids and derived keys unguessable; the same on every node.
        clock: a function that says what time it is, in whole milliseconds, for tests that do not
            want to wait; without it the store's own clock rules.
        observers: functions that are called with a `Decision` for each guarded request or call,
            for metrics and traces. The log line does not need one.
        sweep_every_s: about how often this engine sweeps; None: never.
        archive: called with expired records before they are deleted; refused on a store that
            forgets by itself.
        recover_every_s: about how often this engine looks for abandoned operations whose policy
            is not "retry", and settles them; None: never.
        keyring: seals what is stored of responses (X1).
        compress: keeps large responses compressed where that saves something; a key ring does so
            in any case.
        transactions: who lends connections for transaction mode (L9): a pool, an engine or a
            session maker, or a function that gives a connection or a context manager for one;
            without it the engine has some of its own, to the store's database.
    """

    def run(
        self,
        key: str,
        function: Callable[..., T],
        /,
        *args: Any,
        scope: str = "",
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for *key* within *scope*, and give its result to every retry.

        Results are JSON values or bytes, and what a retry gets is what the first call got.
        Raises the refusals of `coatcheck.errors`, and what *function* raises.
        """
        call = functools.partial(function, *args, **kwargs)
        label = scope or name_of(function)
        self.reconciler.know_function(label, policy or self.desk.policy)
        return self._run(key, label, call, policy)

    def guard(
        self, *, key: Callable[..., object], scope: str = "", policy: Policy | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Make every call of a function a guarded one; *key* takes the same arguments (K4)."""
        check_function("key", key)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            label = scope or name_of(function)
            self.reconciler.know_function(label, policy or self.desk.policy)

            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
                call = functools.partial(function, *args, **kwargs)
                return self._run(key(*args, **kwargs), label, call, policy)

            return guarded

        return decorate

    def _run(
        self,
        key: object,
        label: str,
        call: functools.partial[T],
        policy: Policy | None,
        lender: Lender | None = None,
    ) -> T:
        if not self.is_started:
            self.start()
        desk = self.desk
        policy = desk.policy if policy is None else policy_of(policy)
        ticket = desk.ticket_of_call(key_of_call(key), label, arguments_of(call), policy)
        known = desk.recall(ticket, policy)
        if known is not None:
            value: T = desk.result_of(ticket, known, None, None)
            return value
        if policy.mode == "transaction":
            return self._run_together(ticket, policy, call, lender or self.lender())
        return self._run_recorded(ticket, policy, call)

    def _run_recorded(self, ticket: Ticket, policy: Policy, call: Callable[[], T]) -> T:
        """Claim, call and complete."""
        desk, flow, held, is_in_call = self.desk, self.flow(ticket, policy), None, False
        response: bytes | None = None
        result: T | None = None
        try:
            answer = self.advance(flow, policy)
            if isinstance(answer, Execute):
                held, is_in_call = desk.heart.hold(answer.claim, policy.lease_ms), True
                result, standing = self._execute(flow, held, call, ticket, policy)
                is_in_call = False
                if standing is None:
                    ending = ending_of_result(ticket, result, policy)
                    response = ending.response
                    answer = self.advance(flow, policy, ending)
                else:
                    answer = standing
        except StoreUnavailable as error:
            if not is_in_call:  # it is our store, and not one of the function's own
                desk.tell_outage(ticket, error)
            if held is None or response is None or policy.unrecorded == "503":
                raise
            answer = Executed(held.claim)  # and the heart will write that down
        finally:  # not before the end is written: who waits here need not look for it
            if held is not None:
                desk.heart.let_go(held)
        assert not isinstance(answer, Execute)
        value: T = desk.result_of(ticket, answer, response, result)
        return value

    def _execute(
        self,
        flow: Flow[Any],
        held: Held,
        call: Callable[[], T],
        ticket: Ticket,
        policy: Policy,
        *,
        is_persons: bool = False,
    ) -> tuple[T | None, Replay | Refuse | None]:
        """What *call* returned; or, where another attempt has taken over, the answer to that."""
        operation = self.operation(held)
        entered = enter(operation)
        try:
            return checked(operation, call(), is_persons=is_persons), None
        except Exception as error:
            is_lost, standing = isinstance(error, ClaimLost), None
            if not is_lost:
                self.desk.tell(ticket, None)
            with suppress(StoreUnavailable):  # the handler's own error matters more
                ending = ending_of_error(operation, error, policy)
                standing = self.advance(flow, policy, ending)
            if is_lost and isinstance(standing, (Replay, Refuse)):
                return None, standing
            if is_lost:
                self.desk.tell(ticket, None)
            raise
        finally:
            leave(entered)

    # --- in doubt -----------------------------------------------------------------------------

    def resolve(
        self,
        reference: str | bytes,
        outcome: Happened | DidNotHappen,
        *,
        by: str,
        why: str,
        abandoned: bool = False,
    ) -> Record:
        """
        End the doubt about an operation, as a person has found out: it happened, or it did not.

        With `Happened(…)` every retry gets that answer; with `DidNotHappen()` the next one runs.
        *by* and *why* are kept in the record. What is not in doubt is left as it is, and
        `NotResolved` says what stands; *abandoned*: also what is not parked yet, but whose lease
        is over, because you know that its executor is dead.

        Args:
            reference: as the client saw it, or the record's id.
        """
        case = Case(self.desk, self._seen(reference), by=by, why=why, abandoned=abandoned)
        return case.resolved(self.advance(case.resolve(outcome), case.policy))

    def rerun(
        self,
        reference: str | bytes,
        function: Callable[..., T],
        /,
        *args: Any,
        by: str,
        why: str,
        abandoned: bool = False,
        **kwargs: Any,
    ) -> T:
        """
        Run an operation in doubt again, now: *function* is its next attempt, and its end counts.

        Its result is what every retry gets: `Happened(status, headers, body)` where the operation
        is a request. If it raises, the operation is in doubt again, unless it raises `Resumable`.
        """
        call = functools.partial(function, *args, **kwargs)
        case = Case(self.desk, self._seen(reference), by=by, why=why, abandoned=abandoned)
        flow, policy = case.rerun(), case.policy
        claim = case.claimed(self.advance(flow, policy))
        held = self.desk.heart.hold(claim, policy.lease_ms)
        try:
            result, _ = self._execute(flow, held, call, case.ticket, policy, is_persons=True)
            ending = case.ending_of(result)
            answer = self.advance(flow, policy, ending)
        finally:
            self.desk.heart.let_go(held)
        value: T = case.result_of(answer, ending, result)
        return value

    def _seen(self, reference: str | bytes) -> Seen:
        """The operation that is meant, as it stands."""
        if not self.is_started:
            self.start()
        if isinstance(reference, str):
            page = self.store.find(query_of(reference))
            reference = id_among(reference, page.records)
        return self._look(reference)

    # --- handed over by a request -------------------------------------------------------------

    def resume(
        self,
        handed: str,
        function: Callable[..., object],
        /,
        *args: Any,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> Response:
        """
        Call *function* as the work that was *handed* over, once however often it is delivered.

        What it returns is the response that the request's client gets: `Happened(status, headers,
        body)`, or a JSON value for 200. Whoever comes later gets that response, too; while
        another worker is at it, `KeyBusy`. What *function* raises gives the claim back, or leaves
        it in doubt, as *policy* says.
        """
        if not self.is_started:
            self.start()
        call = functools.partial(function, *args, **kwargs)
        policy = self.desk.policy if policy is None else policy_of(policy)
        work, held = Work(self.desk, handed, policy), None
        flow = work.begin(self._look(work.id).record)
        try:
            answer = self.advance(flow, policy, as_value=False)
            if isinstance(answer, Execute):
                held = self.desk.heart.hold(answer.claim, policy.lease_ms)
                result, standing = self._execute(flow, held, call, work.ticket, policy)
                if standing is None:
                    answer = self.advance(flow, policy, work.ending_of(result))
                else:
                    answer = standing
        finally:
            if held is not None:
                self.desk.heart.let_go(held)
        return work.served(answer)

    # --- in one transaction -------------------------------------------------------------------

    def transaction(
        self,
        key: str,
        function: Callable[..., T],
        /,
        *args: Any,
        connection: object = None,
        scope: str = "",
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for *key*, its writes and its record in one transaction (L9).

        They are written on *connection*: a connection or session, or what lends one (a pool, a
        session maker, a function); without it, on one that the engine was given `transactions`
        for. The function finds it as `current_operation().connection`.
        """
        call = functools.partial(function, *args, **kwargs)
        label, policy = scope or name_of(function), self.desk.together(policy)
        return self._run(key, label, call, policy, self.lender(connection))

    def _run_together(
        self, ticket: Ticket, policy: Policy, call: Callable[[], T], lender: Lender
    ) -> T:
        """Claim, call and commit in one transaction; again, where the policy allows that."""
        desk, retries_left = self.desk, policy.transaction_retries
        while True:
            within, flow = self.within(lender), self.flow(ticket, policy)
            response: bytes | None = None
            result: T | None = None
            try:
                answer = self.advance(flow, policy, within=within)
                if isinstance(answer, Execute):
                    result = self._call_within(within, flow, answer.claim, call, policy)
                    ending = ending_of_result(ticket, result, policy)
                    response = ending.response
                    answer = self.advance(flow, policy, ending, within=within)
            except Exception as error:
                if retries_left and within.has_collided(error):
                    retries_left -= 1
                    continue
                desk.tell_failure(ticket, error)
                raise
            finally:
                within.abandon()
            assert not isinstance(answer, Execute)
            value: T = desk.result_of(ticket, answer, response, result)
            return value

    def _call_within(
        self,
        within: Transaction,
        flow: Flow[Answer],
        claim: Record,
        call: Callable[[], T],
        policy: Policy,
    ) -> T:
        entered = enter(Operation(claim, self.desk.secret, within))
        try:
            return has_run(call())
        except Exception as error:
            self.advance(flow, policy, error=error, within=within)
            raise
        finally:
            leave(entered)
