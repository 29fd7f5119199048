"""Counters of what coatcheck does, without any library."""

from collections import Counter

from coatcheck import AsyncEngine
from coatcheck.telemetry import Decision, Event

decisions: Counter[tuple[str, str, str]] = Counter()
events: Counter[str] = Counter()


def count_decision(decision: Decision) -> None:
    decisions[decision.label, decision.outcome, decision.code] += 1


def count_event(event: Event) -> None:
    events[type(event).__name__] += 1


engine = AsyncEngine("memory://", observers=[count_decision], listeners=[count_event])
