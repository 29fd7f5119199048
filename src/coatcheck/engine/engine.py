"""The engine for sync code: `begin`, `complete` and `fail`, and functions guarded with them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
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
from coatcheck.engine.attempt import Attempt
from coatcheck.engine.base import NOT_OBSERVED, EngineBase, policy_in_transaction
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
from coatcheck.engine.runner import Runner
from coatcheck.engine.settings import policy_of
from coatcheck.engine.sweeper import SWEEP_EVERY_S, Archive
from coatcheck.engine.transactions import Database, OperationTransaction, Repeat, ThreadAccess
from coatcheck.engine.waiters import ThreadWaiter
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.keyring import KeyRing
from coatcheck.operation import Operation, enter, leave
from coatcheck.stores import Batcher, Store, open_lazily
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.lazy import LazyStore
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.transaction_statements import TransactionStatements
from coatcheck.telemetry import Listener, Observer
from coatcheck.transactions.pool import Pool
from coatcheck.transactions.sources import ConnectionSource

logger = logging.getLogger("coatcheck")

P = ParamSpec("P")
T = TypeVar("T")


class Engine(EngineBase):
    """
    Guards functions and, through the middlewares, requests: each key executes once.

    Args:
        store: a URL (`sqlite:///orders.db`) or a store.
        policy: a `Policy`, the name of a preset, or None for the default.
        secret: makes operation ids and derived keys unguessable; the same on every node.
        clock: a function that returns the time in whole milliseconds, for tests; without it the
            store's own clock is used.
        observers: functions that are called with a `Decision` for each guarded request or call,
            for metrics and traces. The log line does not need one.
        listeners: functions that are called with an `Event` for each change of a claim.
        sweep_every_s: about how often this engine sweeps; None: never.
        archive: called with expired records before they are deleted; refused on a store that
            deletes by itself.
        recover_every_s: about how often this engine looks for abandoned operations whose policy
            is not "retry", and ends them; None: never.
        service: the name of this service, if several share the store: then the background also
            recovers its requests that have no declared route.
        keyring: encrypts what is stored of responses.
        compress: stores large responses compressed if that saves space; a key ring does so in any
            case.
        transactions: where connections for transaction mode come from: a pool, an engine or a
            session maker, or a function that returns a connection or a context manager for one;
            without it the engine opens some of its own, to the store's database.
    """

    def __init__(
        self,
        store: str | Store = "sqlite:///coatcheck.db",
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
        if not isinstance(store, str) and (
            hasattr(store, "blocking") or not hasattr(store, "swap")
        ):
            raise Misconfigured(
                f"an Engine needs a blocking store, not a {type(store).__name__}: give its URL, or "
                "open_store(url); an AsyncEngine takes the others"
            )
        self._check(store, policy, archive=archive, keyring=keyring, transactions=transactions)
        opened = open_lazily(store) if isinstance(store, str) else store
        self._must_be_checked = isinstance(opened, LazyStore) and opened.must_be_checked
        self.store = EncryptedStore(opened, keyring) if keyring or compress else opened
        self._pool: Pool | None = None
        if isinstance(self.store, MemoryStore):  # no call waits, so there is nothing to group
            self._runner = Runner.for_store(self.store)
        else:
            batcher = Batcher(self.store)
            self._runner = Runner(batcher.swap, batcher.get)
        self._set_up(
            self.store,
            secret=secret,
            clock=clock,
            observers=observers,
            listeners=listeners,
            sweep_every_s=sweep_every_s,
            archive=archive,
            recover_every_s=recover_every_s,
            service=service,
            new_waiter=ThreadWaiter,
            is_async=False,
            run_steps=self._runner.run,
        )

    def check_store(self) -> None:
        """
        Raise `Misconfigured` if only the store itself can tell that it must not be used.

        That is a Redis server that could lose records, and a schema that is missing and may not be
        created. Other stores are not opened, and an unreachable one is tried again later.
        """
        if self._must_be_checked:
            try:
                self.store.now_ms()
            except StoreUnavailable as error:
                logger.warning(
                    "coatcheck: the store is unavailable, so it is checked later: %s", error
                )

    def ensure_started(self, policy: Policy | None = None) -> None:
        """
        Read the store's clock and start the recovery; the first request does it by itself.

        *policy*: of that request, which may run although the store is unavailable.
        """
        if self.is_started:
            return
        try:
            self.attempts.clock.look()
        except StoreUnavailable:
            if policy is None or policy.on_outage != "execute":
                raise
            self.attempts.clock.guess()
        else:
            self.recovery.start()
            self.is_started = True

    def close(self) -> None:
        """End the threads and close the store."""
        self._close_threads()
        if self._pool is not None:
            self._pool.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the seam -------------------------------------------------------------------------------

    def begin(
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
            started = self._runner.run(self.attempts.begin(request, policy))
        elif policy.mode == "observe":
            raise Misconfigured(NOT_OBSERVED)
        else:
            database = database or self.database()
            transaction = OperationTransaction(self.attempts, database, ThreadAccess())
            started = self._runner.run(self.attempts.begin(request, policy, transaction))
            if isinstance(started, Operation):
                started.repeats = repeats
        return cast("Operation | Replay | Refuse", started)

    def complete(
        self, operation: Operation, outcome: Outcome, *, status: int = 200
    ) -> Executed | Replay | Refuse:
        """End *operation* with *outcome*; the answer that its client gets."""
        answer = self._runner.run(self.attempts.complete(operation, outcome, status=status))
        return cast("Executed | Replay | Refuse", answer)

    def fail(self, operation: Operation, error: BaseException) -> Replay | Refuse | None:
        """End *operation*, whose handler raised; the answer to give instead of the error."""
        return self._runner.run(self.attempts.fail(operation, error))

    def defer(self, operation: Operation, lease_ms: int) -> str:
        """Leave the work of *operation* to a worker; the token that names it."""
        return self._runner.run(defer(self.attempts, operation, lease_ms))

    def attempt(
        self,
        key: str,
        *,
        scope: str,
        fingerprint: object = None,
        policy: Policy | None = None,
        codec: Codec[Any] | None = None,
    ) -> Attempt:
        """
        Guard a block of code: `with engine.attempt(key, scope=…) as attempt`.

        The block runs `attempt.complete(result)`, unless `attempt.is_replay`; then
        `attempt.result` is what the first attempt completed with. *fingerprint* is what must be
        the same for a retry: any JSON value, or a digest of 16 bytes. *codec*: how the result is
        stored, if it is neither JSON nor bytes: `codec_for(Order)`.
        """
        policy = self.policy if policy is None else policy_of(policy)
        digest = fingerprint_given(fingerprint)
        make = functools.partial(request_of_call, self.attempts, key, scope, digest, policy)
        return Attempt(self, make, policy, codec)

    # --- guarded functions ----------------------------------------------------------------------

    def run(
        self,
        key: str,
        function: Callable[..., T],
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
        return self._run(key, label, call, policy, codec)

    def guard(
        self,
        *,
        key: Callable[..., object],
        scope: str = "",
        policy: Policy | None = None,
        codec: Codec[Any] | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """
        Guard every call of a function; *key* takes the same arguments and returns the key.

        The function's return annotation decides how its results are stored, or *codec* does.
        """
        check_function("key", key)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            label = scope or name_of(function)
            check_result(function, codec)
            self.recovery.register_function(label, policy or self.policy)

            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
                call = functools.partial(function, *args, **kwargs)
                return self._run(key(*args, **kwargs), label, call, policy, codec)

            return guarded

        return decorate

    def transaction(
        self,
        key: str,
        function: Callable[..., T],
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
        call = functools.partial(function, *args, **kwargs)
        label = scope or name_of(function)
        policy = policy_in_transaction(self.policy if policy is None else policy)
        return self._run(key, label, call, policy, codec, database=self.database(connection))

    def _run(
        self,
        key: object,
        label: str,
        call: functools.partial[T],
        policy: Policy | None,
        codec: Codec[Any] | None,
        *,
        database: Database | None = None,
    ) -> T:
        policy = self.policy if policy is None else policy_of(policy)
        if not self.is_started:
            self.ensure_started(policy)
        args, kwargs, codec = read_call(call, codec)
        fingerprint = fingerprint_of_call(args, kwargs)
        request = request_of_call(self.attempts, key, label, fingerprint, policy)
        return self.run_request(request, policy, call, codec, database)

    def run_request(
        self,
        request: ClaimRequest,
        policy: Policy,
        call: Callable[[], T],
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
            started = self.begin(request, policy, database, repeats)
            try:
                value: T = (
                    self._execute(started, call, codec)
                    if isinstance(started, Operation)
                    else value_of(started, codec)
                )
            except Repeat as again:
                repeats = again.repeats
            else:
                return value

    def _execute(self, operation: Operation, call: Callable[[], T], codec: Codec[Any] | None) -> T:
        entered = enter(operation)
        try:
            result = call()
            outcome = outcome_of_call(operation, result, codec)
        except BaseException as error:
            answer: Any = self.fail(operation, error)
            if answer is None:
                raise
            value: T = value_of(answer, codec)
            return value
        finally:
            leave(entered)
        value = value_of(self.complete(operation, outcome), codec, outcome, result)
        return value  # noqa: RET504 - typed above

    # --- functions that the background can run again ---------------------------------------------

    def register(
        self,
        name: str,
        function: Callable[[Any], T],
        *,
        policy: Policy | None = None,
        also_failed: bool = False,
    ) -> RegisteredFunction[T]:
        """
        Register *function* under *name*, to be run with a stored input.

        `registered.run(key, input)` stores *input* (JSON or bytes) with the claim. If the process
        dies, the background of any node on which *name* is registered runs it again.
        *also_failed*: also if the function raised, and its claim was released.
        """
        policy = self.policy if policy is None else policy_of(policy)
        check_result(function, None)

        def run(key: str, given: object, note: object) -> T:
            self.ensure_started()
            request = request_with_input(self.attempts, key, name, given, policy, note=note)
            call = functools.partial(function, given)
            return self.run_request(request, policy, call, codec_of_call(call))

        def run_again(record: Record) -> None:
            given = stored_input(record)
            request = self.attempts.request_for(record)
            call = functools.partial(function, given)
            self.run_request(request, policy, call, codec_of_call(call))

        self.recovery.register_resumable(name, run_again, policy, also_failed=also_failed)
        return RegisteredFunction(name, run)

    # --- operators ------------------------------------------------------------------------------

    def resolve(
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
        request = self._resolution(reference, by=by, why=why, abandoned=abandoned)
        return self._runner.run(request.resolve(outcome, correct=correct))

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
        Run an operation in doubt again, now: *function* is its next attempt.

        Its result is what every retry gets: `Happened(status, headers, body)` if the operation is
        a request. If it raises, the operation is in doubt again, unless it raises `Resumable`.
        """
        request = self._resolution(reference, by=by, why=why, abandoned=abandoned)
        call = functools.partial(function, *args, **kwargs)
        codec = codec_of_call(call) if request.is_of_function else None
        operation = self._runner.run(request.begin_rerun())
        entered = enter(operation)
        try:
            result = call()
            outcome = request.outcome_of(operation, result, codec)
        except BaseException as error:
            self.fail(operation, error)
            raise
        finally:
            leave(entered)
        value: T = self._runner.run(request.finish_rerun(operation, outcome, result, codec))
        return value

    def erase(self, caller: str, *, dry_run: bool = False) -> Erased:
        """
        Delete everything that is stored for *caller*; *dry_run*: only count it.

        *caller* is what a `caller=` function returned, or the digest that `coatcheck lookup`
        prints. Operations that run are left alone: erase again when they have ended.
        """
        self.ensure_started()
        return erase(self.attempts, self.store, caller, dry_run=dry_run)

    def _resolution(
        self, reference: str | bytes, *, by: str, why: str, abandoned: bool
    ) -> ResolutionRequest:
        self.ensure_started()
        if isinstance(reference, str):
            page = self.store.find(query_of(reference))
            reference = id_among(reference, page.records)
        read: Snapshot = self._runner.run(self.attempts.read(reference))
        return ResolutionRequest(
            self.attempts, self.policy, read, by=by, why=why, abandoned=abandoned
        )

    # --- deferred work --------------------------------------------------------------------------

    def run_deferred(
        self,
        token: str,
        function: Callable[..., object],
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
        self.ensure_started()
        policy = self.policy if policy is None else policy_of(policy)
        work = DeferredWork(self.attempts, token, policy)
        started: Any = self._runner.run(work.begin())
        if isinstance(started, Operation):
            started = self._execute_work(
                work, started, functools.partial(function, *args, **kwargs)
            )
        return work.response_of(started)

    def _execute_work(
        self, work: DeferredWork, operation: Operation, call: Callable[[], object]
    ) -> Executed | Replay | Refuse:
        entered = enter(operation)
        try:
            outcome = work.outcome_of(operation, call())
        except BaseException as error:
            answer = self.fail(operation, error)
            if answer is None:
                raise
            return answer
        finally:
            leave(entered)
        return self.complete(operation, outcome, status=work.status)

    # --- connections ----------------------------------------------------------------------------

    def _blocking_store(self) -> Store:
        return self.store

    def _own_connections(self, statements: TransactionStatements) -> ConnectionSource:
        self._pool = Pool(statements.connect) if statements.is_pooled else None
        return ConnectionSource(self._pool or statements.connect, is_async=False)
