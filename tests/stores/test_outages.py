"""Servers that are killed, frozen and restarted, under stores for threads and for event loops."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from coatcheck.core.record import Record, Swap, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, Store
from tests.stores.laws.records import claim_of, id_of
from tests.support.loop_store import BOTH_WAYS
from tests.support.servers import START_S_MAX, until
from tests.support.servers.mariadb import Mariadb
from tests.support.servers.postgres import Postgres
from tests.support.servers.redis import Redis

SERVERS: dict[str, Callable[[], Any]] = {
    "postgres": Postgres,
    "mariadb": lambda: Mariadb(**{"innodb-flush-log-at-trx-commit": "1"}),
    "redis": lambda: Redis(appendfsync="always"),
}


class Writer(threading.Thread):
    """Claims and completes until `ends` is set, some records at a time, and keeps the outcomes."""

    def __init__(self, store: Store, number: int) -> None:
        super().__init__()
        self.store = store
        self.next, self.size = 1_000_000 * number, 1 + 2 * number
        self.acknowledged: dict[bytes, Record] = {}
        self.ambiguous: dict[bytes, Record] = {}
        self.refused: list[bytes] = []
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.is_set():
            claims = [claim_of(id_of(self.next + n)) for n in range(self.size)]
            self.next += self.size
            ends = [Swap(claim.id, claim.version, completed(claim, b"done")) for claim in claims]
            if not (self.is_written([Swap(c.id, 0, c) for c in claims]) and self.is_written(ends)):
                self.ends.wait(0.01)

    def is_written(self, swaps: Sequence[Swap]) -> bool:
        records = {swap.id: swap.record for swap in swaps if swap.record is not None}
        try:
            assert list(self.store.swap(swaps)) == [None] * len(swaps)
        except StoreUnavailable as error:
            if error.is_ambiguous:
                self.ambiguous.update(records)
            self.refused += [swap.id for swap in swaps if not (swap.expected or error.is_ambiguous)]
            return False
        self.acknowledged.update(records)
        return True


@pytest.fixture(params=SERVERS)
def server(request) -> Iterator[Any]:
    server = SERVERS[request.param]()
    yield server
    server.remove()


@pytest.fixture(params=BOTH_WAYS)
def opened(request) -> Callable[[str], Store]:
    return BOTH_WAYS[request.param]


FIRST, SECOND = (claim_of(id_of(number)) for number in (1, 2))
DONE = completed(FIRST, b"done")
CLAIM, CLAIM_SECOND = (Swap(record.id, 0, record) for record in (FIRST, SECOND))
COMPLETE = Swap(FIRST.id, FIRST.version, DONE)


def outage_of(call: Callable[[], object]) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as caught:
        call()
    return caught.value


def test_a_frozen_server_is_an_outage_until_it_answers(server, opened):
    """D2: a write that was sent is ambiguous, a read is not; a search waits no longer."""
    url = server.fresh_url()
    with closing(opened(f"{url}{'&' if '?' in url else '?'}timeout=300ms")) as store:
        assert store.swap([CLAIM]) == [None]
        assert store.get([FIRST.id]) == [FIRST]
        assert store.find(Query()).records == [FIRST]
        begun_s = time.monotonic()
        with server.frozen():
            assert outage_of(lambda: store.swap([COMPLETE])).is_ambiguous
            assert not outage_of(lambda: store.get([FIRST.id])).is_ambiguous
            assert not outage_of(lambda: store.find(Query())).is_ambiguous
            assert [finding.level for finding in store.check()] == ["error"]
        assert time.monotonic() - begun_s < 20
        assert until(lambda: try_to_complete(store)) in ([None], [DONE])
        assert store.get([FIRST.id]) == [DONE]


def try_to_complete(store: Store) -> Sequence[Record | None] | None:
    try:
        return store.swap([COMPLETE])
    except StoreUnavailable:
        return None


def test_a_restart_of_the_server_needs_no_restart_of_ours(server, opened):
    """D2: an outage while it is down; one that was not noticed is no error at all."""
    with closing(opened(server.fresh_url())) as store:
        assert store.swap([CLAIM]) == [None]
        assert store.get([FIRST.id]) == [FIRST]
        server.stop()
        for call in (
            lambda: store.get([FIRST.id]),
            lambda: store.swap([CLAIM_SECOND]),
            store.now_ms,
        ):
            assert not outage_of(call).is_ambiguous
        server.start()
        assert store.swap([CLAIM, CLAIM_SECOND]) == [FIRST, None]
        assert store.get([FIRST.id]) == [FIRST]
        server.stop()
        server.start()
        assert store.get([FIRST.id]) == [FIRST]
        assert store.swap([COMPLETE]) == [None]


def test_acknowledged_writes_survive_a_kill_of_the_server(server, opened):
    """D1, D2, L5: nothing refused was written, and the store works again without a restart."""
    url = server.fresh_url()
    writers = [Writer(opened(url), number) for number in range(3)]
    try:
        for writer in writers:
            writer.start()
        for _ in range(2):
            wait_for_more(writers, lambda writer: len(writer.acknowledged) // 60)
            server.kill()
            wait_for_more(writers, lambda writer: len(writer.refused))
            server.start()
        wait_for_more(writers, lambda writer: len(writer.acknowledged) // 60)
        end(writers)
        with closing(opened(url)) as store:
            for writer in writers:
                found = store.get(list(writer.acknowledged))
                for record, stored in zip(writer.acknowledged.values(), found, strict=True):
                    assert stored in (record, writer.ambiguous.get(record.id, record))
                assert list(store.get(writer.refused)) == [None] * len(writer.refused)
    finally:
        end(writers)


def wait_for_more(writers: Sequence[Writer], count: Callable[[Writer], int]) -> None:
    before = [count(writer) for writer in writers]
    until(lambda: all(count(w) > n for w, n in zip(writers, before, strict=True)))


def end(writers: Sequence[Writer]) -> None:
    for writer in writers:
        if writer.is_alive():
            writer.ends.set()
            writer.join(START_S_MAX)
            writer.store.close()
