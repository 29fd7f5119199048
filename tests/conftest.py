"""What every test may rely on: Hypothesis judges results, never the speed of the machine."""

import gc
import logging
import os

import pytest
from hypothesis import settings

# Before anything imports it: only then does pytest show what an assertion in there compared.
pytest.register_assert_rewrite("tests.server.laws.api", "tests.support.http")

from tests.support import servers  # noqa: E402 - after the registration
from tests.support.engines import Guards  # noqa: E402

settings.register_profile("house", deadline=None, print_blob=True)
# With CI set, Hypothesis loads a profile of its own: the same examples every time, and no deadline.
if not os.environ.get("CI"):
    settings.load_profile("house")


def pytest_configure():
    """Have all processes that the tests start end with this one, however it ends."""
    servers.mark()


@pytest.fixture(params=["sync", "async"])
def guards(request):
    """The sync and the async engine, behind the same methods."""
    guards = Guards(is_async=request.param == "async")
    yield guards
    guards.close()


@pytest.fixture(autouse=True)
def root_logger():
    """Leave logging as it was: some frameworks configure it for the whole process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    added = [handler for handler in root.handlers if handler not in handlers]
    for handler in added:
        root.removeHandler(handler)


@pytest.fixture(autouse=True)
def garbage():
    """Find what a test has left open in this test, which then fails, and not in a later one.

    What is in use before a test, modules for example, need not be looked through after it. The
    first search is for what the fixtures of the test before have left.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.collect()


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
