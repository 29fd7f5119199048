"""The engine for sync code: performs the effects of flows, in the caller's own thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.policy import Policy
from coatcheck.core.record import GONE, Record, Swap
from coatcheck.core.replay import Fate
from coatcheck.core.serve import Answer, Ending, Execute, Reconcile, Seen, Ticket, Watch, serve
from coatcheck.engine.desk import (
    SWEEP_EVERY_S,
    Desk,
    ending_of_reconcile,
    ending_of_result,
    is_unsure,
    logger,
    name_of,
    policy_of,
)
from coatcheck.engine.heart import Archive, Heart
from coatcheck.engine.waiting import poll_pauses_s
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Operation, enter, leave
from coatcheck.stores import Batcher, Store, open_store
from coatcheck.stores.at_rest import AtRest, KeyRing
from coatcheck.telemetry import Observer

P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """
    Guards functions and, through the adapters, requests: each key executes once.

    Args:
        store: a URL (`sqlite:///orders.db`) or a store.
        policy: a `Policy`, the name of a preset, or None for the default.
        secret: makes operation ids and derived keys unguessable; the same on every node.
        clock: milliseconds; the store's own clock unless a test brings another.
        observers: called with each `Decision`.
        sweep_every_s: about how often this engine sweeps; None: never.
        archive: called with expired records before they are deleted.
        keyring: seals what is stored of responses (X1).
    """

    def __init__(
        self,
        store: str | Store = "sqlite:///coatcheck.db",
        policy: Policy | str | None = None,
        *,
        secret: bytes | str = b"",
        clock: Callable[[], int] | None = None,
        observers: Sequence[Observer] = (),
        sweep_every_s: float | None = SWEEP_EVERY_S,
        archive: Archive | None = None,
        keyring: KeyRing | None = None,
    ) -> None:
        opened = open_store(store) if isinstance(store, str) else store
        self.store = opened if keyring is None else AtRest(opened, keyring)
        self.desk = Desk(
            self.store,
            policy,
            secret=secret,
            clock=clock,
            observers=observers,
            sweep_every_s=sweep_every_s,
            archive=archive,
        )
        self._batcher = Batcher(self.store)
        self.is_started = False

    @property
    def heart(self) -> Heart:
        """Renews the leases of what runs here."""
        return self.desk.heart

    def start(self) -> None:
        """Look at the store's clock; done by itself at the first request."""
        self.desk.clock.look()
        self.is_started = True

    def close(self) -> None:
        """End the heart and close the store."""
        self.heart.stop()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- functions ----------------------------------------------------------------------------

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
        return self._run(key, label, call, policy)

    def guard(
        self, *, key: Callable[..., object], scope: str = "", policy: Policy | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Make every call of a function a guarded one; *key* takes the same arguments (K4)."""

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            label = scope or name_of(function)

            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
                call = functools.partial(function, *args, **kwargs)
                return self._run(str(key(*args, **kwargs)), label, call, policy)

            return guarded

        return decorate

    def _run(self, key: str, label: str, call: functools.partial[T], policy: Policy | None) -> T:
        if not self.is_started:
            self.start()
        desk = self.desk
        policy = desk.policy if policy is None else policy_of(policy)
        ticket = desk.ticket_of_call(key, label, call)
        answer: Answer | Execute | None = desk.recall(ticket, policy)
        response: bytes | None = None
        result: T | None = None
        if answer is None:
            flow, held, is_in_call = self.flow(ticket, policy), None, False
            try:
                answer = self.advance(flow, policy)
                if isinstance(answer, Execute):
                    held, is_in_call = desk.heart.hold(answer.claim, policy.lease_ms), True
                    result = self._execute(flow, answer.claim, call, ticket, policy)
                    is_in_call = False
                    ending = ending_of_result(ticket, result)
                    answer = self.advance(flow, policy, ending)
                    response = ending.response
            except StoreUnavailable as error:
                if not is_in_call:  # it is our store, and not one of the function's own
                    desk.tell_outage(ticket, policy, error)
                raise
            finally:  # not before the end is written: who waits here need not look for it
                if held is not None:
                    desk.heart.let_go(held)
        assert not isinstance(answer, Execute)
        value: T = desk.result_of(ticket, policy, answer, response, result)
        return value

    def _execute(
        self,
        flow: Flow[Answer],
        claim: Record,
        call: Callable[[], T],
        ticket: Ticket,
        policy: Policy,
    ) -> T:
        entered = enter(Operation(claim, self.desk.secret))
        try:
            return call()
        except Exception as error:
            self.desk.tell(ticket, policy, None)
            self.advance(flow, policy, error=error)
            raise
        finally:
            leave(entered)

    # --- for adapters -------------------------------------------------------------------------

    def flow(self, ticket: Ticket, policy: Policy) -> Flow[Answer]:
        """The flow of *ticket*, to be driven by `advance`."""
        return serve(ticket, policy, may_claim=self.desk.may_claim(ticket, policy))

    def advance(
        self,
        flow: Flow[Answer],
        policy: Policy,
        ending: Ending | None = None,
        *,
        error: Exception | None = None,
        as_value: bool = True,
    ) -> Execute | Answer:
        """Drive *flow* until it asks for the execution, or to its answer."""
        is_again = False
        try:
            effect = flow.send(ending) if error is None else flow.throw(error)
            while not isinstance(effect, Execute):
                try:
                    if isinstance(effect, Swap):
                        result: Any = self.desk.noticed(effect, self._batcher.swap(effect))
                    else:
                        result = self._perform(effect, policy, as_value=as_value)
                except Exception as failure:  # noqa: BLE001 - the flow decides what it means
                    # A write whose answer was lost is tried once more: if it took effect, it
                    # meets its own record.
                    is_again = not is_again and is_unsure(effect, failure)
                    if not is_again:
                        effect = flow.throw(failure)
                else:
                    is_again = False
                    effect = flow.send(result)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
        return effect

    def _perform(self, effect: Effect[Any], policy: Policy, *, as_value: bool) -> Any:  # noqa: ANN401 - whatever the effect results in
        if isinstance(effect, Watch):
            return self._watch(effect, policy.waiters_max)
        assert isinstance(effect, Reconcile)
        return self._reconcile(effect.claim, policy, as_value=as_value)

    def _watch(self, watch: Watch, waiters_max: int) -> Seen | None:
        now_ms = self.desk.now_ms
        if watch.until_ms <= now_ms():
            return self._look(watch.id)
        told: list[Record] = []
        woken = threading.Event()

        def wake(record: Record) -> None:
            told.append(record)
            woken.set()

        if not self.desk.line.join(watch.id, wake, waiters_max):
            return None
        try:
            for pause_s in poll_pauses_s():
                left_s = max(0.0, (watch.until_ms - now_ms()) / 1_000)
                # Who is executed here is not looked for in the store: its end will wake us.
                is_here = watch.id in self.heart.held
                woken.wait(left_s if is_here else min(pause_s, left_s))
                if told:
                    return Seen(told[0], now_ms())
                seen = self._look(watch.id)
                if seen.record.version != watch.version or seen.now_ms >= watch.until_ms:
                    return seen
        finally:
            self.desk.line.leave(watch.id, wake)
        raise AssertionError  # the pauses never end

    def _look(self, id: bytes) -> Seen:
        record = self._batcher.get(id)
        return Seen(GONE if record is None else record, self.desk.now_ms())

    def _reconcile(self, claim: Record, policy: Policy, *, as_value: bool) -> Ending:
        assert policy.reconcile is not None
        held = self.heart.hold(claim, policy.lease_ms)
        try:
            answer = policy.reconcile(Operation(claim, self.desk.secret))
        except Exception:  # noqa: BLE001 - whatever it was, nobody knows what happened
            logger.exception("reconcile failed; the operation stays in doubt")
            return Ending(Fate.DOUBT)
        finally:
            self.heart.let_go(held)
        return ending_of_reconcile(answer, as_value=as_value)
