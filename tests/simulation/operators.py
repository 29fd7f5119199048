"""Operators find what is in doubt, ask downstream, and decide what happened or run it again (L6).

They do so at any time, several at once, while clients, zombies and the background reconciler are
at it. What they do not do is lie: they look at the record first, then ask, and decide if it has not
changed meanwhile. Whether there is anything to decide they leave to production. Some call what has
let its lease run out abandoned, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Snapshot
from coatcheck.core.record import Record, is_lease_over
from coatcheck.errors import StoreUnavailable

from .served import ServedRequest
from .world import Body, Pause

if TYPE_CHECKING:
    from .process import Process
    from .stepping import Stepping


def decide(
    process: Process, id: bytes, stepping: Stepping | None = None, patience_ms: float = 0.0
) -> Body:
    """
    One operator looks at *id*, at the console of *process*, and decides about it.

    With *patience_ms* everything that is still on its way arrives before downstream is asked.
    """
    try:
        yield from process.look()
        served = ServedRequest(process, id, b"", is_operator=True)
        current = yield from served.current(id)
        yield patience_ms
        if not current.version:
            return
        outcome = yield from _found_out(process, current, stepping)
        again = yield from served.current(id)
        if again.version == current.version:
            yield from _decided(served, Snapshot(again, process.now_ms()), outcome)
    except StoreUnavailable:
        process.world.happened("an operator", "cannot decide now")


def _found_out(
    process: Process, record: Record, stepping: Stepping | None
) -> Generator[Pause, Any, Outcome | None]:
    """What became of the attempts so far, as far as downstream knows; None: it was not asked."""
    handlers = process.setting.handlers
    if not is_lease_over(record, process.now_ms()):
        return None
    if stepping is not None:
        return stepping.found(record)
    yield handlers.delay_ms()
    response = handlers.downstream.ask(record._replace(attempt=record.attempt + 1))
    yield handlers.delay_ms()
    return (
        Outcome(OutcomeKind.RELEASE)
        if response is None
        else Outcome(OutcomeKind.COMPLETE, response)
    )


def _decided(
    served: ServedRequest, seen: Snapshot, found: Outcome | None
) -> Generator[Pause, Any, None]:
    world = served.process.world
    abandoned = found is not None and world.chance(0.5)
    outcome = found or Outcome(OutcomeKind.RELEASE)
    if outcome.kind is OutcomeKind.RELEASE and world.chance(0.4):
        yield from served.rerun(seen, abandoned=abandoned)
    else:
        yield from served.resolve(seen, outcome, abandoned=abandoned)
