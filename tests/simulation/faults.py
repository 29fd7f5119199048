"""The faults: what goes wrong, how often, and how long it lasts.

All of it is measured in leases: a fault that is shorter than a lease must go unnoticed, and a
longer one must do no harm.

Three things the faults may not do, because the protocol does not promise to outlive them:
- bring a message that is older than the margin, or let a process be away for longer: versions of a
  new generation come from the clock, and a claim that old could bring one back;
- make a process's clock run ahead by a good part of the lease: no process can tell a lease that ran
  out from a clock that runs ahead. So a process does not freeze while it asks the store for the time
  (`Process.look`), and time-outs are shorter than leases;
- take back what the store has acknowledged.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Faults(NamedTuple):
    """What goes wrong."""

    latency_ms: float  # of a message, one way
    timeout_ms: float  # how long a process waits for an answer
    # Shares of all messages to the store.
    slow: float = 0.0  # takes up to half of the time-out, and goes unnoticed
    lost: float = 0.0
    deaf: float = 0.0  # takes effect, but the answer is lost
    late: float = 0.0  # arrives after its sender has given up
    twice: float = 0.0
    late_ms_max: float = 0.0
    # How often these happen, and how long processes and the store are away.
    crashes: int = 0
    freezes: int = 0
    outages: int = 0
    struck: float = 0.0  # share of all executions whose process crashes or freezes meanwhile
    away_ms_max: float = 0.0
    # Shares of all executions.
    fails_early: float = 0.0  # before anything happened, and it says so
    fails_late: float = 0.0  # in the middle, and its effect is not known
    not_kept: float = 0.0  # its answer is too large to keep
    # Share of all requests whose caller has too many keys already.
    crowded: float = 0.0

    @property
    def is_calm(self) -> bool:
        """Nothing outlasts a lease: a living executor keeps its claim."""
        return not (self.lost or self.deaf or self.late or self.fails_late or self.away_ms_max)


class Broken(NamedTuple):
    """Parts that are broken on purpose, for the mutants: the rules must notice."""

    store_compares_versions: bool = True
    store_keeps_what_it_acknowledged: bool = True
    rows_are_locked: bool = True
    downstream_fences: bool = True
    keys_are_derived: bool = True
    reconciler_tells_the_truth: bool = True
    probes_tell_the_truth: bool = True
    engine_asks_the_store_for_the_time: bool = True
    freezes_while_it_asks_the_time: bool = False


SOUND = Broken()

# 0.12 leases: with the answer, the beat before it and the clock's error well below half a lease,
# which is what remains of one when its renewal is due at the latest.
TIMEOUT_LEASES_MAX = 0.12
# Freezes, outages and late messages: longer than several leases, and shorter than the margin.
AWAY_LEASES_MAX = 4.0
# How far ahead a process's clock may run: half of a time-out when it looks, a step of the store's
# clock at a failover, and what it drifts.
STEP_LEASES_MAX = 0.05
AHEAD_LEASES_MAX = TIMEOUT_LEASES_MAX / 2 + 2 * STEP_LEASES_MAX + 0.1


def drawn(random: Random, lease_ms: float) -> Faults:
    """Some faults; each kind is there or not, so that few hide behind many."""
    timeout_ms = lease_ms * random.uniform(0.03, TIMEOUT_LEASES_MAX)
    latency_ms = timeout_ms * random.uniform(0.01, 0.2)
    calm = Faults(latency_ms, timeout_ms, slow=random.choice((0.0, 0.2)))
    calm = calm._replace(fails_early=random.choice((0.0, 0.2)))
    calm = calm._replace(crowded=random.choice((0.0, 0.1)))
    if random.random() < 0.15:
        return calm

    def maybe(most: float) -> float:
        return random.uniform(0, most) if random.random() < 0.5 else 0.0

    away_ms_max = lease_ms * random.uniform(0.3, AWAY_LEASES_MAX)
    return calm._replace(
        lost=maybe(0.15),
        deaf=maybe(0.2),
        late=maybe(0.1),
        twice=maybe(0.1),
        late_ms_max=away_ms_max,
        crashes=random.choice((0, 0, 1, 2, 4)),
        freezes=random.choice((0, 0, 1, 2, 5)),
        outages=random.choice((0, 0, 0, 1, 2)),
        struck=random.choice((0.0, 0.0, 0.3, 0.6)),
        away_ms_max=away_ms_max,
        fails_late=maybe(0.25),
        not_kept=random.choice((0.0, 0.0, 0.1)),
    )
