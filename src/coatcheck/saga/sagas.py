"""What applications call: definitions of sagas, and what people decide about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.callables import check_function
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.saga.actions import Retry, check_name
from coatcheck.core.saga.unknown_errors import UNKNOWN_ERRORS
from coatcheck.core.saga.view import (
    SagaRun,
    picture_of_run,
    saga_run,
)
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.engine.runner import running_loop
from coatcheck.errors import (
    Misconfigured,
)
from coatcheck.keyring import KeyRing
from coatcheck.saga.function import SagaFunction, policy_of_saga
from coatcheck.saga.operators import Decisions, SagaState, find_saga, list_sagas
from coatcheck.stores import AsyncStore, Store, async_store_of, open_lazily
from coatcheck.telemetry import Listener, Observer

P = ParamSpec("P")
T = TypeVar("T")

# 15 s: about as often as a lease lasts.
RECOVER_EVERY_S = 15.0


class Sagas:
    """
    The sagas of an application, on one store.

    Args:
        store: a URL (`postgresql://…`) or a store.
        policy: a `Policy` in record mode with recovery "retry"; None: a window of 30 days.
        retry: how undos, steps after the pivot and unknown outcomes are retried.
        unknown_errors: further kinds of errors that leave the outcome of a step unknown, such as
            `grpc.RpcError`. Those of the usual HTTP libraries are known, also by their status.
        secret: as for an `Engine`.
        clock: as for an `Engine`.
        observers: as for an `Engine`.
        listeners: as for an `Engine`.
        recover_every_s: about how often this process looks for sagas to continue; None: never.
        keyring: encrypts what is stored of inputs, steps and results.
    """

    def __init__(
        self,
        store: str | Store | AsyncStore,
        *,
        policy: Policy | None = None,
        retry: Retry | None = None,
        unknown_errors: tuple[type[Exception], ...] = (),
        secret: bytes | str = b"",
        clock: Callable[[], int] | None = None,
        observers: Sequence[Observer] = (),
        listeners: Sequence[Listener] = (),
        recover_every_s: float | None = RECOVER_EVERY_S,
        keyring: KeyRing | None = None,
    ) -> None:
        given: Any = open_lazily(store) if isinstance(store, str) else store
        self._given = given
        self._options: dict[str, Any] = {
            "policy": policy_of_saga(policy),
            "secret": secret,
            "clock": clock,
            "observers": observers,
            "listeners": listeners,
            "recover_every_s": recover_every_s,
            "keyring": keyring,
        }
        self.engine = Engine(getattr(given, "blocking", given), **self._options)
        self._async_engine: AsyncEngine | None = None
        self.retry = retry or Retry()
        self.unknown_errors = (*UNKNOWN_ERRORS, *unknown_errors)
        self._functions: dict[str, SagaFunction[Any, Any]] = {}
        self._is_started = False

    @property
    def async_engine(self) -> AsyncEngine:
        """The engine of async sagas; it has the same store."""
        if self._async_engine is None:
            given = self._given
            store = given if hasattr(given, "blocking") else async_store_of(given)
            self._async_engine = AsyncEngine(store, **self._options)
        return self._async_engine

    def saga(
        self,
        name: str,
        *,
        key: Callable[..., object],
        policy: Policy | None = None,
        version: str | int | None = None,
    ) -> Callable[[Callable[Concatenate[Any, P], T]], SagaFunction[P, T]]:
        """
        Define a saga: a function, sync or async, whose first argument is the `Saga`.

        *key* takes the other arguments and returns the key: the saga runs once for each. They are
        stored, so that any node can continue it: as JSON, or as their annotations say. *version*
        names the definition, in place of the steps in its source: a saga that began with another
        version is blocked.
        """
        check_name("saga", name)
        check_function("key", key)

        def decorate(function: Callable[Concatenate[Any, P], T]) -> SagaFunction[P, T]:
            if name in self._functions:
                raise Misconfigured(f"there are two sagas with the name {name!r}")
            defined: SagaFunction[P, T] = SagaFunction(
                self, name, function, key, policy=policy, version=version
            )
            self._functions[name] = defined
            if self._is_started:
                self.start()
            return defined

        return decorate

    # --- background -----------------------------------------------------------------------------

    def start(self) -> None:
        """
        Continue, in the background, what died on any node.

        On an event loop, async sagas run on it; otherwise each runs on one of its own.
        """
        self._is_started = True
        kinds = {function.is_async for function in self._functions.values()}
        if False in kinds:
            self.engine.recovery.start()
        if True in kinds:
            loop = running_loop()
            assert loop is None or isinstance(loop, asyncio.AbstractEventLoop)
            self.async_engine.recovery.start(loop)

    def close(self) -> None:
        """End the threads and close the store; in async code, `await sagas.aclose()`."""
        if self._async_engine is not None:
            asyncio.run(self._async_engine.close())
        self.engine.close()

    async def aclose(self) -> None:
        """End the threads and close the store."""
        if self._async_engine is not None:
            await self._async_engine.close()
        await asyncio.to_thread(self.engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- people; in async code, call these with `asyncio.to_thread` -------------------------------

    def list(
        self, *, name: str | None = None, state: SagaState | None = None, limit: int = 50
    ) -> list[SagaRun]:
        """Return the sagas in the store, the newest first: with this *name*, in this *state*."""
        now_ms = self._now_ms()
        return list_sagas(self.engine.store, now_ms, name=name, state=state, limit=limit)

    def show(self, key: str, *, name: str | None = None) -> SagaRun:
        """
        Return what is known of a saga: its state, its steps, its history, what to do.

        *key* is its key, its name and key ("checkout:42"), or its reference. Raises `NotResolved`
        if there is none, or more than one: then give the *name* of the saga, too.
        """
        return saga_run(self._find(key, name), self._now_ms())

    def picture(self, key: str, *, name: str | None = None) -> str:
        """Return a picture of one saga in Mermaid; `checkout.picture()` is one of a definition."""
        return picture_of_run(self.show(key, name=name))

    def resume(
        self, key: str, *, by: str, why: str, name: str | None = None, accept_change: bool = False
    ) -> SagaRun:
        """
        Have a blocked saga try again; *by* and *why* are stored with it.

        The next call continues it, or the background of any node. *accept_change*: with the
        definition that it has now, if that is why it is blocked. Raises `NotResolved` if it is not
        blocked.
        """
        decisions = self._decisions(key, name, by=by, why=why)
        return self._run_of(decisions.resume(accept_change=accept_change))

    def skip(self, key: str, step: str, *, by: str, why: str, name: str | None = None) -> SagaRun:
        """
        Have a blocked saga continue as if *step* were done, with the result None.

        *step* is a step or an undo: "charge", "charge:undo".
        """
        decisions = self._decisions(key, name, by=by, why=why)
        return self._run_of(decisions.skip(step))

    def resolve(
        self,
        key: str,
        step: str,
        outcome: Happened | DidNotHappen,
        *,
        by: str,
        why: str,
        name: str | None = None,
    ) -> SagaRun:
        """
        Have a blocked saga continue with what happened to *step*, as a person found out.

        With `Happened(value=…)` that is its result; with `DidNotHappen()` it runs again.
        """
        decisions = self._decisions(key, name, by=by, why=why)
        return self._run_of(decisions.resolve(step, outcome))

    def _decisions(self, key: str, name: str | None, *, by: str, why: str) -> Decisions:
        record = self._find(key, name)
        return Decisions(self.engine.store, record, self._now_ms(), by=by, why=why)

    def _now_ms(self) -> int:
        self.engine.attempts.clock.look()
        return self.engine.attempts.now_ms()

    def _find(self, key: str, name: str | None) -> Record:
        return find_saga(self.engine.store, key, name)

    def _run_of(self, record: Record) -> SagaRun:
        return saga_run(record, self._now_ms())
