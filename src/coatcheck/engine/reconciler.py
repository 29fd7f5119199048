"""The reconciler: settles what has died and is never asked for again (L6).

The heart begins a round from time to time, in a thread of the round's own: a reconcile function
may take its time (see `asking.py`), and leases are renewed meanwhile. A round looks at a page of
what runs and of what is in doubt, picks out what is abandoned, and drives `core/recover.py` for
each of them.

Only operations whose policy is known in this process are touched: guarded functions by their
scope, marked routes by method and template. All other requests are the middleware's, if they were
begun under a policy with the same mark as its own: other services may share the store, and a path
does not say whose it is. Where no policy needs it, nothing is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import weakref
from functools import partial
from typing import Any

from coatcheck.core.flow import Effect, run
from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy
from coatcheck.core.record import IN_DOUBT, RUNNING, Record, State, Swap, is_lease_over, mark_of
from coatcheck.core.recover import ask_from_ms, recover
from coatcheck.core.replay import Fate
from coatcheck.core.scope import label_of
from coatcheck.core.serve import Ending, Reconcile, Seen
from coatcheck.engine.asking import UNANSWERED, Asker, doubt_of, question_of
from coatcheck.engine.clock import local_ms
from coatcheck.engine.desk import Desk, ending_of_reconcile, policy_of
from coatcheck.engine.patience import Patience
from coatcheck.engine.settings import every
from coatcheck.errors import CoatcheckError, StoreUnavailable
from coatcheck.stores import Query, Store
from coatcheck.stores.fork import renew_after_fork

logger = logging.getLogger("coatcheck")

# About as often as a lease lasts: nothing is abandoned sooner.
RECOVER_EVERY_S = 60.0
# At most this many of each state in one round; the next one goes on from there.
RECORDS_MAX = 500
# Finding them may mean to read a whole table: then at most a twentieth of the time is spent on it.
PAUSE_PER_LOOK = 20
# Scopes of functions may be made at run time; then those that were known first are forgotten.
LABELS_MAX = 10_000
# How long an engine that closes waits for a question that is being asked.
CLOSE_S_MAX = 5.0

_BECAME = {
    Fate.KEEP: "it happened, and is completed",
    Fate.RELEASE: "it did not happen, and may run again",
    Fate.DOUBT: "it is in doubt",
}


class Reconciler:
    """Recovers abandoned operations; made by an engine, and driven by its heart."""

    def __init__(self, desk: Desk, store: Store, *, every_s: float | None) -> None:
        self._desk = weakref.ref(desk)  # which holds us in turn
        self._store = store
        self._every_s = every("recover_every_s", every_s)
        self.asker = Asker()
        self._functions: dict[str, Policy] = {}
        self._routes: dict[str, Policy] = {}
        self._requests: Policy | None = None
        self._recoveries: set[str] = set()  # that are not "retry"
        self._is_closed = False
        self._renew()
        renew_after_fork(self)
        desk.chores.append(self.beat)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._due_ms: int | None = None
        self._looked_ms = 0  # how long the last round was looking
        self._after: dict[State, bytes] = {RUNNING: b"", IN_DOUBT: b""}
        self._silent: list[object] = []  # functions that gave no answer in this round

    # --- what is known here -------------------------------------------------------------------

    def know_function(self, label: str, policy: Policy | str) -> None:
        """Functions that are guarded as *label* have this *policy*."""
        policy, label = policy_of(policy), label_of(label)
        if policy.recovery != "retry" and self._functions.get(label) is not policy:
            self._know(self._functions, label, policy)

    def know_route(self, label: str, policy: Policy) -> None:
        """Requests of the route that is called *label* ("POST /orders/{id}") have this *policy*."""
        self._know(self._routes, label_of(label), policy)

    def know_requests(self, policy: Policy) -> None:
        """All other requests have this *policy*."""
        self._requests = policy
        self._need(policy)

    def _know(self, known: dict[str, Policy], label: str, policy: Policy) -> None:
        with self._mutex:
            if len(known) >= LABELS_MAX and label not in known:
                known.pop(next(iter(known)))
            known[label] = policy
        self._need(policy)

    def _need(self, policy: Policy) -> None:
        if policy.recovery != "retry":
            self._recoveries.add(policy.recovery)

    def _policy_of(self, record: Record) -> Policy | None:
        """How *record* is recovered, if that is known; a compact store does not say what it is."""
        if is_of_function(record):
            return self._functions.get(record.label)
        policy = self._routes.get(record.label)
        if policy is None and self._is_ours(record):
            policy = self._requests
        return policy

    def _is_ours(self, record: Record) -> bool:
        """A request of this application's has begun *record*, or one that recovers as it does."""
        policy, method = self._requests, record.label.partition(" ")[0]
        if policy is None or method not in policy.methods:
            return False
        return mark_of(record.nonce) == policy.mark

    # --- when ---------------------------------------------------------------------------------

    def begin(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin by itself, even if nothing is ever executed here; *loop* answers what is async."""
        self._loop = loop
        desk = self._desk()
        if self._every_s is not None and self._recoveries and desk is not None:
            desk.heart.start()

    def beat(self, now_ms: int) -> None:
        """Begin a round, if it is time; the heart does not wait for it."""
        if self._every_s is None or not self._recoveries:
            return
        due_ms = self._due_ms
        if due_ms is not None and now_ms < due_ms:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        # Jittered from the first time on, so that many nodes do not look at the same moment.
        jitter = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        pause_ms = round(1_000 * self._every_s * jitter)
        self._due_ms = now_ms + pause_ms
        if due_ms is not None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._round_or_log, name="coatcheck-reconciler", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Begin nothing more; wait a little for what is under way."""
        self._is_closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)

    # --- a round ------------------------------------------------------------------------------

    def _round_or_log(self) -> None:
        try:
            self.round()
        except CoatcheckError as error:
            logger.warning("a round of recovery failed and is tried again: %s", error)
        except Exception:
            logger.exception("a round of recovery failed")
        finally:
            self._rest()

    def _rest(self) -> None:
        """Put off the next round, from the end of this one on, however it has ended."""
        desk, due_ms = self._desk(), self._due_ms
        if desk is not None and due_ms is not None:
            self._due_ms = max(due_ms, desk.now_ms() + PAUSE_PER_LOOK * self._looked_ms)

    def round(self) -> None:
        """Look at some of what may be abandoned, and settle what is."""
        self._looked_ms = 0
        self._silent = []
        for state in (RUNNING, IN_DOUBT) if "reconcile" in self._recoveries else (RUNNING,):
            started_ms = local_ms()
            query = Query(state=state, after_id=self._after[state], limit=RECORDS_MAX)
            try:
                records, more = self._store.find(query)
            finally:
                self._looked_ms += local_ms() - started_ms
            self._after[state] = more or b""
            for record in records:
                desk, policy = self._desk(), self._policy_of(record)
                if self._is_closed or desk is None:
                    return
                if policy is not None and self._is_due(desk, record, policy):
                    self._recover(desk, record.id, policy)

    def _is_due(self, desk: Desk, record: Record, policy: Policy) -> bool:
        now_ms = desk.now_ms()
        if not is_lease_over(desk.standing(record), now_ms):
            return False
        if policy.recovery != "reconcile":
            return True
        if policy.reconcile in self._silent:  # the others need not wait for it hundreds of times
            return False
        every_ms = round(1_000 * (self._every_s or RECOVER_EVERY_S))
        return now_ms >= ask_from_ms(record, every_ms)

    def _recover(self, desk: Desk, id: bytes, policy: Policy) -> None:
        try:
            # What was found is for people; what is changed must be whole, and unsealed.
            (record,) = self._store.get((id,))
            if record is None:
                return
            ticket = desk.ticket(
                id,
                record.fingerprint,
                key=record.key,
                caller=record.scope,
                route=record.label,
                mark=policy.mark,
            )
            flow = recover(Seen(desk.standing(record), ticket.now_ms), ticket, policy)
            as_value = is_of_function(record)
            fate = run(flow, partial(self._perform, desk, policy, as_value=as_value))
        except StoreUnavailable:
            raise
        except Exception:  # whatever else there is to recover is recovered
            logger.exception("%s could not be recovered", reference_of(id))
            return
        if fate is not None:
            level = logging.WARNING if fate is Fate.DOUBT else logging.INFO
            told = (reference_of(id), record.label, record.attempt, _BECAME[fate])
            logger.log(level, "recovered %s %s attempt=%d: %s", *told)

    def _perform(self, desk: Desk, policy: Policy, effect: Effect[Any], *, as_value: bool) -> Any:  # noqa: ANN401 - whatever the effect results in
        if isinstance(effect, Reconcile):
            ending = self.ask(effect.claim, policy, as_value=as_value)
            if ending is UNANSWERED:
                self._silent.append(policy.reconcile)
            return ending
        assert isinstance(effect, Swap)
        patience = Patience(0)
        while True:
            try:
                return desk.noticed(effect, self._store.swap((effect,))[0])
            except StoreUnavailable as failure:
                if patience.pause_s(effect, failure) is None:
                    raise

    def ask(self, claim: Record, policy: Policy, *, as_value: bool) -> Ending:
        """Ask the application what became of the attempt before *claim*; this thread waits."""
        desk = self._desk()
        assert desk is not None
        held = desk.heart.hold(claim, policy.lease_ms)
        try:
            answer = self.asker.wait(question_of(claim, policy, desk.secret), self._loop)
            return ending_of_reconcile(answer, as_value=as_value)
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows what happened
            return doubt_of(error, claim)
        finally:
            desk.heart.let_go(held)


def is_of_function(record: Record) -> bool:
    """A guarded function made *record*, and no request: those have a caller."""
    return bool(record.label) and not record.scope
