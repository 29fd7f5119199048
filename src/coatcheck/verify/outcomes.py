"""What becomes of an operation that meets a fault, for every fault, point and recovery.

The table in `docs/recovery.md` is made from this, and `tests/faults` holds every cell to it, with
real processes and signals, and effects that are counted outside of the system.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeAlias

from coatcheck.verify.crash import POINTS, Point

Fault: TypeAlias = Literal[
    "kill", "freeze", "exception", "cancellation", "store killed", "store frozen", "client gone"
]
Recovery: TypeAlias = Literal["retry", "reconcile", "manual", "transaction", "steps"]
Place: TypeAlias = Literal["SQLite", "PostgreSQL", "Redis", "async", "sync"]

# Every cell is run on each of these stores, in each of these kinds of code.
STORES: tuple[Place, ...] = ("SQLite", "PostgreSQL", "Redis")
CODE: tuple[Place, ...] = ("async", "sync")

FAULTS: Mapping[Fault, str] = {
    "kill": "kill -9",
    "freeze": "stopped for longer than its lease, and woken when a retry has been answered",
    "exception": "the handler raises",
    "cancellation": "the handler's task is cancelled",
    "store killed": "the store is killed, and started again",
    "store frozen": "the store does not answer for a second",
    "client gone": "the client hangs up, and its server cancels the request",
}
RECOVERIES: Mapping[Recovery, str] = {
    "retry": 'recovery="retry"',
    "reconcile": 'recovery="reconcile"',
    "manual": 'recovery="manual"',
    "transaction": 'mode="transaction"',
    "steps": "a step at most once, with a probe",
}


class Outcome(NamedTuple):
    """How often the effect has happened when all is over, and what the last retry gets."""

    effects: int
    end: Literal["answer", "in doubt"] = "answer"

    def __str__(self) -> str:
        times = {0: "no effect", 1: "one effect", 2: "**two effects**"}[self.effects]
        return f"{times}, {'answered' if self.end == 'answer' else 'in doubt'}"


ONE = Outcome(1)
TWO = Outcome(2)

_ALL_ONE: Mapping[Recovery, Outcome] = dict.fromkeys(RECOVERIES, ONE)

# By fault and point: where it is not the same for all, what differs.
_DIFFERS: Mapping[tuple[Fault, Point], Mapping[Recovery, Outcome]] = {
    ("kill", "after claim"): {"manual": Outcome(0, "in doubt")},
    ("kill", "after effect"): {"retry": TWO, "manual": Outcome(1, "in doubt")},
    # Who wakes up goes on where it was: only a step or a transaction keeps it from the effect.
    ("freeze", "after claim"): {"retry": TWO, "reconcile": TWO},
    ("freeze", "after effect"): {"retry": TWO},
    # It has written down that it begins, and sleeps in between: only a fence would keep it.
    ("freeze", "in step"): {"steps": TWO},
    ("exception", "after claim"): {"manual": Outcome(0, "in doubt")},
    ("exception", "after effect"): {"retry": TWO, "manual": Outcome(1, "in doubt")},
    ("cancellation", "after claim"): {"manual": Outcome(0, "in doubt")},
    ("cancellation", "after effect"): {"retry": TWO, "manual": Outcome(1, "in doubt")},
}
_IN_STEPS: tuple[Point, ...] = ("in step", "after step")
# A handler can only raise or be cancelled while it runs.
_IN_HANDLER: tuple[Point, ...] = ("after claim", "in step", "after effect", "after step")
_POINTS: Mapping[Fault, tuple[Point, ...]] = {
    "exception": _IN_HANDLER,
    "cancellation": _IN_HANDLER,
    # Of the completion a client never knows, before its response comes.
    "client gone": ("before claim", *_IN_HANDLER, "before response"),
}


def outcome_of(fault: Fault, point: Point, recovery: Recovery) -> Outcome | None:
    """What becomes of it; None where there is no such thing."""
    if point not in _POINTS.get(fault, POINTS):
        return None
    if point in _IN_STEPS and recovery != "steps":
        return None
    return {**_ALL_ONE, **_DIFFERS.get((fault, point), {})}[recovery]


class Absent(NamedTuple):
    """What cannot be *where*: a fault, a recovery, or both together."""

    where: Place
    fault: Fault | None
    recovery: Recovery | None
    why: str

    def is_met_by(self, fault: Fault, recovery: Recovery, places: Collection[Place]) -> bool:
        """This is one of those."""
        return (
            self.where in places
            and self.fault in (None, fault)
            and self.recovery in (None, recovery)
        )

    def __str__(self) -> str:
        words = [FAULTS[self.fault]] if self.fault else []
        words += [f"`{self.recovery}`"] if self.recovery else []
        where = f"{self.where} code" if self.where in CODE else self.where
        return f"| {', with '.join(words)} | {where} | {self.why} |"


ABSENT = (
    Absent("SQLite", "store killed", None, "a file is no server that could be killed"),
    Absent(
        *("SQLite", "store frozen", "transaction"),
        "the transaction itself has the file, and nobody else can keep it from it",
    ),
    Absent("Redis", None, "transaction", "it is no place for the application's own rows"),
    Absent("sync", "cancellation", None, "a thread cannot be cancelled"),
    Absent("sync", "client gone", None, "a WSGI server does not cancel: the handler runs on"),
)


def is_run(fault: Fault, recovery: Recovery, *places: Place) -> bool:
    """Whether there is such a thing at all of *places*."""
    return not any(absent.is_met_by(fault, recovery, places) for absent in ABSENT)


def absences() -> str:
    """What is not run where, for the documentation."""
    return "\n".join(["| what is not run | where | why |", "|---|---|---|", *map(str, ABSENT), ""])


def table() -> str:
    """All of it, for the documentation."""
    lines: list[str] = []
    for fault, words in FAULTS.items():
        lines += [f"### {words[0].upper()}{words[1:]}", ""]
        lines += ["| " + " | ".join(["", *(f"`{r}`" for r in RECOVERIES)]) + " |"]
        lines += ["|" + "---|" * (1 + len(RECOVERIES))]
        for point in POINTS:
            cells = [outcome_of(fault, point, recovery) for recovery in RECOVERIES]
            if any(cells):
                told = ["–" if cell is None else str(cell) for cell in cells]
                lines.append("| " + " | ".join([point, *told]) + " |")
        lines.append("")
    return "\n".join(lines)
