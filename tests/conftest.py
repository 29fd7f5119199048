"""What every test may rely on: Hypothesis judges results, never the speed of the machine."""

import gc
import os

import pytest
from hypothesis import settings

# Before anything imports it: only then does pytest show what an assertion in there compared.
pytest.register_assert_rewrite("tests.server.laws.api", "tests.support.http")

from tests.support.engines import Guards  # noqa: E402 - after the registration

settings.register_profile("house", deadline=None, print_blob=True)
# With CI set, Hypothesis loads a profile of its own: the same examples every time, and no deadline.
if not os.environ.get("CI"):
    settings.load_profile("house")


@pytest.fixture(params=["sync", "async"])
def guards(request):
    """The sync and the async engine, behind the same methods."""
    guards = Guards(is_async=request.param == "async")
    yield guards
    guards.close()


def pytest_collection_finish():
    """Nine thousand tests stay to the end; who looks for garbage need not look through them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Say how much `tests/explore` visited; it travels with the reports, also from xdist."""
    passed = terminalreporter.stats.get("passed", ())
    seen = [v for report in passed for name, v in report.user_properties if name == "explored"]
    if seen:
        states, schedules = sum(s[0] for s in seen), sum(s[1] for s in seen)
        terminalreporter.write_line(
            f"explored {states:,} states in {schedules:,} schedules of {len(seen)} scenarios"
        )
