"""The engine for async code: any function, guarded.

Differs from `engine/sync.py` in the words that wait, and in nothing else.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from coatcheck.core.flow import Flow
from coatcheck.core.not_awaited import check_function
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.replay import Response
from coatcheck.core.serve import Answer, Execute, Executed, Refuse, Replay, Seen, Ticket
from coatcheck.engine.desk import ending_of_error, policy_of
from coatcheck.engine.driver_async import AsyncDriver
from coatcheck.engine.functions import (
    arguments_of,
    checked,
    ending_of_result,
    has_run,
    is_failure,
    key_of_call,
    name_of,
)
from coatcheck.engine.held import Held
from coatcheck.engine.resolving import Case, id_among, query_of
from coatcheck.engine.resuming import Work
from coatcheck.engine.together import Lender
from coatcheck.engine.transaction_async import AsyncTransaction
from coatcheck.errors import ClaimLost, StoreUnavailable
from coatcheck.operation import DidNotHappen, Happened, Operation, enter, leave

P = ParamSpec("P")
T = TypeVar("T")


class AsyncEngine(AsyncDriver):
    """
    Guards functions and, through the adapters, requests: each key executes once.

    The arguments are those of `Engine`. One engine may be used from several event loops.
    """

    async def run(
        self,
        key: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        scope: str = "",
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> T:
        """Await *function* once for *key* within *scope*; see `Engine.run`."""
        call = functools.partial(function, *args, **kwargs)
        label = scope or name_of(function)
        self.reconciler.know_function(label, policy or self.desk.policy)
        return await self._run(key, label, call, policy)

    def guard(
        self, *, key: Callable[..., object], scope: str = "", policy: Policy | None = None
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """Make every call of a function a guarded one; *key* takes the same arguments (K4)."""
        check_function("key", key)

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            label = scope or name_of(function)
            self.reconciler.know_function(label, policy or self.desk.policy)

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
                call = functools.partial(function, *args, **kwargs)
                return await self._run(key(*args, **kwargs), label, call, policy)

            return guarded

        return decorate

    async def _run(
        self,
        key: object,
        label: str,
        call: functools.partial[Awaitable[T]],
        policy: Policy | None,
        lender: Lender | None = None,
    ) -> T:
        if not self.is_started:
            await self.start()
        desk = self.desk
        policy = desk.policy if policy is None else policy_of(policy)
        ticket = desk.ticket_of_call(key_of_call(key), label, arguments_of(call), policy)
        known = desk.recall(ticket, policy)
        if known is not None:
            value: T = desk.result_of(ticket, known, None, None)
            return value
        if policy.mode == "transaction":
            return await self._run_together(ticket, policy, call, lender or self.lender())
        return await self._run_recorded(ticket, policy, call)

    async def _run_recorded(
        self, ticket: Ticket, policy: Policy, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Claim, call and complete."""
        desk, flow, held, is_in_call = self.desk, self.flow(ticket, policy), None, False
        response: bytes | None = None
        result: T | None = None
        try:
            answer = await self.advance(flow, policy)
            if isinstance(answer, Execute):
                loop = asyncio.get_running_loop()
                held, is_in_call = desk.heart.hold(answer.claim, policy.lease_ms, loop), True
                result, standing = await self._execute(flow, held, call, ticket, policy)
                is_in_call = False
                if standing is None:
                    ending = ending_of_result(ticket, result, policy)
                    response = ending.response
                    answer = await self.advance(flow, policy, ending)
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

    async def _execute(
        self,
        flow: Flow[Any],
        held: Held,
        call: Callable[[], Awaitable[T]],
        ticket: Ticket,
        policy: Policy,
        *,
        is_persons: bool = False,
    ) -> tuple[T | None, Replay | Refuse | None]:
        """What *call* returned; or, where another attempt has taken over, the answer to that."""
        operation = self.operation(held)
        entered = enter(operation)
        try:
            made: Any = call()
            # A plain function has had its effect by now, and its result is as good as any.
            result: T = await made if hasattr(type(made), "__await__") else made
            return checked(operation, result, is_persons=is_persons), None
        except (Exception, asyncio.CancelledError) as error:
            if not is_failure(error):
                raise
            is_lost, standing = isinstance(error, ClaimLost), None
            if not is_lost:
                self.desk.tell(ticket, None)
            with suppress(StoreUnavailable):  # the handler's own error matters more
                ending = ending_of_error(operation, error, policy)
                standing = await self.advance(flow, policy, ending)
            if is_lost and isinstance(standing, (Replay, Refuse)):
                return None, standing
            if is_lost:
                self.desk.tell(ticket, None)
            raise
        finally:
            leave(entered)

    # --- in doubt -----------------------------------------------------------------------------

    async def resolve(
        self,
        reference: str | bytes,
        outcome: Happened | DidNotHappen,
        *,
        by: str,
        why: str,
        abandoned: bool = False,
    ) -> Record:
        """End the doubt about an operation, as a person has found out; see `Engine.resolve`."""
        case = Case(self.desk, await self._seen(reference), by=by, why=why, abandoned=abandoned)
        return case.resolved(await self.advance(case.resolve(outcome), case.policy))

    async def rerun(
        self,
        reference: str | bytes,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        by: str,
        why: str,
        abandoned: bool = False,
        **kwargs: Any,
    ) -> T:
        """Run an operation in doubt again, now; see `Engine.rerun`."""
        call = functools.partial(function, *args, **kwargs)
        case = Case(self.desk, await self._seen(reference), by=by, why=why, abandoned=abandoned)
        flow, policy = case.rerun(), case.policy
        claim = case.claimed(await self.advance(flow, policy))
        held = self.desk.heart.hold(claim, policy.lease_ms, asyncio.get_running_loop())
        try:
            result, _ = await self._execute(flow, held, call, case.ticket, policy, is_persons=True)
            ending = case.ending_of(result)
            answer = await self.advance(flow, policy, ending)
        finally:
            self.desk.heart.let_go(held)
        value: T = case.result_of(answer, ending, result)
        return value

    async def _seen(self, reference: str | bytes) -> Seen:
        """The operation that is meant, as it stands."""
        if not self.is_started:
            await self.start()
        if isinstance(reference, str):
            page = await self.store.find(query_of(reference))
            reference = id_among(reference, page.records)
        return await self._look(reference)

    # --- handed over by a request -------------------------------------------------------------

    async def resume(
        self,
        handed: str,
        function: Callable[..., Awaitable[object]],
        /,
        *args: Any,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> Response:
        """Await *function* as the work that was *handed* over; see `Engine.resume`."""
        if not self.is_started:
            await self.start()
        call = functools.partial(function, *args, **kwargs)
        policy = self.desk.policy if policy is None else policy_of(policy)
        work, held = Work(self.desk, handed, policy), None
        flow = work.begin((await self._look(work.id)).record)
        try:
            answer = await self.advance(flow, policy, as_value=False)
            if isinstance(answer, Execute):
                loop = asyncio.get_running_loop()
                held = self.desk.heart.hold(answer.claim, policy.lease_ms, loop)
                result, standing = await self._execute(flow, held, call, work.ticket, policy)
                if standing is None:
                    answer = await self.advance(flow, policy, work.ending_of(result))
                else:
                    answer = standing
        finally:
            if held is not None:
                self.desk.heart.let_go(held)
        return work.served(answer)

    # --- in one transaction -------------------------------------------------------------------

    async def transaction(
        self,
        key: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        connection: object = None,
        scope: str = "",
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> T:
        """Await *function* once for *key*, all in one transaction; see `Engine.transaction`."""
        call = functools.partial(function, *args, **kwargs)
        label, policy = scope or name_of(function), self.desk.together(policy)
        return await self._run(key, label, call, policy, self.lender(connection))

    async def _run_together(
        self, ticket: Ticket, policy: Policy, call: Callable[[], Awaitable[T]], lender: Lender
    ) -> T:
        """Claim, call and commit in one transaction; again, where the policy allows that."""
        desk, retries_left = self.desk, policy.transaction_retries
        while True:
            within, flow = self.within(lender), self.flow(ticket, policy)
            response: bytes | None = None
            result: T | None = None
            try:
                answer = await self.advance(flow, policy, within=within)
                if isinstance(answer, Execute):
                    result = await self._call_within(within, flow, answer.claim, call, policy)
                    ending = ending_of_result(ticket, result, policy)
                    response = ending.response
                    answer = await self.advance(flow, policy, ending, within=within)
            except Exception as error:
                if retries_left and within.has_collided(error):
                    retries_left -= 1
                    continue
                desk.tell_failure(ticket, error)
                raise
            finally:
                await within.abandon()
            assert not isinstance(answer, Execute)
            value: T = desk.result_of(ticket, answer, response, result)
            return value

    async def _call_within(
        self,
        within: AsyncTransaction,
        flow: Flow[Answer],
        claim: Record,
        call: Callable[[], Awaitable[T]],
        policy: Policy,
    ) -> T:
        entered = enter(Operation(claim, self.desk.secret, within))
        try:
            made: Any = call()
            result: T = await made if hasattr(type(made), "__await__") else made
            return has_run(result)
        except Exception as error:
            await self.advance(flow, policy, error=error, within=within)
            raise
        finally:
            leave(entered)
