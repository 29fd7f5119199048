"""A clock and a store in memory for each test of an engine."""

import pytest

from tests.support.engines import WatchedStore
from tests.support.times import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return WatchedStore()
