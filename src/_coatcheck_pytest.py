"""The pytest plugin of coatcheck.

Beside the package and not in it: pytest loads this file in every project that has coatcheck
installed, and coatcheck itself only when a test uses one of the fixtures or the marker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coatcheck import Operation, Policy
    from coatcheck.testing import AsyncTimedEngine, LossyNetwork, TimedEngine
    from coatcheck.verify.crash import Injector, Point


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker, so that `--strict-markers` and `--markers` know it."""
    config.addinivalue_line(
        "markers",
        "duplicated(times=2): run the test again with the same fixtures; every run must pass "
        "(coatcheck)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test that is marked `duplicated` run several times."""
    if item.get_closest_marker("duplicated") is not None:
        from coatcheck.testing.duplicated import prepare  # noqa: PLC0415 - see the top

        prepare(item)


@pytest.fixture
def idempotency_policy() -> Policy | str | None:
    """The policy of the two engines: override it in a `conftest.py` or in a module."""
    return None


@pytest.fixture
def idempotency_engine(idempotency_policy: Policy | str | None) -> Iterator[TimedEngine]:
    """An `Engine` on memory, whose clock the test moves: `travel_past_lease()`, `travel("1h")`."""
    from coatcheck.testing import TimedEngine  # noqa: PLC0415 - see the top

    engine = TimedEngine(idempotency_policy)
    yield engine
    engine.close()


@pytest.fixture
def async_idempotency_engine(idempotency_policy: Policy | str | None) -> Iterator[AsyncTimedEngine]:
    """An `AsyncEngine` on memory, whose clock the test moves; no async fixture."""
    from coatcheck.testing import AsyncTimedEngine  # noqa: PLC0415 - see the top

    engine = AsyncTimedEngine(idempotency_policy)
    yield engine
    engine.stop()


@pytest.fixture
def operation() -> Operation:
    """An operation that nothing stores, for a handler that the test calls directly."""
    from coatcheck.testing import new_operation  # noqa: PLC0415 - see the top

    return new_operation()


@pytest.fixture
def lossy_network() -> LossyNetwork:
    """A network that loses the requests and answers that the test says."""
    from coatcheck.testing import LossyNetwork  # noqa: PLC0415 - see the top

    return LossyNetwork()


@pytest.fixture
def crash_injector() -> Callable[..., Injector]:
    """Makes a crash injector: `crash_injector("after effect")` ends the attempt there."""
    from coatcheck.testing import kill_attempt  # noqa: PLC0415 - see the top
    from coatcheck.testing.operations import injector_of  # noqa: PLC0415 - see the top

    def make(point: Point, fault: Callable[[], Any] = kill_attempt, number: int = 1) -> Injector:
        return injector_of(point, fault, number)

    return make
