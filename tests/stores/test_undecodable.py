"""What this release cannot read stops nobody who searches the store; who asks for it is told so."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

import pytest
from redis.exceptions import MovedError

from coatcheck.cli import main
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, Store, open_store
from coatcheck.stores.dynamodb.records import item_of
from coatcheck.stores.redis.records import encode
from tests.stores.laws.records import claim_of, id_of
from tests.support.servers.dynamodb import dynamodb
from tests.support.servers.redis import cluster, redis_server

Spoil = Callable[[Store, bytes], None]

NEWER = b"\x02what a newer release has written, which was rolled out on one node only"


def overwritten(text: bytes) -> Spoil:
    """Write *text* where Redis keeps a record."""

    def spoil(store: Store, id: bytes) -> None:
        database = store._config.database  # type: ignore[attr-defined]
        script = f"redis.call('SELECT', {database}) redis.call('SET', ARGV[1], ARGV[2])"
        redis_server().ask("EVAL", script, 0, redis_key(store, id), text)

    return spoil


def overwritten_in_cluster(store: Store, id: bytes) -> None:
    for master in cluster().masters:
        with suppress(MovedError):  # another master owns the key
            master.ask("SET", redis_key(store, id), NEWER)


def redis_key(store: Store, id: bytes) -> bytes:
    key: bytes = store._commands.keys.key_of(id)  # type: ignore[attr-defined]
    return key


def put(**attributes: dict[str, object]) -> Spoil:
    """Puts an item with these *attributes* into a DynamoDB table."""

    def spoil(store: Store, id: bytes) -> None:
        store._client.call("put_item", Item={"id": {"B": id}, **attributes})  # type: ignore[attr-defined]

    return spoil


def unlike(record: Record, **attributes: dict[str, object]) -> Spoil:
    """Puts an item that is like that of *record* but for these *attributes*."""
    own = {name: value for name, value in item_of(record).items() if name != "id"}
    return put(**{**own, **attributes})


RECORD = claim_of()
BROKEN_TEXT = encode(RECORD._replace(key="k" * 9))[0].replace(b"k", b"\xff")
WAYS = {
    "redis: newer": (redis_server, overwritten(NEWER)),
    "redis: short": (redis_server, overwritten(b"\x01")),
    "redis: no text": (redis_server, overwritten(BROKEN_TEXT)),
    "cluster: newer": (cluster, overwritten_in_cluster),
    "dynamodb: foreign": (dynamodb, put(hello={"S": "world"})),
    "dynamodb: of another kind": (dynamodb, put(version={"S": "1"})),
    "dynamodb: no number": (dynamodb, unlike(RECORD, version={"N": "1.5"})),
    "dynamodb: half": (dynamodb, put(version={"N": "1"}, state={"N": "1"})),
    "dynamodb: not deflated": (dynamodb, unlike(RECORD, response_zlib={"B": b"no"})),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, Spoil]:
    server, spoil = request.param
    return server().fresh_url(), spoil


def claimed(store: Store, numbers: Sequence[int]) -> list[Record]:
    records = [claim_of(id_of(number)) for number in numbers]
    assert store.swap([Swap(record.id, 0, record) for record in records]) == [None] * len(records)
    return sorted(records)


def paged(store: Store, limit: int) -> list[Record]:
    """All that is found, page by page."""
    page = store.find(Query(limit=limit))
    found = [*page.records]
    while page.next_after_id is not None:
        page = store.find(Query(limit=limit, after_id=page.next_after_id))
        found += page.records
    return found


def test_a_search_leaves_out_what_cannot_be_read_and_says_so_once(way, caplog):
    """D2: who lists, looks up or reconciles is served, however many rounds there are."""
    url, spoil = way
    with closing(open_store(url)) as store:
        good = claimed(store, range(1, 8))
        bad = [id_of(number) for number in (20, 21, 22)]
        for id in bad:
            spoil(store, id)
        with caplog.at_level(logging.WARNING, "coatcheck"):
            for limit in (1, 2, 3, 100):
                assert paged(store, limit) == good
            for id in bad:
                assert not store.find(Query(id_prefix=id)).records
        (told,) = [line for line in caplog.messages if "cannot be decoded" in line]
        assert "a search leaves out" in told


def test_reading_what_cannot_be_read_stays_an_error(way):
    """D2: it may be the record of something that was done, so nobody takes it for nothing."""
    url, spoil = way
    with closing(open_store(url)) as store:
        (good,) = claimed(store, [1])
        bad = claim_of(id_of(20))
        spoil(store, bad.id)
        with pytest.raises(StoreUnavailable):
            store.get([bad.id])
        with pytest.raises(StoreUnavailable) as caught:
            store.get([good.id, bad.id])
        assert caught.value.outcomes[0] == good  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailable):
            store.swap([Swap(bad.id, 0, bad)])


def test_the_command_line_lists_what_can_be_read(way, capsys):
    """D2, O1: one foreign value is no reason to show nothing."""
    url, spoil = way
    with closing(open_store(url)) as store:
        claimed(store, [1])
        spoil(store, id_of(20))
    assert main(["list", "--store", url]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 1


def test_a_store_that_is_away_leaves_nothing_out():
    """D2: an outage is no value that cannot be read."""
    url = redis_server().fresh_url()
    with closing(open_store(url)) as store:
        claimed(store, [1])
        store.close()
        with pytest.raises(StoreUnavailable):
            store.find(Query())
