"""A schedule: which requests come when, and what goes wrong; all of it drawn from one number.

At first things go wrong: clients ask, and ask again, while processes and the store fail and come
back. Then no more faults begin, and every message arrives. In the end every key is tried once more:
it must give its answer, or be in doubt where an operator sees it, whose decision must set it free.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Generator
from typing import Any, NamedTuple

from coatcheck.core.lifecycle import Answer, Executed, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.record import IN_DOUBT, Record
from coatcheck.engine.periodic import JITTER
from coatcheck.operation import Operation

from . import faults, operators
from .booking import Booking
from .database import Database
from .deferred_work import Queue, defer_work, execute
from .downstream import Downstream
from .engine import machine_clocks
from .faults import AWAY_LEASES_MAX, SOUND, STEP_LEASES_MAX, Broken, Faults
from .handlers import Ended, Handlers
from .process import Process, Setting
from .rules import COUNTED, Rules
from .runner import Doing
from .served import ServedRequest
from .stepping import Stepping
from .store import SimulatedStore
from .world import Body, Host, Pause, Trace, Violation, World

logger = logging.getLogger("coatcheck")

KINDS = (*COUNTED, "steps", "saga")
# How an attempt that died is recovered, by the kind of route; else it is run again.
RECOVERIES = {
    "reconcile": ("reconcile",),
    "fenced": ("reconcile",),
    "manual": ("manual",),
    "deferred": ("retry", "reconcile", "manual"),
    "resolved": ("reconcile", "manual"),
    "steps": ("retry", "reconcile", "manual"),
}
# What a client may ask with under one key; most ask for the same.
FINGERPRINTS = (b"same",) * 9 + (b"other",)
# From a lease that any network can keep, to the default.
LEASES_MS = (1_000, 7_000, 60_000)
# The margin is longer than any delay: see `faults`.
MARGIN_LEASES = 4 * AWAY_LEASES_MAX + 1
# What is not the end of it for a client: work is done elsewhere, and a step may leave a doubt.
LATER = {
    "deferred": ("an error, or accepted", "in-progress", "too-many-waiting"),
    "steps": ("an error, or accepted",),
    "saga": ("an error, or accepted", "in-progress", "no answer"),
}
# How long faults begin; the last clients come when windows and retentions are over.
FAULTY_LEASES = 12.0
LATE_LEASES = 60.0
# The shortest is shorter than deferred work may take, so that it would never be seen.
WINDOWS_LEASES = (2.0, 6.0, 2 * FAULTY_LEASES)
SWEEPS = 4
ROUNDS = 4  # of the background reconciler
OPERATORS = 16
PATIENCE_LEASES = 3 * AWAY_LEASES_MAX
# How often a key is tried in the end, if it waits for a worker or needs an operator.
TRIES = 24


class Summary(NamedTuple):
    """How much a schedule was, and what happened in it."""

    steps: int
    counts: Counter[str]
    trace: Trace | None


def simulate(
    seed: int, *, kind: str | None = None, broken: Broken = SOUND, is_traced: bool = False
) -> Summary:
    """Run the schedule that *seed* stands for; raises `Violation` where a promise is broken."""
    JITTER.uniform = random.Random(seed).uniform  # so that a seed repeats the jitter, too
    world = World(seed, is_traced=is_traced)
    drawn = world.random.choice(KINDS)
    schedule = Schedule(world, kind or drawn, broken)
    is_disabled, logger.disabled = logger.disabled, True  # every outage would be logged
    try:
        with machine_clocks(world):
            schedule.run()
    except Violation as violation:
        raise Violation(violation.promise, seed, schedule.kind, world.trace) from None
    finally:
        logger.disabled = is_disabled
    return Summary(world.steps, world.counts, world.trace)


class Schedule:
    """All parts of one schedule."""

    def __init__(self, world: World, kind: str, broken: Broken) -> None:
        self.world = world
        self.kind = kind
        draw = world.random
        self.lease_ms = draw.choice(LEASES_MS)
        self.faults = faults.drawn(draw, self.lease_ms)
        self.policy = self._policy()
        self.rules = Rules(world, self.policy, is_calm=self.faults.is_calm)
        self.store = SimulatedStore(world, self.rules, broken)
        self.downstream = Downstream(
            world,
            fences=kind == "fenced" and broken.downstream_fences,
            deduplicates=kind == "derived",
        )
        database = Database(world, self.store, self.downstream, broken)
        self.handlers = Handlers(world, self.policy, self.downstream, broken)
        self.stepping = Stepping(self.handlers) if kind == "steps" else None
        self.booking = Booking(self.handlers) if kind == "saga" else None
        self.queue = Queue(world, self.lease_ms, lambda: world.random.choice(self.processes))
        self.setting = Setting(
            *(self.store, database, self.policy, self.handlers, self.rules, broken),
            self._strike,
            self._handle,
        )
        self.outside = Host(world, "outside")
        self.processes = [self._process() for _ in range(draw.randint(2, 4))]
        self.ids = [b"key %012d" % number for number in range(draw.choice((1, 1, 2, 3)))]
        world.happened("schedule", f"a schedule of {kind}", self.faults, self.policy)

    def _policy(self) -> Policy:
        draw, lease_s = self.world.random, self.lease_ms / 1_000
        recovery = draw.choice(RECOVERIES.get(self.kind, ("retry",)))
        knobs: dict[str, Any] = {"recovery": recovery}
        if knobs["recovery"] == "reconcile":
            knobs["reconcile"] = self._reconcile
        if self.kind == "transaction":
            knobs["mode"] = "transaction"
        return Policy(
            lease=lease_s,
            window=lease_s * draw.choice(WINDOWS_LEASES[self.kind == "deferred" :]),
            margin=lease_s * MARGIN_LEASES,
            wait=lease_s * draw.choice((0, 0.1, 0.5, 2.0)),
            patience=lease_s * draw.choice((0, 0.3)),
            live_keys_max=1,  # so that `SimulatedAttempts._is_within_quota` is asked
            waiters_max=draw.choice((1, 100)),
            on_expired=draw.choice(("new", "new", "refuse")),
            **knobs,
        )

    def _reconcile(self, operation: Operation) -> Doing[object]:
        return Doing(self.handlers.reconcile(operation.claim))

    def _process(self) -> Process:
        self.world.counts["process"] += 1
        return Process(self.world, f"p{self.world.counts['process']}", self.setting)

    def _handle(self, served: ServedRequest, claim: Record, operation: Operation) -> Ended:
        """What the application does."""
        if self.stepping is not None:
            return self.stepping.execute(served, claim, operation)
        if self.booking is not None:
            return self.booking.execute(served, claim, operation)
        if self.kind == "deferred" and served.is_work:
            return execute(self.handlers, claim)
        if self.kind == "deferred" and not served.is_operator:
            return defer_work(self.handlers, self.queue, claim, operation)
        return self.handlers.execute(claim)

    # --- while things go wrong ------------------------------------------------------------------

    def run(self) -> None:
        """Run while things go wrong, then until all is quiet, and check what came of it."""
        world = self.world
        self.store.faults = self.handlers.faults = self.faults
        for number in range(world.random.randint(3, 12)):
            self.outside.start(self._client(f"client {number}"))
        for fault, count in (
            (self._crash, self.faults.crashes),
            (self._freeze, self.faults.freezes),
            (self._fail, self.faults.outages),
        ):
            for _ in range(count):
                world.later(self._some_leases(FAULTY_LEASES), fault)
        for _ in range(SWEEPS):
            world.later(self._some_leases(LATE_LEASES), self._sweep)
        for _ in range(0 if self.policy.reruns else ROUNDS):
            world.later(self._some_leases(FAULTY_LEASES), self._recover)
        for _ in range(OPERATORS if self.kind in ("resolved", "steps") else 0):
            world.later(self._some_leases(FAULTY_LEASES), self._decide)
        world.run()
        world.happened("schedule", "no more faults")
        self._probe()
        if self.booking is not None:
            self.booking.check(self.rules.completed)
        elif self.stepping is None:
            self.rules.check_effects(self.kind, self.downstream)
        else:
            self.rules.check_steps(self.stepping.ledgers)

    def _some_leases(self, most: float) -> float:
        return self.world.between(0, most * self.lease_ms)

    def _client(self, name: str) -> Body:
        """Ask, and ask again until there is an answer or patience is at its end."""
        world, draw = self.world, self.world.random
        id, fingerprint = draw.choice(self.ids), draw.choice(FINGERPRINTS)
        # Many at once, some one after the other, and a few when the window or all is over.
        most = draw.choice((0.01, 1.0, FAULTY_LEASES, LATE_LEASES))
        yield self._some_leases(most)
        for _ in range(draw.randint(1, 7)):
            answers: list[Answer | None] = []
            copies = 2 if self.faults.twice and world.chance(0.1) else 1
            for _ in range(copies):  # a proxy may ask again by itself
                draw.choice(self.processes).serve(id, fingerprint, answers.append)
            world.happened(name, "asks", id, fingerprint)
            yield self._some_leases(draw.choice((0.1, 1.5)))
            is_answered = any(isinstance(answer, (Executed, Replay)) for answer in answers)
            if is_answered and world.chance(
                0.7
            ):  # otherwise the answer is lost, and it asks once more
                return

    def _strike(self, process: Process) -> None:
        """Have *process* crash or freeze soon, in the middle of its work."""
        world = self.world
        if world.chance(self.store.faults.struck):
            delay_ms = world.random.choice((4 * self.faults.latency_ms, 1.5 * self.lease_ms))
            fault = world.random.choice((self._crash, self._freeze))
            world.later(world.between(0, delay_ms), fault, process)

    def _crash(self, process: Process | None = None) -> None:
        process = process or self.world.random.choice(self.processes)
        if process in self.processes:  # and another starts in its place
            process.crash()
            self.processes[self.processes.index(process)] = self._process()

    def _freeze(self, process: Process | None = None) -> None:
        process = process or self.world.random.choice(self.processes)
        process.freeze(self._away_ms(), is_suspended=self.world.chance(0.3))

    def _fail(self) -> None:
        if self.store.is_up:
            step_ms = self.world.between(-1, 1) * STEP_LEASES_MAX * self.lease_ms
            self.store.fail(self._away_ms(), step_ms)
            self.setting.database.restart()

    def _sweep(self) -> None:
        self.world.random.choice(self.processes).sweep()

    def _recover(self) -> None:
        self.world.random.choice(self.processes).recover()

    def _decide(self) -> None:
        draw = self.world.random
        process, id = draw.choice(self.processes), draw.choice(self.ids)
        # Downstream knows nothing of a step that was not begun yet, so these operators wait.
        patience_ms = PATIENCE_LEASES * self.lease_ms if self.stepping is not None else 0.0
        process.start(operators.decide(process, id, self.stepping, patience_ms))

    def _away_ms(self) -> float:
        return self.world.between(0, self.faults.away_ms_max)

    # --- afterwards ---------------------------------------------------------------------------

    def _probe(self) -> None:
        """Everything on its way has arrived: from now on nothing goes wrong any more."""
        calm = Faults(self.faults.latency_ms, self.faults.timeout_ms)
        self.store.faults = self.handlers.faults = calm
        self.processes = [self._process()]
        self.outside.start(self._probes())
        self.world.run()

    def _probes(self) -> Body:
        yield 2.0 * self.lease_ms  # by now every lease has run out, on any clock
        for id in self.ids:
            code = ""
            for _ in range(TRIES):
                code = yield from self._tried(id)
                if code == "outcome-unknown" and self._may_be_in_doubt():
                    yield from self._resolved(id)
                elif code == "key-expired":  # it says no only while retention lasts
                    yield float(self.policy.retention_ms)
                elif code in LATER.get(self.kind, ()):
                    yield self.lease_ms / 2
                else:
                    break
            is_answered = code in ("", "result-unavailable")
            self.world.require(is_answered, f"no key is stuck: {code}")

    def _tried(self, id: bytes) -> Generator[Pause, Any, str]:
        """One more retry: the code of its refusal, empty where it has an answer."""
        fingerprint = self.store.get(id).fingerprint or FINGERPRINTS[0]
        answers: list[Answer | None] = []
        self.processes[0].serve(id, fingerprint, answers.append)
        for _ in range(10):  # half-leases: longer than any handler
            yield self.lease_ms / 2
            if answers:
                break
        answer = answers[0] if answers else None
        if isinstance(answer, Refuse):
            return answer.problem.code
        if answer is None:
            return "an error, or accepted" if answers else "no answer"
        return ""

    def _may_be_in_doubt(self) -> bool:
        return self.policy.recovery == "manual" or self.kind == "steps"

    def _resolved(self, id: bytes) -> Generator[Pause, Any, None]:
        """An operator finds what is in doubt, asks downstream, and says what happened."""
        found = [record for record in self.store.find(IN_DOUBT) if record.id == id]
        self.world.require(found, "what is in doubt is visible")
        self.processes[0].start(operators.decide(self.processes[0], id, self.stepping))
        yield 5.0 * self.lease_ms  # longer than any handler, if it is run again
