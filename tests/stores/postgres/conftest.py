"""What the tests of the PostgreSQL store start from."""

from contextlib import closing

import pytest

from coatcheck.stores import open_store
from tests.stores.postgres.access import WAYS
from tests.support.servers.postgres import Postgres, postgres


@pytest.fixture
def url():
    """An empty store on the server that all tests share."""
    return postgres().fresh_url()


@pytest.fixture
def store(url):
    """The same, opened."""
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture
def own():
    """A server of this test's own, which it may kill."""
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(params=WAYS)
def opened(request):
    """Opens a store for use in a thread, or from an event loop."""
    return WAYS[request.param]


@pytest.fixture
def access(opened, url):
    """An empty store, opened both ways."""
    with opened(url) as access:
        yield access
