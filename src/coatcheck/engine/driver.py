"""The driver for sync code: performs the effects of flows, in the caller's own thread.

What the engine for functions and the adapters for requests have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.policy import Policy
from coatcheck.core.record import GONE, Record, Swap
from coatcheck.core.serve import Answer, Ending, Execute, Reconcile, Seen, Ticket, Watch, serve
from coatcheck.core.transact import IN_TRANSACTION, transact
from coatcheck.engine.desk import SWEEP_EVERY_S, Desk
from coatcheck.engine.hand import Hand
from coatcheck.engine.heart import Heart
from coatcheck.engine.held import Held
from coatcheck.engine.patience import Patience
from coatcheck.engine.reconciler import RECOVER_EVERY_S, Reconciler
from coatcheck.engine.settings import check_keyring
from coatcheck.engine.sweeping import Archive
from coatcheck.engine.together import Lender
from coatcheck.engine.transaction import Transaction
from coatcheck.engine.waiting import Waiter, has_changed
from coatcheck.errors import Misconfigured
from coatcheck.lent.shelf import Shelf
from coatcheck.lent.source import Source, source_of
from coatcheck.operation import Operation
from coatcheck.stores import Batcher, Store, open_store
from coatcheck.stores.at_rest import AtRest, KeyRing
from coatcheck.stores.declared import refuse_archive
from coatcheck.stores.ledger import ledger_of
from coatcheck.telemetry import Observer

P = ParamSpec("P")
T = TypeVar("T")


class Driver:
    """The lower half of an engine: it knows flows, and nothing of functions."""

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
        recover_every_s: float | None = RECOVER_EVERY_S,
        keyring: KeyRing | None = None,
        compress: bool = False,
        transactions: object = None,
    ) -> None:
        if not isinstance(store, str) and (
            hasattr(store, "blocking") or not hasattr(store, "swap")
        ):
            raise Misconfigured(
                f"an Engine needs a store that blocks, and not a {type(store).__name__}: give its "
                "URL, or open_store(url); an AsyncEngine takes the others"
            )
        if archive is not None:
            refuse_archive(store)
        check_keyring(keyring)
        self._transactions = None if transactions is None else source_of(transactions)
        opened = open_store(store) if isinstance(store, str) else store
        self.store = AtRest(opened, keyring) if keyring or compress else opened
        self.desk = Desk(
            self.store,
            policy,
            secret=secret,
            clock=clock,
            observers=observers,
            sweep_every_s=sweep_every_s,
            archive=archive,
        )
        self.reconciler = Reconciler(self.desk, self.store, every_s=recover_every_s)
        self._batcher = Batcher(self.store)
        self.is_started = False
        self._lender: Lender | None = None
        self._shelf: Shelf | None = None
        if transactions is not None or self.desk.policy.mode == "transaction":
            self.lender()

    @property
    def heart(self) -> Heart:
        """Renews the leases of what runs here."""
        return self.desk.heart

    def start(self) -> None:
        """
        Look at the store's clock, and begin to recover what was abandoned.

        Done by itself at the first request.
        """
        self.desk.clock.look()
        self.reconciler.begin()
        self.is_started = True

    def close(self) -> None:
        """End the threads and close the store."""
        self.desk.close()
        self.reconciler.close()
        if self._shelf is not None:
            self._shelf.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lender(self, given: object = None) -> Lender:
        """Whose connections transactions are on: *given*, or the engine's."""
        if given is not None:
            return Lender(source_of(given), ledger_of(self.store))
        if self._lender is None:
            ledger, source = ledger_of(self.store), self._transactions
            if source is None:
                self._shelf = Shelf(ledger.connect) if ledger.is_shelved else None
                source = Source(self._shelf or ledger.connect, is_async=False)
            self._lender = Lender(source, ledger)
        return self._lender

    def within(self, lender: Lender | None = None) -> Transaction:
        """A transaction for one operation."""
        return Transaction(self.desk, lender or self.lender(), self._standing, self._batcher.swap)

    def _standing(self, id: bytes) -> Record:
        return (self._look(id)).record

    def operation(self, held: Held) -> Operation:
        """What a handler sees of the claim that is *held*."""
        return Operation(held.claim, self.desk.secret, None, partial(self._hand, held))

    def _hand(self, held: Held) -> Hand:
        return Hand(self.desk, held, self._batcher.swap)

    def flow(self, ticket: Ticket, policy: Policy) -> Flow[Answer]:
        """The flow of *ticket*, to be driven by `advance`."""
        begin = serve if policy.mode == "record" else transact
        return begin(ticket, policy, may_claim=self.desk.may_claim(ticket, policy))

    def advance(
        self,
        flow: Flow[T],
        policy: Policy,
        ending: Ending | None = None,
        *,
        error: Exception | None = None,
        as_value: bool = True,
        within: Transaction | None = None,
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
                        result: Any = self.desk.noticed(effect, self._batcher.swap(effect))
                    else:
                        result = self._perform(effect, policy, within, as_value=as_value)
                except Exception as failure:  # noqa: BLE001 - the flow decides what it means
                    patience = patience or self._patience(policy, began_s)
                    pause_s = patience.pause_s(effect, failure)
                    if pause_s is None:
                        self.desk.give_up(effect, failure)
                        effect = flow.throw(failure)
                    else:
                        time.sleep(pause_s)
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

    def _perform(
        self, effect: Effect[Any], policy: Policy, within: Transaction | None, *, as_value: bool
    ) -> Any:  # noqa: ANN401 - whatever the effect results in
        if within is not None and isinstance(effect, IN_TRANSACTION):
            return within.perform(effect)
        if isinstance(effect, Watch):
            return self._watch(effect, policy.waiters_max)
        assert isinstance(effect, Reconcile)
        return self.reconciler.ask(effect.claim, policy, as_value=as_value)

    def _watch(self, watch: Watch, waiters_max: int) -> Seen | None:
        now_ms = self.desk.now_ms
        if watch.until_ms <= now_ms():
            return self._look(watch.id)
        waiter = Waiter()
        if not self.desk.line.join(watch.id, waiter.wake, waiters_max):
            return None
        try:
            if (ended := self.desk.ended_since(watch)) is not None:
                return Seen(ended, now_ms())
            for pause_s in self.desk.doorbell.pauses_s(watch.id):
                left_s = max(0.0, (watch.until_ms - now_ms()) / 1_000)
                waiter.wait(min(pause_s, left_s))
                if waiter.record is not None:
                    return Seen(waiter.record, now_ms())
                seen = self._look(watch.id)
                if has_changed(seen, watch):
                    return seen
        finally:
            self.desk.line.leave(watch.id, waiter.wake)
        raise AssertionError  # the pauses never end

    def _look(self, id: bytes) -> Seen:
        record = self._batcher.get(id)
        standing = GONE if record is None else self.desk.standing(record)
        return Seen(standing, self.desk.now_ms())
