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
    """What became of one guarded request."""

    outcome: Literal["executed", "replayed", "refused", "failed"]
    reference: str
    label: str
    scope: str
    attempt: int
    code: str  # the problem's code where it was refused, else ""
    duration_ms: int


Observer: TypeAlias = Callable[[Decision], object]


def log_decision(decision: Decision) -> None:
    """The log line: what happened, to which operation, and how long it took."""
    level = logging.WARNING if decision.code else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "%s %s %s attempt=%d %s%dms",
            decision.outcome,
            decision.reference,
            decision.label,
            decision.attempt,
            decision.code + " " if decision.code else "",
            decision.duration_ms,
            extra=decision._asdict(),
        )
