"""The engine for async code: differs from `engine.py` by the word `await`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import wait
from typing import Any, ParamSpec, Self, TypeVar, cast

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.callables import check_function
from coatcheck.core.fingerprint import fingerprint_of_call
from coatcheck.core.keep import Outcome
from coatcheck.core.lifecycle import ClaimRequest, Executed, Refuse, Replay, Snapshot
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.response import Response
from coatcheck.core.signatures import check_result, codec_of_call, read_call
from coatcheck.core.values import Codec
from coatcheck.engine.attempt import AsyncAttempt
from coatcheck.engine.base import NOT_OBSERVED, EngineBase, policy_in_transaction
from coatcheck.engine.clock import local_ms
from coatcheck.engine.deferred import DeferredWork, defer
from coatcheck.engine.functions import (
    RegisteredFunction,
    fingerprint_given,
    name_of,
    outcome_of_call,
    request_of_call,
    request_with_input,
    stored_input,
    value_of,
)
from coatcheck.engine.recovery import RECOVER_EVERY_S
from coatcheck.engine.resolution import Erased, ResolutionRequest, erase, id_among, query_of
from coatcheck.engine.runner import AsyncRunner, Runner, run_here
from coatcheck.engine.settings import policy_of
from coatcheck.engine.sweeper import SWEEP_EVERY_S, Archive
from coatcheck.engine.transactions import Database, LoopAccess, OperationTransaction, Repeat
from coatcheck.engine.waiters import TaskWaiter
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.keyring import KeyRing
from coatcheck.operation import Operation, enter, leave
from coatcheck.stores import AsyncStore, Store, ThreadedStore, open_async_lazily
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.transaction_statements import TransactionStatements
from coatcheck.telemetry import Listener, Observer
from coatcheck.transactions.pool import AsyncPool
from coatcheck.transactions.sources import ConnectionSource

# How often recovery checks whether the event loop that runs a registered function is alive.
POLL_S = 0.05
# Recovery waits so long for a registered function. Then the function goes on, under its own lease,
# and the other operations are recovered.
RUN_AGAIN_S_MAX = 60.0

P = ParamSpec("P")
T = TypeVar("T")


class AsyncEngine(EngineBase):
    """Guards coroutine functions and ASGI requests; takes the same arguments as `Engine`."""

    def __init__(
        self,
        store: str | AsyncStore = "sqlite:///coatcheck.db",
        policy: Policy | str | None = None,
        *,
        secret: bytes | str = b"",
        clock: Callable[[], int] | None = None,
        observers: Sequence[Observer] = (),
        listeners: Sequence[Listener] = (),
        sweep_every_s: float | None = SWEEP_EVERY_S,
        archive: Archive | None = None,
        recover_every_s: float | None = RECOVER_EVERY_S,
        service: str = "",
        keyring: KeyRing | None = None,
        compress: bool = False,
        transactions: object = None,
    ) -> None:
        if not isinstance(store, str) and not hasattr(store, "blocking"):
            raise Misconfigured(
                f"an AsyncEngine needs an async store, not a {type(store).__name__}: give its URL, "
                "or open_async_store(url), or wrap a blocking one in a ThreadedStore"
            )
        self._check(
            store if isinstance(store, str) else store.blocking,
            policy,
            archive=archive,
            keyring=keyring,
            transactions=transactions,
        )
        self.store = open_async_lazily(store) if isinstance(store, str) else store
        if keyring or compress:  # in a thread, because encrypting takes time
            self.store = ThreadedStore(EncryptedStore(self.store.blocking, keyring))
        self._pool: AsyncPool | None = None
        self._runner = AsyncRunner(self.store.swap, self.store.get)
        blocking = self.store.blocking
        self._set_up(
            blocking,
            secret=secret,
            clock=clock,
            observers=observers,
            listeners=listeners,
            sweep_every_s=sweep_every_s,
            archive=archive,
            recover_every_s=recover_every_s,
            service=service,
            new_waiter=TaskWaiter,
            is_async=True,
            run_steps=run_here(Runner.for_store(blocking), self._runner),
        )

    async def ensure_started(self, policy: Policy | None = None) -> None:
        """
        Read the store's clock and start the recovery; the first request does it by itself.

        *policy*: of that request, which may run although the store is unavailable.
        """
        if self.is_started:
            return
        clock = self.attempts.clock
        try:
            if clock.is_due():
                asked_ms = local_ms()
                clock.set(asked_ms, await self.store.now_ms())
        except StoreUnavailable:
            if policy is None or policy.on_outage != "execute":
                raise
            clock.guess()
        else:
            self.recovery.start(asyncio.get_running_loop())
            self.is_started = True

    async def close(self) -> None:
        """End the threads and close the store."""
        await asyncio.to_thread(self._close_threads)
        if self._pool is not None:
            await self._pool.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the seam -------------------------------------------------------------------------------

    async def begin(
        self,
        request: ClaimRequest,
        policy: Policy,
        database: Database | None = None,
        repeats: int = 0,
    ) -> Operation | Replay | Refuse:
        """
        Claim *request*: the operation to execute, or the answer that it has already.

        *database*: for transaction mode, if not the engine's own. *repeats*: how often the database
        had the handler run again before (`Repeat.repeats`).
        """
        if policy.mode == "record":
            started = await self._runner.run(self.attempts.begin(request, policy))
        elif policy.mode == "observe":
            raise Misconfigured(NOT_OBSERVED)
        else:
            database = database or self.database()
            transaction = OperationTransaction(self.attempts, database, LoopAccess())
            started = await self._runner.run(self.attempts.begin(request, policy, transaction))
            if isinstance(started, Operation):
                started.repeats = repeats
        return cast("Operation | Replay | Refuse", started)

    async def complete(
        self, operation: Operation, outcome: Outcome, *, status: int = 200
    ) -> Executed | Replay | Refuse:
        """End *operation* with *outcome*; the answer that its client gets."""
        answer = await self._runner.run(self.attempts.complete(operation, outcome, status=status))
        return cast("Executed | Replay | Refuse", answer)

    async def fail(self, operation: Operation, error: BaseException) -> Replay | Refuse | None:
        """End *operation*, whose handler raised; the answer to give instead of the error."""
        return await self._runner.run(self.attempts.fail(operation, error))

    async def defer(self, operation: Operation, lease_ms: int) -> str:
        """Leave the work of *operation* to a worker; the token that names it."""
        return await self._runner.run(defer(self.attempts, operation, lease_ms))

    def attempt(
        self,
        key: str,
        *,
        scope: str,
        fingerprint: object = None,
        policy: Policy | None = None,
        codec: Codec[Any] | None = None,
    ) -> AsyncAttempt:
        """
        Guard a block of code: `async with engine.attempt(key, scope=…) as attempt`.

        The block awaits `attempt.complete(result)`, unless `attempt.is_replay`; then
        `attempt.result` is what the first attempt completed with. *fingerprint* is what must be
        the same for a retry: any JSON value, or a digest of 16 bytes. *codec*: how the result is
        stored, if it is neither JSON nor bytes: `codec_for(Order)`.
        """
        policy = self.policy if policy is None else policy_of(policy)
        digest = fingerprint_given(fingerprint)
        make = functools.partial(request_of_call, self.attempts, key, scope, digest, policy)
        return AsyncAttempt(self, make, policy, codec)

    # --- guarded functions ----------------------------------------------------------------------

    async def run(
        self,
        key: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        scope: str = "",
        policy: Policy | None = None,
        codec: Codec[T] | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for *key* within *scope*, and return its result to every retry.

        The function's return annotation decides how its result is stored, or *codec* does; without
        both, results are JSON values or bytes. A retry gets what the first call got. Raises the
        refusals of `coatcheck.errors`, and what *function* raises.
        """
        call = functools.partial(function, *args, **kwargs)
        label = scope or name_of(function)
        self.recovery.register_function(label, policy or self.policy)
        return await self._run(key, label, call, policy, codec)

    def guard(
        self,
        *,
        key: Callable[..., object],
        scope: str = "",
        policy: Policy | None = None,
        codec: Codec[Any] | None = None,
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """
        Guard every call of a function; *key* takes the same arguments and returns the key.

        The function's return annotation decides how its results are stored, or *codec* does.
        """
        check_function("key", key)

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            label = scope or name_of(function)
            check_result(function, codec)
            self.recovery.register_function(label, policy or self.policy)

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
                call = functools.partial(function, *args, **kwargs)
                return await self._run(key(*args, **kwargs), label, call, policy, codec)

            return guarded

        return decorate

    async def transaction(
        self,
        key: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        connection: object = None,
        scope: str = "",
        policy: Policy | None = None,
        codec: Codec[T] | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for *key*, with its writes and its record in one transaction.

        They are written on *connection*: a connection or session, or where one comes from (a pool,
        a session maker, a function); without it, on one from the engine's `transactions`. The
        function finds it as `current_operation().connection`.
        """
        await self.ensure_started()
        call = functools.partial(function, *args, **kwargs)
        label = scope or name_of(function)
        policy = policy_in_transaction(self.policy if policy is None else policy)
        return await self._run(key, label, call, policy, codec, database=self.database(connection))

    async def _run(
        self,
        key: object,
        label: str,
        call: functools.partial[Awaitable[T]],
        policy: Policy | None,
        codec: Codec[Any] | None,
        *,
        database: Database | None = None,
    ) -> T:
        policy = self.policy if policy is None else policy_of(policy)
        if not self.is_started:
            await self.ensure_started(policy)
        args, kwargs, codec = read_call(call, codec)
        fingerprint = fingerprint_of_call(args, kwargs)
        request = request_of_call(self.attempts, key, label, fingerprint, policy)
        return await self.run_request(request, policy, call, codec, database)

    async def run_request(
        self,
        request: ClaimRequest,
        policy: Policy,
        call: Callable[[], Awaitable[T]],
        codec: Codec[Any] | None,
        database: Database | None = None,
    ) -> T:
        """
        Run *call* for *request*, or return the value that is stored for it.

        For integrations that make the request themselves: a transaction that the database undid is
        run again. Raises refusals, and what *call* raises.
        """
        repeats = 0
        while True:
            started = await self.begin(request, policy, database, repeats)
            try:
                value: T = (
                    await self._execute(started, call, codec)
                    if isinstance(started, Operation)
                    else value_of(started, codec)
                )
            except Repeat as again:
                repeats = again.repeats
            else:
                return value

    async def _execute(
        self, operation: Operation, call: Callable[[], Awaitable[T]], codec: Codec[Any] | None
    ) -> T:
        entered = enter(operation)
        try:
            result = await _awaited(call())
            outcome = outcome_of_call(operation, result, codec)
        except BaseException as error:
            answer: Any = await self.fail(operation, error)
            if answer is None:
                raise
            value: T = value_of(answer, codec)
            return value
        finally:
            leave(entered)
        value = value_of(await self.complete(operation, outcome), codec, outcome, result)
        return value  # noqa: RET504 - typed above

    # --- functions that the background can run again ---------------------------------------------

    def register(
        self,
        name: str,
        function: Callable[[Any], Awaitable[T]],
        *,
        policy: Policy | None = None,
        also_failed: bool = False,
    ) -> RegisteredFunction[Awaitable[T]]:
        """
        Register *function* under *name*, to be run with a stored input.

        `registered.run(key, input)` stores *input* (JSON or bytes) with the claim. If the process
        dies, the background of any node on which *name* is registered runs it again.
        *also_failed*: also if the function raised, and its claim was released.
        """
        policy = self.policy if policy is None else policy_of(policy)
        check_result(function, None)

        async def run(key: str, given: object, note: object) -> T:
            await self.ensure_started()
            request = request_with_input(self.attempts, key, name, given, policy, note=note)
            call = functools.partial(function, given)
            return await self.run_request(request, policy, call, codec_of_call(call))

        async def run_again(record: Record) -> None:
            given = stored_input(record)
            request = self.attempts.request_for(record)
            call = functools.partial(function, given)
            await self.run_request(request, policy, call, codec_of_call(call))

        again = self._on_loop(run_again)
        self.recovery.register_resumable(name, again, policy, also_failed=also_failed)
        return RegisteredFunction(name, run)

    def _on_loop(
        self, run_again: Callable[[Record], Coroutine[Any, Any, None]]
    ) -> Callable[[Record], None]:
        """*run_again* for the thread of the recovery: on the application's loop, if that runs."""

        def run_and_wait(record: Record) -> None:
            loop = self.recovery.loop
            if loop is None or not loop.is_running():
                asyncio.run(run_again(record))
                return
            future = asyncio.run_coroutine_threadsafe(run_again(record), loop)
            until_s = time.monotonic() + RUN_AGAIN_S_MAX
            while loop.is_running() and time.monotonic() < until_s:
                if wait((future,), POLL_S).done:
                    future.result()
                    return

        return run_and_wait

    # --- operators ------------------------------------------------------------------------------

    async def resolve(
        self,
        reference: str | bytes,
        outcome: Happened | DidNotHappen,
        *,
        by: str,
        why: str,
        abandoned: bool = False,
        correct: bool = False,
    ) -> Record:
        """
        Settle an operation whose outcome is unknown, as an operator found out.

        With `Happened(…)` every retry gets that answer; with `DidNotHappen()` the next one runs.
        *by* and *why* are stored in the record. An operation that is not in doubt is left as it
        is, and `NotResolved` says how it stands; *abandoned*: also one that is not in doubt yet,
        but whose lease has expired, because you know that its executor is dead. *correct*: replace
        an earlier decision of a person; both stay in the record.

        Args:
            reference: as the client saw it, or the record's id.
        """
        request = await self._resolution(reference, by=by, why=why, abandoned=abandoned)
        return await self._runner.run(request.resolve(outcome, correct=correct))

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
        """
        Run an operation in doubt again, now: *function* is its next attempt.

        Its result is what every retry gets: `Happened(status, headers, body)` if the operation is
        a request. If it raises, the operation is in doubt again, unless it raises `Resumable`.
        """
        request = await self._resolution(reference, by=by, why=why, abandoned=abandoned)
        call = functools.partial(function, *args, **kwargs)
        codec = codec_of_call(call) if request.is_of_function else None
        operation = await self._runner.run(request.begin_rerun())
        entered = enter(operation)
        try:
            result = await _awaited(call())
            outcome = request.outcome_of(operation, result, codec)
        except BaseException as error:
            await self.fail(operation, error)
            raise
        finally:
            leave(entered)
        value: T = await self._runner.run(request.finish_rerun(operation, outcome, result, codec))
        return value

    async def erase(self, caller: str, *, dry_run: bool = False) -> Erased:
        """
        Delete everything that is stored for *caller*; *dry_run*: only count it.

        *caller* is what a `caller=` function returned, or the digest that `coatcheck lookup`
        prints. Operations that run are left alone: erase again when they have ended.
        """
        await self.ensure_started()
        return await asyncio.to_thread(
            erase, self.attempts, self._blocking_store(), caller, dry_run=dry_run
        )

    async def _resolution(
        self, reference: str | bytes, *, by: str, why: str, abandoned: bool
    ) -> ResolutionRequest:
        await self.ensure_started()
        if isinstance(reference, str):
            page = await self.store.find(query_of(reference))
            reference = id_among(reference, page.records)
        read: Snapshot = await self._runner.run(self.attempts.read(reference))
        return ResolutionRequest(
            self.attempts, self.policy, read, by=by, why=why, abandoned=abandoned
        )

    # --- deferred work --------------------------------------------------------------------------

    async def run_deferred(
        self,
        token: str,
        function: Callable[..., Awaitable[object]],
        /,
        *args: Any,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> Response:
        """
        Call *function* for the work that `operation.defer()` left, once however often it is asked.

        What it returns is the response that the request's client gets: `Happened(status, headers,
        body)`, or a JSON value for 200. Later deliveries get that response, too; while another
        worker runs it, they raise `KeyBusy`. If *function* raises, the claim is released, or in
        doubt, as *policy* says.
        """
        await self.ensure_started()
        policy = self.policy if policy is None else policy_of(policy)
        work = DeferredWork(self.attempts, token, policy)
        started: Any = await self._runner.run(work.begin())
        if isinstance(started, Operation):
            started = await self._execute_work(
                work, started, functools.partial(function, *args, **kwargs)
            )
        return work.response_of(started)

    async def _execute_work(
        self, work: DeferredWork, operation: Operation, call: Callable[[], Awaitable[object]]
    ) -> Executed | Replay | Refuse:
        entered = enter(operation)
        try:
            outcome = work.outcome_of(operation, await _awaited(call()))
        except BaseException as error:
            answer = await self.fail(operation, error)
            if answer is None:
                raise
            return answer
        finally:
            leave(entered)
        return await self.complete(operation, outcome, status=work.status)

    # --- connections ----------------------------------------------------------------------------

    def _blocking_store(self) -> Store:
        return self.store.blocking

    def _own_connections(self, statements: TransactionStatements) -> ConnectionSource:
        self._pool = AsyncPool(statements.connect_async) if statements.is_pooled else None
        return ConnectionSource(self._pool or statements.connect_async, is_async=True)


async def _awaited(result: Any) -> Any:  # noqa: ANN401 - what the user's function returned
    """*result*, awaited; a plain function has had its effect, and its result counts as well."""
    return await result if inspect.isawaitable(result) else result
