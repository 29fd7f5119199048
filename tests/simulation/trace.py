"""A trace for operators: one line for each thing that happened, with its time."""

from __future__ import annotations

from coatcheck.core.policy import Policy
from coatcheck.core.record import STATE_NAMES, Record

from .store import EPOCH_MS
from .world import Trace


def readable(trace: Trace) -> str:
    """*trace* as a page; times are seconds since the beginning."""
    return "\n".join(
        f"{now_ms / 1_000:10.3f}  {who!s:16}  {'  '.join(map(_words, what))}"
        for now_ms, who, *what in trace
    )


def _words(part: object) -> str:
    if isinstance(part, Policy):
        times = (part.lease, part.wait, part.window, part.margin)
        lease, wait, window, margin = (f"{seconds} s" for seconds in times)
        return f"lease {lease}, wait {wait}, window {window}, margin {margin}"
    if not isinstance(part, Record):
        return str(part)
    if not part.version:
        return "gone"
    name = part.id[-1:].decode()
    since = [f"{(ms - EPOCH_MS) / 1_000:.3f}" for ms in (part.version, part.created_ms)]
    state = STATE_NAMES[part.state]
    if part.lease_until_ms:
        state += f" until {(part.lease_until_ms - EPOCH_MS) / 1_000:.3f}"
    return (
        f"[key {name}: {state}, version {since[0]}, "
        f"attempt {part.attempt} of {part.nonce % 10_000:04}, generation {since[1]}]"
    )
