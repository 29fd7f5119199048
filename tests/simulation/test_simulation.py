"""A few thousand schedules, the same every time; `make simulate` runs others, as many as you like.

What breaks a promise prints its seed, and how to see everything that happened there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import explained, run
from .schedule import KINDS

ROOT = Path(__file__).resolve().parents[2]

# A schedule ends at a broken promise, and crashed processes have tasks that never end. The garbage
# collector closes these generators in any order: one may be closed while it closes another.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object:pytest.PytestUnraisableExceptionWarning"
)

# For each kind of route: about two seconds. A saga has more steps, and half as many schedules.
SCHEDULES = 450

# What must have happened at least once, or the schedules were too easy.
EVERYWHERE = {
    *("crashes", "freezes", "is suspended", "fails", "is away", "is back", "sweep"),
    *("is lost", "answer is lost", "is late", "comes twice"),
    *("waits", "recalls", "new generation", "refuses", "an effect"),
    *("gets: Executed", "gets: Replay", "gets: in-progress", "gets: key-reused"),
    *("gets: key-expired", "gets: too-many-waiting", "gets: too-many-keys"),
}
IN_RECORDS = {
    *("renew", "complete", "release", "retry", "loses", "meets its own record"),
    *("a heartbeat fails", "leaves its completion to the heartbeat", "does not answer"),
}
ASKED = {
    *("take over", "mark in doubt", "resolve by running again", "recovers"),
    *("is asked", "says yes", "says no", "does not know"),
}
SEEN = {
    "retry": {*IN_RECORDS, "take over"},
    "derived": {*IN_RECORDS, "take over", "knows that key"},
    "reconcile": {*IN_RECORDS, *ASKED, "a late effect"},
    "fenced": {*IN_RECORDS, *ASKED, "refuses an old fence"},
    "manual": {
        *(*IN_RECORDS, "mark in doubt", "recovers", "gets: outcome-unknown"),
        *("resolve as happened", "resolve as not happened"),
    },
    "transaction": {"claims in a transaction", "rolls back"},
    "deferred": {
        *(*IN_RECORDS, *ASKED, "defers", "takes it back", "delivers", "takes up work"),
        *("defer", "gets: Accepted", "decides"),
    },
    "resolved": {
        *(*IN_RECORDS, *ASKED, "decides", "decides too late", "cannot decide now"),
        *("resolve as happened", "resolve as not happened"),
    },
    "steps": {
        *(
            *IN_RECORDS,
            "take over",
            "mark in doubt",
            "takes a step",
            "insists on a step",
            "decides",
        ),
        *("is asked", "says yes", "says no", "does not know", "gets: outcome-unknown"),
    },
    "saga": {*IN_RECORDS, "take over", "calls", "undoes", "says yes", "says no"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_breaks_a_promise(kind):
    """L1, L2, L3, L5, L6, L7, L8, L9, L10, T1, T2, T3: see `rules` for what is promised of each kind."""
    total = run(range(SCHEDULES // 2 if kind == "saga" else SCHEDULES), kind)
    print(f"\n{kind}: {total.schedules:,} schedules of {total.steps:,} steps")
    assert sorted((EVERYWHERE | SEEN[kind]) - set(total.counts)) == []


def test_a_seed_gives_the_same_schedule_in_every_process():
    """A seed gives the same trace everywhere; also where sets have another order."""
    shown = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", "7", "--kind", "reconcile"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    text, is_kept = explained(7, "reconcile")
    assert is_kept
    assert shown.stdout == f"{text}\n"
