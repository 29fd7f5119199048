"""The driver for async code: performs the effects of flows on the running event loop.

Differs from `engine/driver.py` in the words that wait, and in nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.policy import Policy
from coatcheck.core.record import GONE, Record, Swap
from coatcheck.core.serve import Answer, Ending, Execute, Reconcile, Seen, Ticket, Watch, serve
from coatcheck.core.transact import IN_TRANSACTION, transact
from coatcheck.engine.asking import doubt_of, question_of
from coatcheck.engine.clock import local_ms
from coatcheck.engine.desk import (
    SWEEP_EVERY_S,
    Desk,
    ending_of_reconcile,
)
from coatcheck.engine.hand import AsyncHand
from coatcheck.engine.heart import Heart
from coatcheck.engine.held import Held
from coatcheck.engine.patience import Patience
from coatcheck.engine.reconciler import RECOVER_EVERY_S, Reconciler
from coatcheck.engine.settings import check_keyring
from coatcheck.engine.sweeping import Archive
from coatcheck.engine.together import Lender
from coatcheck.engine.transaction_async import AsyncTransaction
from coatcheck.engine.waiting import AsyncWaiter, has_changed
from coatcheck.errors import Misconfigured
from coatcheck.lent.shelf import AsyncShelf
from coatcheck.lent.source import Source, source_of
from coatcheck.operation import Operation
from coatcheck.stores import AsyncStore, ThreadedStore, open_async_store
from coatcheck.stores.at_rest import AtRest, KeyRing
from coatcheck.stores.declared import refuse_archive
from coatcheck.stores.ledger import ledger_of
from coatcheck.telemetry import Observer

P = ParamSpec("P")
T = TypeVar("T")


class AsyncDriver:
    """The lower half of an engine: it knows flows, and nothing of functions."""

    def __init__(
        self,
        store: str | AsyncStore = "sqlite:///coatcheck.db",
        policy: Policy | str | None = None,
        *,
        secret: bytes | str = b"",
        clock: Callable[[], int] | None = None,
        observers: Sequence[Observer] = (),
        sweep_every_s: float | None = SWEEP_EVERY_S,
        archive: Archive | None = None,
        recover_every_s: float | None = RECOVER_EVERY_S,
        keyring: KeyRing | None = None,
        compress: bool = False,
        transactions: object = None,
    ) -> None:
        if not isinstance(store, str) and not hasattr(store, "blocking"):
            raise Misconfigured(
                f"an AsyncEngine needs an async store, and not a {type(store).__name__}: give its "
                "URL, or open_async_store(url), or put one that blocks into a ThreadedStore"
            )
        if archive is not None:
            refuse_archive(store if isinstance(store, str) else store.blocking)
        check_keyring(keyring)
        self._transactions = None if transactions is None else source_of(transactions)
        self.store = open_async_store(store) if isinstance(store, str) else store
        if keyring or compress:  # in the writing thread, because it takes its time
            self.store = ThreadedStore(AtRest(self.store.blocking, keyring))
        self.desk = Desk(
            self.store.blocking,
            policy,
            secret=secret,
            clock=clock,
            observers=observers,
            sweep_every_s=sweep_every_s,
            archive=archive,
        )
        self.reconciler = Reconciler(self.desk, self.store.blocking, every_s=recover_every_s)
        self.is_started = False
        self._lender: Lender | None = None
        self._shelf: AsyncShelf | None = None
        if transactions is not None or self.desk.policy.mode == "transaction":
            self.lender()

    @property
    def heart(self) -> Heart:
        """Renews the leases of what runs here."""
        return self.desk.heart

    async def start(self) -> None:
        """
        Look at the store's clock, and begin to recover what was abandoned.

        Done by itself at the first request.
        """
        if self.desk.clock.is_due():
            asked_ms = local_ms()
            self.desk.clock.set(asked_ms, await self.store.now_ms())
        self.reconciler.begin(asyncio.get_running_loop())
        self.is_started = True

    async def close(self) -> None:
        """End the threads and close the store."""
        await asyncio.to_thread(self.desk.close)
        await asyncio.to_thread(self.reconciler.close)
        if self._shelf is not None:
            await self._shelf.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def lender(self, given: object = None) -> Lender:
        """Whose connections transactions are on: *given*, or the engine's."""
        if given is not None:
            return Lender(source_of(given), ledger_of(self.store.blocking))
        if self._lender is None:
            ledger, source = ledger_of(self.store.blocking), self._transactions
            if source is None:
                self._shelf = AsyncShelf(ledger.connect_async) if ledger.is_shelved else None
                source = Source(self._shelf or ledger.connect_async, is_async=True)
            self._lender = Lender(source, ledger)
        return self._lender

    def within(self, lender: Lender | None = None) -> AsyncTransaction:
        """A transaction for one operation."""
        return AsyncTransaction(self.desk, lender or self.lender(), self._standing, self._swap)

    async def _standing(self, id: bytes) -> Record:
        return (await self._look(id)).record

    def operation(self, held: Held) -> Operation:
        """What a handler sees of the claim that is *held*."""
        return Operation(held.claim, self.desk.secret, None, partial(self._hand, held))

    def _hand(self, held: Held) -> AsyncHand:
        blocking = self.store.blocking
        return AsyncHand(self.desk, held, lambda swap: blocking.swap((swap,))[0], self._swap)

    async def _swap(self, swap: Swap) -> Record | None:
        (lost,) = await self.store.swap((swap,))
        return lost

    def flow(self, ticket: Ticket, policy: Policy) -> Flow[Answer]:
        """The flow of *ticket*, to be driven by `advance`."""
        begin = serve if policy.mode == "record" else transact
        return begin(ticket, policy, may_claim=self.desk.may_claim(ticket, policy))

    async def advance(
        self,
        flow: Flow[T],
        policy: Policy,
        ending: Ending | None = None,
        *,
        error: Exception | None = None,
        as_value: bool = True,
        within: AsyncTransaction | None = None,
    ) -> Execute | T:
        """
        Drive *flow* until it asks for the execution, or to its answer.

        *within* the transaction that is given, where the policy's mode is that.
        """
        patience: Patience | None = None
        effect: Effect[Any] | None = None
        began_s = None if ending is None else time.monotonic()
        try:
            effect = flow.send(ending) if error is None else flow.throw(error)
            while not isinstance(effect, Execute):
                try:
                    if isinstance(effect, Swap):
                        result: Any = self.desk.noticed(effect, *await self.store.swap((effect,)))
                    else:
                        result = await self._perform(effect, policy, within, as_value=as_value)
                except Exception as failure:  # noqa: BLE001 - the flow decides what it means
                    patience = patience or self._patience(policy, began_s)
                    pause_s = patience.pause_s(effect, failure)
                    if pause_s is None:
                        self.desk.give_up(effect, failure)
                        effect = flow.throw(failure)
                    else:
                        await asyncio.sleep(pause_s)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            answer: T = done.value
            return answer
        except BaseException as interruption:
            self.desk.interrupt(effect, interruption)
            raise
        return effect

    @staticmethod
    def _patience(policy: Policy, began_s: float | None) -> Patience:
        """With the end of an execution, which began to be written then; with a claim, none."""
        return Patience(0 if began_s is None else policy.patience_ms / 1_000, began_s)

    async def _perform(
        self,
        effect: Effect[Any],
        policy: Policy,
        within: AsyncTransaction | None,
        *,
        as_value: bool,
    ) -> Any:  # noqa: ANN401 - whatever the effect results in
        if within is not None and isinstance(effect, IN_TRANSACTION):
            return await within.perform(effect)
        if isinstance(effect, Watch):
            return await self._watch(effect, policy.waiters_max)
        assert isinstance(effect, Reconcile)
        return await self._reconcile(effect.claim, policy, as_value=as_value)

    async def _watch(self, watch: Watch, waiters_max: int) -> Seen | None:
        now_ms = self.desk.now_ms
        if watch.until_ms <= now_ms():
            return await self._look(watch.id)
        waiter = AsyncWaiter()
        if not self.desk.line.join(watch.id, waiter.wake, waiters_max):
            return None
        try:
            if (ended := self.desk.ended_since(watch)) is not None:
                return Seen(ended, now_ms())
            for pause_s in self.desk.doorbell.pauses_s(watch.id):
                left_s = max(0.0, (watch.until_ms - now_ms()) / 1_000)
                await waiter.wait(min(pause_s, left_s))
                if waiter.record is not None:
                    return Seen(waiter.record, now_ms())
                seen = await self._look(watch.id)
                if has_changed(seen, watch):
                    return seen
        finally:
            self.desk.line.leave(watch.id, waiter.wake)
        raise AssertionError  # the pauses never end

    async def _look(self, id: bytes) -> Seen:
        (record,) = await self.store.get((id,))
        standing = GONE if record is None else self.desk.standing(record)
        return Seen(standing, self.desk.now_ms())

    async def _reconcile(self, claim: Record, policy: Policy, *, as_value: bool) -> Ending:
        held = self.heart.hold(claim, policy.lease_ms, asyncio.get_running_loop())
        try:
            question = question_of(claim, policy, self.desk.secret)
            answer = await self.reconciler.asker.answer(question)
            return ending_of_reconcile(answer, as_value=as_value)
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows what happened
            return doubt_of(error, claim)
        finally:
            self.heart.let_go(held)
