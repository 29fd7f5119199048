"""The one fixture of the explorer: what it visits is counted, and told at the end of the run."""

import pytest

from .search import Explored, explore
from .world import Scenario


@pytest.fixture
def explored(record_property):
    """Explore a scenario, and have it counted in the summary."""

    def count(scenario: Scenario) -> Explored:
        seen = explore(scenario)
        record_property("explored", list(seen))
        return seen

    return count
