"""A schedule: who asks for what and when, in which weather; all of it drawn from one number.

First a storm, in which clients ask, and ask again, while processes and the store come and go. Then
the storm is over, and everything on its way arrives. In the end every key is tried once more: it
must give its answer, or be in doubt where a person sees it; and the person's word must set it free.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from typing import Any, NamedTuple

from coatcheck.core.policy import Policy
from coatcheck.core.record import IN_DOUBT, Swap, completed, failed
from coatcheck.core.serve import Answer, Executed, Refuse, Replay

from . import weather
from .database import Database
from .downstream import Downstream, life_of
from .handlers import Handlers
from .process import Process, Setting
from .rules import COUNTED, Rules
from .store import SimulatedStore
from .weather import AWAY_LEASES_MAX, SOUND, STEP_LEASES_MAX, Broken, Weather
from .world import Body, Host, Pause, Trace, Violation, World

KINDS = tuple(COUNTED)
# What a client may ask with under one key; most ask for the same.
FINGERPRINTS = (b"same",) * 9 + (b"other",)
# From a lease that any network can keep, to the default.
LEASES_MS = (1_000, 7_000, 60_000)
# The margin outlasts whatever is late: see `weather`.
MARGIN_LEASES = 4 * AWAY_LEASES_MAX + 1
# How long the storm lasts; the last clients come when windows and retentions are over.
STORM_LEASES = 12.0
LATE_LEASES = 60.0
SWEEPS = 4
RECOVERIES = 4


class Told(NamedTuple):
    """How much a schedule was, and what happened in it."""

    steps: int
    counts: Counter[str]
    trace: Trace | None


def simulate(
    seed: int, *, kind: str | None = None, broken: Broken = SOUND, is_traced: bool = False
) -> Told:
    """Run the schedule that *seed* stands for; raises `Violation` where a promise is broken."""
    random.seed(seed)  # what production draws of its own, for jitter
    world = World(seed, is_traced=is_traced)
    drawn = world.random.choice(KINDS)
    schedule = Schedule(world, kind or drawn, broken)
    try:
        schedule.run()
    except Violation as violation:
        raise Violation(violation.promise, seed, schedule.kind, world.trace) from None
    return Told(world.steps, world.counts, world.trace)


class Schedule:
    """Everybody who takes part in one schedule."""

    def __init__(self, world: World, kind: str, broken: Broken) -> None:
        self.world = world
        self.kind = kind
        draw = world.random
        self.lease_ms = draw.choice(LEASES_MS)
        self.weather = weather.drawn(draw, self.lease_ms)
        self.policy = self._policy()
        self.rules = Rules(world, self.policy, is_calm=self.weather.is_calm)
        self.store = SimulatedStore(world, self.rules, broken)
        self.downstream = Downstream(
            world,
            fences=kind == "fenced" and broken.downstream_fences,
            deduplicates=kind == "derived",
        )
        database = Database(world, self.store, self.downstream, broken)
        handlers = Handlers(world, self.policy, self.downstream, broken)
        self.setting = Setting(
            *(self.store, database, self.policy, handlers, self.rules, broken), self._strike
        )
        self.outside = Host(world, "outside")
        self.processes = [self._process() for _ in range(draw.randint(2, 4))]
        self.ids = [b"key %012d" % number for number in range(draw.choice((1, 1, 2, 3)))]
        world.happened("schedule", f"a schedule of {kind}", self.weather, self.policy)

    def _policy(self) -> Policy:
        draw, lease_s = self.world.random, self.lease_ms / 1_000
        recovery = {"reconcile": "reconcile", "fenced": "reconcile", "manual": "manual"}
        knobs: dict[str, Any] = {"recovery": recovery.get(self.kind, "retry")}
        if knobs["recovery"] == "reconcile":
            knobs["reconcile"] = print  # whatever it is, `Handlers.reconcile` is asked
        if self.kind == "transaction":
            knobs["mode"] = "transaction"
        return Policy(
            lease=lease_s,
            window=lease_s * draw.choice((2, 6, 2 * STORM_LEASES)),
            margin=lease_s * MARGIN_LEASES,
            wait=lease_s * draw.choice((0, 0.1, 0.5, 2.0)),
            patience=lease_s * draw.choice((0, 0.3)),
            waiters_max=draw.choice((1, 100)),
            on_expired=draw.choice(("new", "new", "refuse")),
            **knobs,
        )

    def _process(self) -> Process:
        self.world.counts["process"] += 1
        return Process(self.world, f"p{self.world.counts['process']}", self.setting)

    # --- the storm ----------------------------------------------------------------------------

    def run(self) -> None:
        """The storm, the calm after it, and the question whether all is well."""
        world = self.world
        self.store.weather = self.setting.handlers.weather = self.weather
        for number in range(world.random.randint(3, 12)):
            self.outside.start(self._client(f"client {number}"))
        for trouble, count in (
            (self._crash, self.weather.crashes),
            (self._freeze, self.weather.freezes),
            (self._fail, self.weather.outages),
        ):
            for _ in range(count):
                world.later(self._some_leases(STORM_LEASES), trouble)
        for _ in range(SWEEPS):
            world.later(self._some_leases(LATE_LEASES), self._sweep)
        for _ in range(0 if self.policy.reruns else RECOVERIES):
            world.later(self._some_leases(STORM_LEASES), self._recover)
        world.run()
        world.happened("schedule", "the storm is over")
        self._probe()
        self.rules.check_effects(self.kind, self.downstream)

    def _some_leases(self, most: float) -> float:
        return self.world.between(0, most * self.lease_ms)

    def _client(self, name: str) -> Body:
        """Ask, and ask again until there is an answer or patience is at its end."""
        world, draw = self.world, self.world.random
        id, fingerprint = draw.choice(self.ids), draw.choice(FINGERPRINTS)
        # Many at once, some one after the other, and a few when the window or all is over.
        most = draw.choice((0.01, 1.0, STORM_LEASES, LATE_LEASES))
        yield self._some_leases(most)
        for _ in range(draw.randint(1, 7)):
            answers: list[Answer | None] = []
            copies = 2 if self.weather.twice and world.chance(0.1) else 1
            for _ in range(copies):  # a proxy may ask again by itself
                draw.choice(self.processes).serve(id, fingerprint, answers.append)
            world.happened(name, "asks", id, fingerprint)
            yield self._some_leases(draw.choice((0.1, 1.5)))
            is_told = any(isinstance(answer, (Executed, Replay)) for answer in answers)
            if is_told and world.chance(0.7):  # else it never hears of it, and asks once more
                return

    def _strike(self, process: Process) -> None:
        """Trouble comes when it is least welcome."""
        world = self.world
        if world.chance(self.store.weather.struck):
            delay_ms = world.random.choice((4 * self.weather.latency_ms, 1.5 * self.lease_ms))
            trouble = world.random.choice((self._crash, self._freeze))
            world.later(world.between(0, delay_ms), trouble, process)

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

    def _away_ms(self) -> float:
        return self.world.between(0, self.weather.away_ms_max)

    # --- afterwards ---------------------------------------------------------------------------

    def _probe(self) -> None:
        """Everything on its way has arrived: from now on nothing goes wrong any more."""
        calm = Weather(self.weather.latency_ms, self.weather.timeout_ms)
        self.store.weather = self.setting.handlers.weather = calm
        self.processes = [self._process()]
        self.outside.start(self._probes())
        self.world.run()

    def _probes(self) -> Body:
        yield 2.0 * self.lease_ms  # by now every lease has run out, whoever's clock it came from
        for id in self.ids:
            code = yield from self._tried(id)
            if code == "outcome-unknown" and self.kind == "manual":
                self._resolve(id)
                code = yield from self._tried(id)
            if code == "key-expired":  # it says no only while retention lasts
                yield float(self.policy.retention_ms)
                code = yield from self._tried(id)
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
        return "" if answer is not None else "no answer"

    def _resolve(self, id: bytes) -> None:
        """A person finds what is in doubt, asks downstream, and says what happened."""
        found = [record for record in self.store.find(IN_DOUBT) if record.id == id]
        self.world.require(found, "what is in doubt is visible")
        for record in found:
            effects = self.downstream.effects.get(life_of(record))
            ended = completed(record, effects[0].response) if effects else failed(record)
            self.store.swap([Swap(id, record.version, ended)], "a person")
