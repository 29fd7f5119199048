"""The one fixture of the explorer: what it visits is counted, and told at the end of the run."""

import gc

import pytest

from .search import Explored, explore
from .world import Scenario


@pytest.fixture
def explored(request, record_property):
    """Explore a scenario, say how much that was (`-s` shows it), and have it counted."""

    def count(scenario: Scenario) -> Explored:
        # Worlds are values and make no circles; to look for some takes a sixth of the time.
        gc.disable()
        try:
            seen = explore(scenario)
        finally:
            gc.enable()
        print(f"\n{request.node.name}: {seen.states:,} states in {seen.schedules:,} schedules")
        record_property("explored", list(seen))
        return seen

    return count
