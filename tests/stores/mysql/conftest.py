"""What the tests of the MySQL store share: servers, stores, and what is sent to a server."""

from contextlib import closing

import pytest
from pymysql.cursors import Cursor

from coatcheck.stores import open_store
from tests.support.loop_store import BOTH_WAYS
from tests.support.servers.mariadb import Mariadb, mariadb


@pytest.fixture
def url():
    return mariadb().fresh_url()


@pytest.fixture
def store(url):
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture(params=BOTH_WAYS)
def opened(request):
    """Opens a store that is called from threads, or from an event loop."""
    return BOTH_WAYS[request.param]


@pytest.fixture(scope="package")
def own():
    """A server of these tests' own, which they may stop, kill and misconfigure."""
    server = Mariadb(**{"innodb-flush-log-at-trx-commit": "1"})
    yield server
    server.remove()


@pytest.fixture
def own_url(own):
    return own.fresh_url()


@pytest.fixture
def sent(monkeypatch):
    """All statements that the store sends, and what to do before one that begins with a word."""
    sent = Sent()
    execute = Cursor.execute

    def record(self, statement, args=None):
        if type(self) is Cursor:
            sent.append(statement)
            sent.before.get(sent.verbs[-1], lambda: None)()
        return execute(self, statement, args)

    monkeypatch.setattr(Cursor, "execute", record)
    return sent


class Sent(list):
    """Statements, in their order."""

    def __init__(self):
        super().__init__()
        self.before = {}

    @property
    def verbs(self):
        """The first word of each."""
        return [statement.split(" ")[0] for statement in self]
