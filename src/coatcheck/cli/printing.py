"""Printing of records, as text and as JSON; never the content of a response."""

from __future__ import annotations

import json

from coatcheck.core.describe import facts_of, story_of
from coatcheck.core.record import COMPLETED, Record


def describe(record: Record, now_ms: int) -> str:
    """Return *record* as text."""
    facts = facts_of(record, now_ms)
    response = facts.pop("response")
    is_expired = facts.pop("is_lease_over")
    for name in ("id", "steps", "notes", "progress", "resolutions"):
        facts.pop(name)
    if facts["lease_until"] is None:
        facts.pop("lease_until")
    elif is_expired:
        facts["lease_until"] += "  (expired: the next retry takes over)"
    if response is not None:
        kind = "a value" if response["status"] is None else f"status {response['status']}"
        facts["response"] = f"{kind}, {response['bytes']:,} bytes"
    elif record.state == COMPLETED:
        facts["response"] = "not kept"
    lines = [(name.replace("_", " "), str(value)) for name, value in facts.items()]
    return "\n".join(f"{name:<12} {printable(text)}" for name, text in [*lines, *story_of(record)])


def printable(text: str) -> str:
    """Return *text* with control characters escaped: it came from a client."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(document: object) -> None:
    """Print *document* as JSON."""
    print(json.dumps(document, indent=2, default=str))
