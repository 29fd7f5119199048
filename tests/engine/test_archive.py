"""Archives: what an engine gets before it is deleted, and which stores cannot promise that."""

import asyncio

import pytest

from coatcheck import AsyncEngine, Engine, KeyRing, Misconfigured, open_store
from coatcheck.engine.sweeper import batches
from coatcheck.stores import ThreadedStore
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.memory import MemoryStore
from tests.support.servers.dynamodb import dynamodb
from tests.support.servers.redis import redis_server
from tests.support.times import NOW_MS

RING = KeyRing({"one": b"k" * 32})


def never(_records):
    raise AssertionError


@pytest.mark.parametrize("make", [Engine, AsyncEngine])
def test_an_archive_that_could_never_get_anything_is_refused(make):
    """T3: Redis deletes expired records by itself, without reporting them."""
    with pytest.raises(Misconfigured, match=r"Redis and Valkey deletes .* by itself .* archive="):
        make(redis_server().fresh_url(), archive=never)


def test_a_store_that_is_given_as_one_is_refused_as_well():
    """T3: also if it is encrypted."""
    store = open_store(redis_server().fresh_url())
    try:
        for given in (store, EncryptedStore(store, RING)):
            with pytest.raises(Misconfigured, match="by itself"):
                Engine(given, archive=never)
            with pytest.raises(Misconfigured, match="by itself"):
                AsyncEngine(ThreadedStore(given), archive=never)
    finally:
        store.close()


@pytest.mark.parametrize("make", [Engine, AsyncEngine])
def test_an_async_archive_is_refused(make):
    """T3: it would never be awaited, and records would be deleted unarchived."""

    async def archive(_records):
        raise AssertionError

    with pytest.raises(Misconfigured, match=r"archive=.* must not be async"):
        make("memory://", archive=archive)


def test_what_an_archive_has_yet_to_do_deletes_nothing():
    """T3: a function that only looks sync."""
    archived = []

    async def archive(records):
        archived.extend(records)

    store = MemoryStore()
    engine = Engine(store, clock=lambda: NOW_MS)
    engine.run("k", lambda: 1, scope="s")
    with pytest.raises(Misconfigured, match=r"archive=.* must not be async"):
        list(batches(store, NOW_MS + 26 * 3_600_000, archive))
    assert (len(store._records), archived) == (1, [])


def test_an_archive_that_may_miss_something_is_warned_of(caplog):
    """T3: the time to live of DynamoDB may be first."""
    archived = []
    with Engine(dynamodb().fresh_url(), archive=never, clock=lambda: NOW_MS) as engine:
        assert "may delete an expired record before it is archived" in caplog.text
        engine.run("k", lambda: 1, scope="s")
        over_ms = NOW_MS + 26 * 3_600_000
        assert list(batches(engine.store, over_ms, archived.extend)) == [1]
        assert [record.key for record in archived] == ["k"]
        assert list(batches(engine.store, over_ms, never)) == [0]


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/a.db"])
def test_every_other_store_archives_without_a_word(url, tmp_path, caplog):
    """T3: with a ring, too."""
    Engine(url.format(tmp_path), archive=never, keyring=RING).close()

    async def story():
        async with AsyncEngine(url.format(tmp_path), archive=never):
            pass

    asyncio.run(story())
    assert caplog.text == ""
