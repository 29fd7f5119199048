"""The fixture that explores; the number of states is reported at the end of the run."""

import gc

import pytest

from .search import Explored, explore
from .world import Scenario


@pytest.fixture
def explored(request, record_property):
    """Explore a scenario, and print and record how many states it has."""

    def count(scenario: Scenario) -> Explored:
        # Worlds have no reference cycles; to search for some takes a sixth of the time.
        gc.disable()
        try:
            seen = explore(scenario)
        finally:
            gc.enable()
        print(f"\n{request.node.name}: {seen.states:,} states in {seen.schedules:,} schedules")
        record_property("explored", list(seen))
        return seen

    return count
