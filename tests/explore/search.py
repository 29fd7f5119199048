"""The search: every state once, every schedule counted, and the shortest way to a violation."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from coatcheck.core.record import STATE_NAMES, Record

from .rules import Violation
from .world import NOW_MS, Scenario, World, steps


class Explored(NamedTuple):
    """How much was visited; a schedule is one way from the start to an end."""

    states: int
    schedules: int
    ends: int


def explore(scenario: Scenario) -> Explored:
    """Visit every state that *scenario* allows; raises `Violation` with the shortest schedule."""
    schedules: dict[World, int] = {}
    ends = 0

    def visit(world: World) -> int:
        nonlocal ends
        following = steps(scenario, world)
        count = 0
        for _, after in following:
            known = schedules.get(after)
            count += visit(after) if known is None else known
        if not following:
            ends += 1
            count = 1
        schedules[world] = count
        return count

    try:
        total = visit(scenario.start())
    except Violation as violation:
        raise Violation(described(violation, shortest(scenario))) from None
    return Explored(len(schedules), total, ends)


def shortest(scenario: Scenario) -> list[tuple[Any, ...]]:
    """The shortest schedule that breaks a promise, with what was promised; empty: there is none."""
    start = scenario.start()
    came_from: dict[World, tuple[World, tuple[Any, ...]] | None] = {start: None}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        try:
            following = steps(scenario, world)
        except Violation as violation:
            return [*_way_to(came_from, world), ("!", str(violation))]
        for label, after in following:
            if after not in came_from:
                came_from[after] = (world, label)
                queue.append(after)
    return []


def _way_to(
    came_from: dict[World, tuple[World, tuple[Any, ...]] | None], world: World
) -> list[tuple[Any, ...]]:
    way = []
    while (step := came_from[world]) is not None:
        world, label = step
        way.append((world.now_ms - NOW_MS, *label))
    return way[::-1]


def described(violation: Violation, schedule: list[tuple[Any, ...]]) -> str:
    """The violation and its schedule, one step a line."""
    lines = [f"{violation}; the shortest schedule:"]
    lines += ["  ".join(_words(part) for part in step) for step in schedule]
    return "\n".join(lines)


def _words(part: object) -> str:
    if not isinstance(part, Record):
        return str(part)
    name = STATE_NAMES[part.state] if part.version else "gone"
    return f"{name} v{part.version - NOW_MS} attempt {part.attempt} of {part.nonce}"
