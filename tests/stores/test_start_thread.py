"""A system that refuses to start threads for a while: the store is unavailable for as long."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coatcheck.core.record import Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, ThreadedStore, open_async_store
from coatcheck.stores.memory import MemoryStore
from tests.stores.laws.records import claim_of, id_of
from tests.support.servers.mariadb import mariadb
from tests.support.servers.postgres import postgres
from tests.support.servers.redis import redis_server

# 10 s: nothing here takes a tenth of it.
TIMEOUT_S = 10

URLS: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda directory: f"sqlite:///{directory}/keys.db",
    "mysql": lambda _directory: mariadb().fresh_url(),
}
# Event loops reach these without a thread; operators do not.
NATIVE = {
    "postgres": lambda _directory: postgres().fresh_url(),
    "redis": lambda _directory: redis_server().fresh_url(),
}


@contextmanager
def no_threads() -> Iterator[None]:
    """As when a container or a user has reached its limit."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def claim(number: int) -> Swap:
    record = claim_of(id_of(number))
    return Swap(record.id, 0, record)


def play(story) -> None:
    asyncio.run(asyncio.wait_for(story, TIMEOUT_S))


@pytest.mark.parametrize("new_url", URLS.values(), ids=URLS)
def test_without_a_thread_the_store_is_unavailable_and_nothing_is_written_later(tmp_path, new_url):
    """D2: calls fail without effect meanwhile; when threads can be started again, all work."""
    ids = [id_of(number) for number in range(10)]

    async def story() -> None:
        store = open_async_store(new_url(tmp_path))
        with no_threads():
            for _ in range(2):
                calls = [store.swap([claim(number)]) for number in range(5)]
                errors = await asyncio.gather(*calls, store.get(ids[:1]), return_exceptions=True)
                assert [type(error) for error in errors] == [StoreUnavailable] * 6
                assert not any(error.is_ambiguous for error in errors)
                assert {type(error.__cause__) for error in errors} == {RuntimeError}
        after = await asyncio.gather(*(store.swap([claim(number)]) for number in range(5, 10)))
        assert list(map(list, after)) == [[None]] * 5
        assert list(await store.get(ids)) == [None] * 5 + [claim_of(id) for id in ids[5:]]
        await store.close()

    play(story())


@pytest.mark.parametrize("new_url", (URLS | NATIVE).values(), ids=URLS | NATIVE)
def test_without_a_thread_searches_and_sweeps_are_unavailable_too(tmp_path, new_url):
    """D2, O1."""

    async def story() -> None:
        store = open_async_store(new_url(tmp_path))
        with no_threads():
            for asked in (store.find(Query()), store.check(), store.sweep(1), store.now_ms()):
                with pytest.raises(StoreUnavailable, match="thread"):
                    await asked
        assert list((await store.find(Query())).records) == []
        assert await store.sweep(1) == 0
        await store.close()

    play(story())


def test_a_store_can_be_closed_without_a_thread():
    """D4: there is nothing to wait for."""

    class Closed(MemoryStore):
        closings = 0

        def close(self) -> None:
            self.closings += 1

    async def story() -> None:
        beneath = Closed()
        store = ThreadedStore(beneath)
        with no_threads():
            for _ in range(2):
                await store.close()
                assert beneath.closings == 1
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.swap([claim(1)])

    play(story())
