"""What the tests of the Redis store share."""

from collections.abc import Callable, Iterator

import pytest

from coatcheck.stores import Store, open_store
from tests.stores.redis.scenes import LoopStore
from tests.support.servers.redis import Redis


@pytest.fixture(params=[open_store, LoopStore], ids=["threads", "loop"])
def opened(request) -> Callable[[str], Store]:
    """Open a store that is used by threads, or by an event loop."""
    return request.param


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to stop, kill and misconfigure."""
    # A kill must not lose the last second. Redis looks for expired keys in one database at a time.
    server = Redis(appendfsync="always", databases="16")
    yield server
    server.remove()
