"""The outcome of an operation for every fault, point and recovery.

`docs/generate.py` writes the table in `docs/recovery.md` from this. `tests/faults/test_matrix.py`
checks every cell with real processes and signals, and counts the effects outside of the system.
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

# Every cell runs on each of these stores, in async and in sync code.
STORES: tuple[Place, ...] = ("SQLite", "PostgreSQL", "Redis")
CODE: tuple[Place, ...] = ("async", "sync")

FAULTS: Mapping[Fault, str] = {
    "kill": "kill -9",
    "freeze": "stopped for longer than its lease, and continued after a retry was answered",
    "exception": "the handler raises",
    "cancellation": "the handler's task is cancelled",
    "store killed": "the store is killed and restarted",
    "store frozen": "the store does not answer for a second",
    "client gone": "the client disconnects, and the server cancels the request",
}
RECOVERIES: Mapping[Recovery, str] = {
    "retry": 'recovery="retry"',
    "reconcile": 'recovery="reconcile"',
    "manual": 'recovery="manual"',
    "transaction": 'mode="transaction"',
    "steps": "a step at most once, with a probe",
}


class Outcome(NamedTuple):
    """How often the effect has happened in the end, and what the last retry gets."""

    effects: int
    end: Literal["answer", "in doubt"] = "answer"

    def __str__(self) -> str:
        times = {0: "no effect", 1: "one effect", 2: "**two effects**"}[self.effects]
        return f"{times}, {'answered' if self.end == 'answer' else 'in doubt'}"


ONE = Outcome(1)
TWO = Outcome(2)

_ALL_ONE: Mapping[Recovery, Outcome] = dict.fromkeys(RECOVERIES, ONE)

# By fault and point: the recoveries with another outcome than one effect and an answer.
_DIFFERS: Mapping[tuple[Fault, Point], Mapping[Recovery, Outcome]] = {
    ("kill", "after claim"): {"manual": Outcome(0, "in doubt")},
    ("kill", "after effect"): {"retry": TWO, "manual": Outcome(1, "in doubt")},
    # A continued process goes on where it was: only a step or a transaction prevents its effect.
    ("freeze", "after claim"): {"retry": TWO, "reconcile": TWO},
    ("freeze", "after effect"): {"retry": TWO},
    # It was stopped after the store has recorded that the step begins: only a fence at the effect
    # would prevent it.
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
    # A client sees no difference between "after complete" and "before response".
    "client gone": ("before claim", *_IN_HANDLER, "before response"),
}


def outcome_of(fault: Fault, point: Point, recovery: Recovery) -> Outcome | None:
    """The outcome; None if the combination does not exist."""
    if point not in _POINTS.get(fault, POINTS):
        return None
    if point in _IN_STEPS and recovery != "steps":
        return None
    return {**_ALL_ONE, **_DIFFERS.get((fault, point), {})}[recovery]


class Absent(NamedTuple):
    """A fault, a recovery or a combination of both that does not exist *where*."""

    where: Place
    fault: Fault | None
    recovery: Recovery | None
    why: str

    def matches(self, fault: Fault, recovery: Recovery, places: Collection[Place]) -> bool:
        """The combination is one of those."""
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
    Absent("SQLite", "store killed", None, "there is no server process to kill"),
    Absent(
        *("SQLite", "store frozen", "transaction"),
        "the transaction holds the lock of the file, so nothing else can block it",
    ),
    Absent("Redis", None, "transaction", "the application keeps no rows of its own there"),
    Absent("sync", "cancellation", None, "a thread cannot be cancelled"),
    Absent("sync", "client gone", None, "a WSGI server does not cancel the handler"),
)


def is_run(fault: Fault, recovery: Recovery, *places: Place) -> bool:
    """Whether the combination exists in *places*."""
    return not any(absent.matches(fault, recovery, places) for absent in ABSENT)


def absences() -> str:
    """The combinations that do not exist, for the documentation."""
    return "\n".join(["| what is not run | where | why |", "|---|---|---|", *map(str, ABSENT), ""])


def table() -> str:
    """All outcomes, for the documentation."""
    lines: list[str] = []
    for fault, words in FAULTS.items():
        lines += [f"### {words[0].upper()}{words[1:]}", ""]
        lines += ["| " + " | ".join(["", *(f"`{r}`" for r in RECOVERIES)]) + " |"]
        lines += ["|" + "---|" * (1 + len(RECOVERIES))]
        for point in POINTS:
            cells = [outcome_of(fault, point, recovery) for recovery in RECOVERIES]
            if any(cells):
                texts = ["–" if cell is None else str(cell) for cell in cells]
                lines.append("| " + " | ".join([point, *texts]) + " |")
        lines.append("")
    return "\n".join(lines)
