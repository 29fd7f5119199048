"""Writes in place: an event loop that is alone at a quick disk does them itself."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from sqlite_processes import NOW_MS, change, claim_of
from sqlite_processes import claim as claim_with

from coatcheck import AsyncEngine, StoreUnavailable
from coatcheck.core.record import Record, Swap, completed
from coatcheck.stores import in_place
from coatcheck.stores.in_place import ALONE_MIN, IN_PLACE_MAX, QUICK_S_MAX, Solitude, Turn
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.sqlite import SqliteStore
from coatcheck.stores.threaded import ThreadedStore

QUICK_S = QUICK_S_MAX / 2
# 50 ms: long enough that a loop which waits for the lock itself is seen.
PAUSE_S = 0.05


def claim(number: int) -> Swap:
    return claim_with(claim_of(number))


def certain() -> Solitude:
    solitude = Solitude()
    for _ in range(ALONE_MIN):
        solitude.see(QUICK_S)
    return solitude


# ------------------------------------------------------------------------------- the rule by itself


def test_who_has_been_alone_and_quick_for_a_while_may_write_in_place():
    solitude = Solitude()
    for _ in range(ALONE_MIN):
        assert not solitude.is_certain()
        solitude.see(QUICK_S)
    assert solitude.is_certain()


def test_one_slow_write_ends_it_wherever_it_was_done():
    """An event loop waits for a slow disk once."""
    solitude = certain()
    solitude.see(QUICK_S_MAX * 2)
    for _ in range(ALONE_MIN):
        assert not solitude.is_certain()
        solitude.see(QUICK_S)
    assert solitude.is_certain()


def test_somebody_else_who_comes_ends_it_at_once():
    solitude = certain()
    solitude.end()
    assert not solitude.is_certain()


def test_now_and_then_some_are_for_the_thread():
    """It copies the log into the file, for which no event loop waits."""
    solitude = certain()
    places = []
    for _ in range(3 * (IN_PLACE_MAX + ALONE_MIN)):
        places.append(solitude.is_certain())
        solitude.see(QUICK_S)
    assert ALONE_MIN * 2 <= places.count(False) <= (ALONE_MIN + 1) * 3


# ------------------------------------------------------------------------------- behind event loops


class Store(MemoryStore):
    """Writes down who did what."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0
        self.in_thread: list[int] = []
        self.refuses = False
        self.takes_s = 0.0

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        self.in_thread.append(len(swaps))
        assert threading.current_thread() is not threading.main_thread()
        return super().swap(swaps)

    def swap_at_once(self, swap: Swap) -> bool:
        assert threading.current_thread() is threading.main_thread()
        self.at_once += 1
        time.sleep(self.takes_s)
        return not self.refuses and super().swap([swap]) == [None]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr(in_place, "QUICK_S_MAX", 60.0)


@asynccontextmanager
async def alone(store: Store | SqliteStore) -> AsyncIterator[ThreadedStore]:
    """An event loop's store, where it has been alone for a while."""
    threaded = ThreadedStore(store)
    for number in range(ALONE_MIN):
        assert await threaded.swap([claim(1_000 + number)]) == [None]
    yield threaded
    await threaded.close()


@pytest.mark.usefixtures("quick")
def test_a_lone_loop_writes_in_place_after_a_while():
    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            assert (store.at_once, store.in_thread) == (0, [1] * ALONE_MIN)
            for number in range(10):
                assert await threaded.swap([claim(number)]) == [None]
            assert (store.at_once, store.in_thread) == (10, [1] * ALONE_MIN)

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_of_many_at_once_one_is_in_place_and_the_others_are_a_batch():
    """T2: natural batching stays."""

    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            found = await asyncio.gather(*(threaded.swap([claim(number)]) for number in range(64)))
            assert found == [[None]] * 64
            assert store.at_once == 1
            assert sum(store.in_thread) == ALONE_MIN + 63
            await asyncio.gather(*(threaded.swap([claim(number)]) for number in range(64, 128)))
            assert store.at_once == 1, "the past was not alone"

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_who_loses_or_is_refused_in_place_is_answered_by_the_thread():
    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            await threaded.swap([claim(0)])
            again = claim_of(0)._replace(nonce=7)
            assert await threaded.swap([claim_with(again)]) == [claim_of(0)]
            assert store.at_once == 2
            for number in range(2_000, 2_000 + ALONE_MIN - 1):
                await threaded.swap([claim(number)])
            assert store.at_once == 2, "it begins anew, with this one"
            store.refuses = True
            assert await threaded.swap([claim(1)]) == [None]
            assert store.at_once == 3

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_others_have_their_turn_between_two_writes_in_place():
    async def scene() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        store = Store()
        async with alone(store) as threaded:
            task = asyncio.create_task(other())
            await asyncio.sleep(0)
            before = turns
            for number in range(10):
                await threaded.swap([claim(number)])
            assert store.at_once == 10
            assert turns - before >= 10
            task.cancel()

    asyncio.run(scene())


