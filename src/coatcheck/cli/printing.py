"""Printing: records for people, and everything for programs. Never what a response contains."""

from __future__ import annotations

import json

from coatcheck.core.facts import facts_of, story_of
from coatcheck.core.record import COMPLETED, Record


def portrait(record: Record, now_ms: int) -> str:
    """*record* for people."""
    facts = facts_of(record, now_ms)
    answer = facts.pop("response")
    is_stuck = facts.pop("is_lease_over")
    for name in ("id", "steps", "notes", "progress", "resolutions"):
        facts.pop(name)
    if facts["lease_until"] is None:
        facts.pop("lease_until")
    elif is_stuck:
        facts["lease_until"] += "  (over: the next retry takes over)"
    if answer is not None:
        kind = "a value" if answer["status"] is None else f"status {answer['status']}"
        facts["response"] = f"{kind}, {answer['bytes']:,} bytes"
    elif record.state == COMPLETED:
        facts["response"] = "not kept"
    lines = [(name.replace("_", " "), str(value)) for name, value in facts.items()]
    return "\n".join(f"{name:<12} {printable(told)}" for name, told in [*lines, *story_of(record)])


def printable(text: str) -> str:
    """*text* without what would make a terminal do something: it came from a client."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(document: object) -> None:
    """Answer a program."""
    print(json.dumps(document, indent=2, default=str))
