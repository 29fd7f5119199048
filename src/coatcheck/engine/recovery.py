"""Recovery: ends abandoned operations that no client retries.

The heartbeat starts a round from time to time, in a thread of its own: a reconcile function may
take long (see `reconcile_calls.py`), and leases are renewed meanwhile. A round reads a page of
running records and of records in doubt, picks those that are abandoned, and runs
`core/recovery.py` for each of them. A registered function with a stored input is run again, in a
thread of its own.

The records in doubt are counted as well, if the engine has listeners: a monitor needs their number.

Only operations whose policy is known in this process are touched: guarded functions by their
scope, declared routes by method and template, and, if the engine has a service name, all other
requests of that service: other services may share the store, and a path does not say whose it is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from coatcheck.core.flow import Call, Effect, Flow, run
from coatcheck.core.identity import LABEL_CHARS_MAX, label_of
from coatcheck.core.keep import OutcomeKind
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Reconcile, Snapshot
from coatcheck.core.policy import Policy
from coatcheck.core.progress import readable_progress_of
from coatcheck.core.record import (
    FAILED,
    IN_DOUBT,
    RUNNING,
    Get,
    Record,
    State,
    Swap,
    is_lease_over,
    is_window_over,
)
from coatcheck.core.recovery import ask_from_ms, recover
from coatcheck.engine.attempts import Attempts, is_of_function
from coatcheck.engine.clock import local_ms
from coatcheck.engine.periodic import Schedule, start_daemon
from coatcheck.engine.reconcile_calls import UNANSWERED
from coatcheck.engine.settings import every
from coatcheck.engine.write_retry import WriteRetry
from coatcheck.errors import CoatcheckError, StoreUnavailable
from coatcheck.stores.contract import Query, Store
from coatcheck.stores.fork import renew_after_fork
from coatcheck.telemetry import CountedInDoubt, Recovered

logger = logging.getLogger("coatcheck")

# About as often as a lease lasts: nothing is abandoned sooner.
RECOVER_EVERY_S = 60.0
# At most this many of each state in one round; the next round continues there.
RECORDS_MAX = 500
# Finding them may read a whole table: at most a twentieth of the time is spent on it.
PAUSE_PER_SEARCH = 20
# Scopes of functions may be made at run time; then the oldest are forgotten.
LABELS_MAX = 10_000
# At most this many functions are run again at the same time, and a round waits so long for them:
# one that hangs does not keep the others from running.
RUNS_MAX = 8
RUNS_S_MAX = 10.0
# How long an engine that closes waits for a reconcile function.
CLOSE_S_MAX = 5.0

_OUTCOMES: dict[OutcomeKind, Literal["completed", "released", "in doubt"]] = {
    OutcomeKind.COMPLETE: "completed",
    OutcomeKind.RELEASE: "released",
    OutcomeKind.IN_DOUBT: "in doubt",
}


class Recovery:
    """Recovers abandoned operations of one engine."""

    def __init__(
        self, attempts: Attempts, store: Store, *, every_s: float | None, service: str
    ) -> None:
        self._attempts = weakref.ref(attempts)  # which holds us in turn
        self._store = store
        self._schedule_every_s = every("recover_every_s", every_s)
        self._service = service
        self._functions: dict[str, Policy] = {}
        self._routes: dict[str, Policy] = {}
        self._requests: Policy | None = None
        # Functions that the background can run again, by their label; see `Engine.register`.
        self._registered: dict[str, tuple[Callable[[Record], object], Policy]] = {}
        self._failed_labels: set[str] = set()  # of those that are run again if they were released
        self._recoveries: set[str] = set()  # other than "retry"
        self._is_closed = False
        self._renew()
        renew_after_fork(self)
        attempts.tasks.append(self.tick)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._mutex = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._schedule = Schedule(self._schedule_every_s)
        self._searched_ms = 0  # how long the last round was searching
        self._after: dict[State, bytes] = {RUNNING: b"", IN_DOUBT: b"", FAILED: b""}
        self._in_doubt = 0  # how many records in doubt the pages since the first one had
        self._in_doubt_reported = 0
        self._silent: list[object] = []  # functions that did not answer in this round
        self._runs: dict[bytes, threading.Thread] = {}  # what is run again, by its id
        self._waits_until_s = 0.0

    # --- which policies are known here ----------------------------------------------------------

    def register_function(self, label: str, policy: Policy) -> None:
        """Functions that are guarded as *label* have this *policy*."""
        if policy.recovery != "retry":
            label = label_of(label)
            if self._functions.get(label) is not policy:
                self._register(self._functions, label, policy)

    def register_route(self, label: str, policy: Policy) -> None:
        """Requests of the route *label* ("POST /orders/{id}") have this *policy*."""
        self._register(self._routes, label_of_route(label, self._service), policy)

    def register_requests(self, policy: Policy) -> None:
        """All other requests of this service have this *policy*."""
        self._requests = policy
        if self._service and policy.recovery != "retry":
            self._recoveries.add(policy.recovery)

    def register_resumable(
        self,
        label: str,
        run_again: Callable[[Record], object],
        policy: Policy,
        *,
        also_failed: bool = False,
    ) -> None:
        """Operations of *label* that have a stored input can be run again; also released ones."""
        self._registered[label_of(label)] = (run_again, policy)
        if also_failed:
            self._failed_labels.add(label_of(label))
        self.register_function(label, policy)  # if it may not simply run again
        self._recoveries.add("resume")

    def _register(self, known: dict[str, Policy], label: str, policy: Policy) -> None:
        with self._mutex:
            if len(known) >= LABELS_MAX and label not in known:
                known.pop(next(iter(known)))
            known[label] = policy
        if policy.recovery != "retry":
            self._recoveries.add(policy.recovery)

    def _policy_of(self, record: Record) -> Policy | None:
        """How *record* is recovered, if that is known."""
        if is_of_function(record):
            return self._functions.get(record.label)
        policy = self._routes.get(record.label)
        if policy is None and self._is_ours(record):
            policy = self._requests
        return policy

    def _is_ours(self, record: Record) -> bool:
        """A request of this service has begun *record*."""
        policy, method = self._requests, record.label.partition(" ")[0]
        if policy is None or not self._service or method not in policy.methods:
            return False
        return record.label.endswith(_suffix(self._service))

    # --- when -----------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start, even if nothing is ever executed here; *loop* runs async functions."""
        self.loop = loop
        attempts = self._attempts()
        if self._schedule.every_s is not None and self._recoveries and attempts is not None:
            attempts.heartbeat.start()

    def tick(self, now_ms: int) -> None:
        """Start a round, if it is due; the heartbeat does not wait for it."""
        if not (self._recoveries or self._has_listeners()):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        if self._schedule.is_due(now_ms) and not self._is_closed:
            self._thread = start_daemon("coatcheck-recovery", self._round_or_log)

    def close(self) -> None:
        """Start nothing more; wait a little for a round that runs."""
        self._is_closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)

    # --- a round --------------------------------------------------------------------------------

    def _round_or_log(self) -> None:
        try:
            self.round()
        except CoatcheckError as error:
            logger.warning("coatcheck: a round of recovery failed and is repeated: %s", error)
        except Exception:
            logger.exception("coatcheck: a round of recovery failed and is repeated")
        finally:
            attempts = self._attempts()
            if attempts is not None:
                self._schedule.postpone(attempts.now_ms() + PAUSE_PER_SEARCH * self._searched_ms)

    def round(self) -> None:
        """Search for abandoned operations, and end those that are found."""
        self._searched_ms = 0
        self._silent = []
        self._waits_until_s = time.monotonic() + RUNS_S_MAX
        self._search()
        for thread in self._runs.values():
            thread.join(max(0.0, self._waits_until_s - time.monotonic()))

    def _search(self) -> None:
        for state in self._states():
            started_ms = local_ms()
            query = Query(state=state, after_id=self._after[state], limit=RECORDS_MAX)
            try:
                records, more = self._store.find(query)
            finally:
                self._searched_ms += local_ms() - started_ms
            self._after[state] = more or b""
            if state == IN_DOUBT:
                self._count_in_doubt(len(records), is_last=more is None)
            for record in records:
                attempts = self._attempts()
                if self._is_closed or attempts is None:
                    return
                if record.label in (self._failed_labels if state == FAILED else self._registered):
                    self._run_again(attempts, record)
                policy = self._policy_of(record) if state != FAILED else None
                if policy is not None and self._is_due(attempts, record, policy):
                    self._recover(attempts, record.id, policy)

    def _states(self) -> Iterator[State]:
        if self._recoveries:
            yield RUNNING
        if "reconcile" in self._recoveries or self._has_listeners():
            yield IN_DOUBT
        if self._failed_labels:
            yield FAILED

    def _has_listeners(self) -> bool:
        attempts = self._attempts()
        return attempts is not None and bool(attempts.telemetry.listeners)

    def _count_in_doubt(self, records: int, *, is_last: bool) -> None:
        """Add the records of one page; report how many there are, or that there are more."""
        self._in_doubt += records
        attempts = self._attempts()
        if attempts is not None and (is_last or self._in_doubt > self._in_doubt_reported):
            attempts.telemetry.emit(CountedInDoubt(self._in_doubt))
            self._in_doubt_reported = self._in_doubt
        if is_last:
            self._in_doubt = 0

    def _is_due(self, attempts: Attempts, record: Record, policy: Policy) -> bool:
        now_ms = attempts.now_ms()
        if not is_lease_over(attempts.current(record), now_ms):
            return False
        if policy.recovery != "reconcile":
            return True
        if policy.reconcile in self._silent:  # do not wait for it hundreds of times
            return False
        every_ms = round(1_000 * (self._schedule.every_s or RECOVER_EVERY_S))
        return now_ms >= ask_from_ms(record, every_ms)

    def _recover(self, attempts: Attempts, id: bytes, policy: Policy) -> None:
        try:
            # Read again: what a search returns may be encrypted, or cut.
            (record,) = self._store.get((id,))
            if record is None:
                return
            request = attempts.request_for(record)
            flow = recover(Snapshot(attempts.current(record), request.now_ms), request, policy)
            kind = run(self._recovered(attempts, flow, policy), self._perform)
        except StoreUnavailable:
            raise
        except Exception:  # the others are still recovered
            logger.exception(
                "coatcheck: operation %s could not be recovered; the next round tries again",
                reference_of(id),
            )
            return
        if kind is not None:
            outcome = _OUTCOMES[kind]
            what = (reference_of(id), record.label, record.attempt, outcome)
            logger.info(
                "coatcheck: operation %s (%s), whose attempt %d never finished, is now %s", *what
            )
            attempts.telemetry.happened(Recovered, record, outcome)

    def _recovered(
        self, attempts: Attempts, flow: Flow[OutcomeKind | None], policy: Policy
    ) -> Flow[OutcomeKind | None]:
        """*flow* over the runner's effects: writes and calls of the reconcile function."""
        try:
            effect = next(flow)
            while True:
                try:
                    if isinstance(effect, Reconcile):
                        result: Any = yield from attempts.reconcile(effect.claim, policy)
                        if result is UNANSWERED:
                            self._silent.append(policy.reconcile)
                    else:
                        assert isinstance(effect, Swap)
                        result = yield from written_once(attempts, effect)
                except Exception as error:  # noqa: BLE001 - the flow decides what it means
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            kind: OutcomeKind | None = done.value
            return kind

    def _perform(self, effect: Effect[Any]) -> Any:  # noqa: ANN401 - whatever the effect results in
        """Perform an effect in this thread, for either engine."""
        if isinstance(effect, Swap):
            return self._store.swap((effect,))[0]
        if isinstance(effect, Get):
            return self._store.get((effect.id,))[0]
        assert isinstance(effect, Call)
        attempts = self._attempts()
        assert attempts is not None
        (call,) = effect.args
        return attempts.reconcile_calls.wait(call, self.loop)

    def _run_again(self, attempts: Attempts, record: Record) -> None:
        """Run a registered function again whose attempt has died, with its stored input."""
        run_again, policy = self._registered[record.label]
        progress = readable_progress_of(record)
        if policy.recovery != "retry" or progress is None or progress.input is None:
            return
        now_ms = attempts.now_ms()
        # After its window it would begin anew, without the steps that are done and its input.
        if not is_lease_over(attempts.current(record), now_ms) or is_window_over(record, now_ms):
            return
        if record.id not in self._runs and self._has_place():
            thread = start_daemon("coatcheck-rerun", self._run_one, attempts, run_again, record)
            if thread is not None:
                self._runs[record.id] = thread

    def _has_place(self) -> bool:
        """One more function may run; waits for one that ends, as long as a round waits."""
        while True:
            self._runs = {id: thread for id, thread in self._runs.items() if thread.is_alive()}
            if len(self._runs) < RUNS_MAX:
                return True
            left_s = self._waits_until_s - time.monotonic()
            if left_s <= 0:
                return False
            next(iter(self._runs.values())).join(left_s)

    def _run_one(
        self, attempts: Attempts, run_again: Callable[[Record], object], record: Record
    ) -> None:
        try:
            run_again(record)
        except Exception:  # its own failure is reported by the engine; the others still run
            logger.exception(
                "coatcheck: operation %s was run again and failed; a later round runs it again",
                reference_of(record.id),
            )
        else:
            attempts.telemetry.happened(Recovered, record, "run again")


def written_once(attempts: Attempts, swap: Swap) -> Flow[Record | None]:
    """Write *swap*, once more if its acknowledgement was lost."""
    retry = WriteRetry(0)
    while True:
        try:
            conflict = yield from swap
        except StoreUnavailable as failure:
            if retry.pause_s(swap, failure) is None:
                raise
        else:
            return attempts.after_write(swap, conflict)


def label_of_route(route: str, service: str) -> str:
    """The label of *route* in records, with the name of its service: "POST /orders @shop"."""
    suffix = _suffix(service)
    return label_of(route, LABEL_CHARS_MAX - len(suffix)) + suffix


def _suffix(service: str) -> str:
    return f" @{service}" if service else ""
