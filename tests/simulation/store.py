"""The store: the contract's compare-and-swap, at the other end of an unreliable network.

A request may be lost, or its answer; it may come late, or twice; the store may be away. What it has
acknowledged it keeps. Its clock rules, and steps a little when another node takes its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.core.record import GONE, RUNNING, Record, State, Swap, is_retention_over
from coatcheck.errors import StoreUnavailable

from .faults import Broken, Faults
from .rules import Rules
from .world import Pause, Resume, World

# Where the store's clock starts: versions come from it, and look like those of real stores.
EPOCH_MS = 1_700_000_000_000


class SimulatedStore:
    """Records, a clock, and the way to them."""

    def __init__(self, world: World, rules: Rules, broken: Broken) -> None:
        self.world = world
        self.rules = rules
        self.broken = broken
        self.faults = Faults(0.0, 0.0)
        self.records: dict[bytes, Record] = {}
        self.is_up = True
        self._step_ms = 0.0  # how far the node that serves now is from the first
        self._kept: dict[bytes, Record] = {}  # for a store that forgets, which must be noticed

    # --- on the way ---------------------------------------------------------------------------

    def ask(self, act: Callable[[], object], *, is_repeatable: bool = True) -> Pause:
        """What a task yields to have *act* done here, and to get its result."""
        return functools.partial(self._send, act, is_repeatable)

    def _send(self, act: Callable[[], object], is_repeatable: bool, resume: Resume) -> None:
        world, faults = self.world, self.faults
        there_ms = self.delay_ms()
        kind = world.random.random()
        kinds = (
            (faults.lost, "is lost", None),
            (faults.deaf, "answer is lost", there_ms),
            (faults.late, "is late", faults.timeout_ms + world.between(0, faults.late_ms_max)),
        )
        for share, name, delay_ms in kinds:
            if kind < share:
                world.happened("network", name)
                if delay_ms is not None:
                    world.later(delay_ms, self._arrive, act, None)
                unsure = StoreUnavailable("no answer", is_ambiguous=True)
                world.later(faults.timeout_ms, resume, None, unsure)
                return
            kind -= share
        world.later(there_ms, self._arrive, act, resume)
        if is_repeatable and kind < faults.twice:
            world.happened("network", "comes twice")
            world.later(there_ms + world.between(0, faults.late_ms_max), self._arrive, act, None)

    def delay_ms(self) -> float:
        """How long a message is on its way; both ways are always less than the time-out."""
        faults = self.faults
        if faults.slow and self.world.chance(faults.slow):
            return self.world.between(0, 0.49 * faults.timeout_ms)
        return faults.latency_ms * self.world.between(0.5, 2)

    def _arrive(self, act: Callable[[], object], resume: Resume | None) -> None:
        result: Any = None
        error = None
        if not self.is_up:
            self.world.happened("store", "is away")
            error = StoreUnavailable("connection refused")
        else:
            result = act()
        if resume is not None:
            self.world.later(self.delay_ms(), resume, result, error)

    # --- what it is asked ---------------------------------------------------------------------

    def now_ms(self) -> int:
        """The clock that rules."""
        return EPOCH_MS + int(self.world.now_ms + self._step_ms)

    def get(self, id: bytes) -> Record:
        """The current record."""
        return self.records.get(id, GONE)

    def swap(self, swaps: Sequence[Swap], writer: object) -> list[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return [self._swap(swap, writer) for swap in swaps]

    def _swap(self, swap: Swap, writer: object) -> Record | None:
        current = self.records.get(swap.id, GONE)
        record = swap.record
        assert record is not None
        is_end = record.state != RUNNING and current is not GONE
        is_blind = is_end and not self.broken.store_compares_versions
        if current.version != swap.expected and not is_blind:
            self.world.happened(writer, "loses", record, current)
            return current
        self.put(record, writer)
        return None

    def put(self, record: Record, writer: object) -> None:
        """Store *record*."""
        before = self.records.get(record.id)
        move = self.rules.accepted(before, record, writer, self.now_ms())
        self.records[record.id] = record
        self.world.happened(writer, move, record)

    def sweep(self, now_ms: int) -> int:
        """Forget what retention allows, as the sweeper's clock says."""
        over = [r for r in self.records.values() if is_retention_over(r, now_ms)]
        for record in over:
            self.rules.swept(record, self.now_ms())
            self.world.happened("store", "sweep", record)
            del self.records[record.id]
        return len(over)

    def find(self, *states: State) -> list[Record]:
        """What an operator sees."""
        return [record for record in self.records.values() if record.state in states]

    # --- what becomes of it -------------------------------------------------------------------

    def fail(self, away_ms: float, step_ms: float) -> None:
        """Go away, and come back with another clock."""
        self.is_up = False
        self.world.happened("store", "fails")
        self.world.later(away_ms, self._recover, step_ms)

    def _recover(self, step_ms: float) -> None:
        self.is_up = True
        self._step_ms = step_ms
        if not self.broken.store_keeps_what_it_acknowledged:
            self.records = dict(self._kept)
        self._kept = dict(self.records)
        self.world.happened("store", "is back")
