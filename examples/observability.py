"""Structured logs and counters of what coatcheck does."""

import json
import logging
from collections import Counter

from coatcheck import AsyncEngine
from coatcheck.telemetry import Decision, Event


class JsonFormatter(logging.Formatter):
    """One JSON object for each line."""

    PARTS = ("outcome", "reference", "label", "scope", "attempt", "code", "duration_ms")

    def format(self, record: logging.LogRecord) -> str:
        parts = {name: getattr(record, name) for name in self.PARTS if hasattr(record, name)}
        return json.dumps({"level": record.levelname, "message": record.getMessage(), **parts})


decisions: Counter[tuple[str, str, str]] = Counter()
events: Counter[str] = Counter()


def count_decision(decision: Decision) -> None:
    decisions[decision.label, decision.outcome, decision.code] += 1


def count_event(event: Event) -> None:
    events[type(event).__name__] += 1


engine = AsyncEngine("memory://", observers=[count_decision], listeners=[count_event])
