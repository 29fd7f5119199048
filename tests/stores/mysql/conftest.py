"""What the tests of the MySQL store share: servers, stores, and what is sent to a server."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
from pymysql.cursors import Cursor

from coatcheck.core.record import Record, Swap
from coatcheck.stores import Query, Store, open_async_store, open_store
from tests.support.servers import START_S_MAX
from tests.support.servers.mariadb import Mariadb, mariadb


class LoopStore:
    """A store for async code on an event loop of its own, used like one for threads."""

    def __init__(self, url: str) -> None:
        self._store = open_async_store(url)
        self._runner = asyncio.Runner()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        async def call() -> Sequence[Record | None]:
            async with asyncio.timeout(START_S_MAX):
                return await self._store.swap(swaps)

        return list(self._runner.run(call()))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        return list(self._runner.run(self._store.get(ids)))

    def find(self, query: Query) -> object:
        return self._runner.run(self._store.find(query))

    def sweep(self, now_ms: int) -> int:
        return self._runner.run(self._store.sweep(now_ms))

    def check(self) -> object:
        return self._runner.run(self._store.check())

    def now_ms(self) -> int:
        return self._runner.run(self._store.now_ms())

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()


BOTH_WAYS: dict[str, Callable[[str], Store]] = {"threads": open_store, "loop": LoopStore}


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