def test_a_slow_disk_is_waited_for_on_the_loop_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_place, "QUICK_S_MAX", 0.05)

    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            store.takes_s = 0.1
            for number in range(3):
                await threaded.swap([claim(number)])
            assert store.at_once == 1

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_nothing_is_written_in_place_after_closing():
    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            pass
        with pytest.raises(StoreUnavailable, match="closed"):
            await threaded.swap([claim(0)])
        assert store.at_once == 0

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_a_write_in_place_that_is_interrupted_does_not_end_them_all():
    class Interrupted(BaseException):
        pass

    async def scene() -> None:
        store = Store()
        async with alone(store) as threaded:
            whole = threaded._swap_at_once

            def interrupted(_: Swap) -> bool:
                raise Interrupted

            threaded._swap_at_once = interrupted
            with pytest.raises(Interrupted):
                await threaded.swap([claim(0)])
            threaded._swap_at_once = whole
            for number in range(ALONE_MIN + 1):
                assert await threaded.swap([claim(number)]) == [None]
            assert store.at_once == 1

    asyncio.run(scene())


def test_whoever_stands_before_a_store_is_not_passed_by():
    class Before:
        def __init__(self, store: Store) -> None:
            self.store = store

        def __getattr__(self, name: str) -> object:
            return getattr(self.store, name)

    assert in_place.swap_at_once_of(Store()) is not None
    assert in_place.swap_at_once_of(Before(Store())) is None
    assert in_place.swap_at_once_of(MemoryStore()) is None


def test_a_turn_gives_its_result_in_the_next_turn_of_the_loop():
    async def scene() -> None:
        seen: list[str] = []
        turn: Turn[int] = Turn()
        turn.set_result(17)
        asyncio.get_running_loop().call_soon(seen.append, "other")
        assert await turn == 17
        assert seen == ["other"]

    asyncio.run(scene())


# ---------------------------------------------------------------------------------------- on SQLite


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "records.db", busy_timeout_s=5)


def test_at_once_is_as_durable_and_as_exact_as_ever(store: SqliteStore):
    held = claim_of(1)
    done = completed(held, b"x" * 100)
    assert store.swap_at_once(claim_with(held))
    assert store.get([held.id]) == [held]
    assert not store.swap_at_once(claim_with(held)), "it lost"
    assert store.swap_at_once(change(held, done))
    assert not store.swap_at_once(change(held, done)), "it lost"
    assert not store.swap_at_once(Swap(held.id, done.version, None)), "for the thread"
    assert store.get([held.id]) == [done]
    with store._prompt as connection:
        assert connection.execute("pragma synchronous").fetchone() == (2,)
        assert connection.execute("pragma wal_autocheckpoint").fetchone() == (0,)
        assert connection.execute("pragma busy_timeout").fetchone() == (0,)
    store.close()


def test_a_new_life_and_a_long_answer_are_for_the_thread(store: SqliteStore):
    held = claim_of(1)
    assert store.swap_at_once(claim_with(held))
    life = held._replace(version=NOW_MS + 9, expires_ms=held.expires_ms + 9)
    assert not store.swap_at_once(change(held, life))
    assert not store.swap_at_once(change(held, completed(held, b"x" * 100_000)))
    assert store.get([held.id]) == [held]
    store.close()


def test_at_once_never_waits_for_a_lock(store: SqliteStore):
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("begin immediate")
        start_s = time.monotonic()
        assert not store.swap_at_once(claim(1))
        with store._prompt:
            assert not store.swap_at_once(claim(1)), "nor for another event loop"
        assert time.monotonic() - start_s < 4  # who waits does so for five seconds
        other.execute("rollback")
    assert store.swap_at_once(claim(1))
    store.close()


def test_at_once_refuses_a_file_that_is_gone_and_a_store_that_is_closed(store: SqliteStore):
    assert store.swap_at_once(claim(1))
    assert store.swap([claim(3)]) == [None]
    path = Path(store.path)
    path.rename(path.with_suffix(".old"))
    assert not store.swap_at_once(claim(2))
    with pytest.raises(StoreUnavailable, match="deleted or replaced"):
        store.swap([claim(2)])
    path.with_suffix(".old").rename(path)
    assert store.swap_at_once(claim(2))
    store.close()
    assert not store.swap_at_once(claim(4))


@pytest.mark.usefixtures("quick")
def test_a_lone_loop_waits_for_another_process_in_the_thread(store: SqliteStore):
    """The loop goes on meanwhile."""

    async def scene() -> None:
        async with alone(store) as threaded:
            assert await threaded.swap([claim(0)]) == [None]
            with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
                other.execute("begin immediate")
                waiting = asyncio.ensure_future(threaded.swap([claim(1)]))
                await asyncio.to_thread(time.sleep, PAUSE_S)
                assert not waiting.done()
                other.execute("rollback")
            assert await waiting == [None]

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_an_engine_that_is_alone_keeps_everything_and_the_log_stays_short(tmp_path: Path):
    async def scene() -> None:
        path = tmp_path / "records.db"
        async with AsyncEngine(f"sqlite:///{path}") as engine:
            in_place_before = engine.store.blocking.swap_at_once
            done = 0

            def counted(swap: Swap) -> bool:
                nonlocal done
                done += 1
                return in_place_before(swap)

            engine.store._swap_at_once = counted

            async def number_of(number: int) -> int:
                return number

            for number in range(1_000):
                assert await engine.run(f"k{number}", number_of, number, scope="s") == number
            assert done > 1_000
            for number in range(0, 1_000, 100):
                assert await engine.run(f"k{number}", number_of, number, scope="s") == number
            log_bytes = path.with_name("records.db-wal").stat().st_size
            assert log_bytes < 2_000 * 4_120

    asyncio.run(scene())
