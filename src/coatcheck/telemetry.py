"""Telemetry: one decision, one event, one log line. No bodies, and keys only as references.

An observer is a function of a `Decision`; engines call it once for each request that was guarded.
The log line goes to the logger "coatcheck" with its parts as attributes, so that structured
handlers need not parse it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

logger = logging.getLogger("coatcheck")


class Decision(NamedTuple):
    """
    What became of one guarded request or call; what observers get.

    "executed": it ran here, now; "replayed": it had its answer already; "refused": its answer is a
    problem, and *code* says which; "failed": its handler raised, or its transaction was undone.
    """

    outcome: Literal["executed", "replayed", "refused", "failed"]
    # For people, and for `coatcheck lookup`; "" where nothing could be made of its key.
    reference: str
    label: str  # "POST /orders", or what a guarded function is called
    scope: str  # the caller's digest
    attempt: int  # 1 for the first; 0 where it was refused or has failed
    code: str  # the problem's code where it was refused, else ""
    duration_ms: int


# Called in the thread or on the event loop of the request, so it must not take long. What it raises
# is logged and goes no further.
Observer: TypeAlias = Callable[[Decision], object]


def log_decision(decision: Decision) -> None:
    """The log line: what happened, to which operation, and how long it took."""
    level = logging.WARNING if decision.code else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "%s %s %s attempt=%d %s%dms",
            decision.outcome,
            decision.reference or "-",
            decision.label,
            decision.attempt,
            decision.code + " " if decision.code else "",
            decision.duration_ms,
            extra=decision._asdict(),
        )
