"""Processes for `test_store.py` that fork, are killed or hit a limit, and the records they write.

`python processes.py NAME PATH` runs one of the functions below; it fails by an assertion.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from uuid import UUID

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Query
from coatcheck.stores.sqlite.store import SqliteStore
from tests.stores.laws import records

NOW_MS = 1_800_000_000_000


def claim_of(number: int, *, now_ms: int = NOW_MS, nonce: int = 1) -> Record:
    """A claim as a server makes it: a UUID for a key, a digest for a scope."""
    # Multiplied, so that the ids are in no order, like digests.
    id = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")
    plain = records.claim_of(id, now_ms=now_ms, nonce=2**62 + nonce)
    return plain._replace(label="POST /orders", scope=id[:8].hex(), key=str(UUID(bytes=id)))


def claim(record: Record) -> Swap:
    return Swap(record.id, 0, record)


def change(before: Record, after: Record | None) -> Swap:
    return Swap(before.id, before.version, after)


def say(*words: object) -> None:
    print(*words, flush=True)


def fill_without_room(path: str) -> None:
    """Write until the system refuses, raise the limit, and continue."""
    store = SqliteStore(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    acknowledged: list[Record] = []

    def fill() -> None:
        for number in range(len(acknowledged), 150):
            record = claim_of(number)._replace(progress=b"x" * 1_000)
            assert store.swap([claim(record)]) == [None]
            acknowledged.append(record)

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        fill()
    except StoreUnavailable:
        assert len(acknowledged) > 10
    else:
        raise AssertionError("no write failed")
    assert store.find(Query(limit=1_000)).records == sorted(acknowledged)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.get([claim_of(len(acknowledged)).id]) == [None]
    fill()
    assert store.find(Query(limit=1_000)).records == sorted(acknowledged)


def fork_in_use(path: str) -> None:
    """Fork while other threads write; the child's writes must remain after the parent closes."""
    store = SqliteStore(path)
    stop = threading.Event()
    written: list[Record] = []

    def write() -> None:
        while not stop.is_set():
            record = claim_of(len(written))
            assert store.swap([claim(record)]) == [None]
            assert store.get([record.id]) == [record]
            written.append(record)

    writer = threading.Thread(target=write)
    writer.start()
    for round in range(1, 4):
        seen = len(written)
        while len(written) < seen + 5:
            assert writer.is_alive()
        go, went = os.pipe()
        if not (child := os.fork()):
            child_of_fork(store, 1_000_000 * round, go)
        if round == 3:  # the last child writes after the parent's last connection is closed
            stop.set()
            writer.join()
            store.close()
        os.write(went, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store = SqliteStore(path)
    assert store.get([record.id for record in written]) == written
    others = [claim_of(1_000_000 * round + n) for round in (1, 2, 3) for n in range(20)]
    assert store.get([record.id for record in others]) == others


def child_of_fork(store: SqliteStore, start: int, go: int) -> None:
    """Write before and after the parent continues; ends the process."""
    assert store.swap([claim(claim_of(start + n)) for n in range(10)]) == [None] * 10
    os.read(go, 1)
    for number in range(start + 10, start + 20):
        assert store.swap([claim(claim_of(number))]) == [None]
        assert store.get([claim_of(number).id]) == [claim_of(number)]
    os._exit(0)  # without closing, like a worker that is killed


def fork_unseen(path: str) -> None:
    """Fork without Python's hooks, as a server written in C may do."""
    unused, used = SqliteStore(path), SqliteStore(path)
    used.swap([claim(claim_of(1))])
    used.get([claim_of(1).id])
    fork = ctypes.PyDLL(None).fork
    if not (child := fork()):
        refusal = ""
        try:
            used.swap([claim(claim_of(2))])
        except StoreUnavailable as error:
            refusal = str(error)
        used.close()
        os._exit(0 if "open the store after the fork" in refusal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert used.swap([claim(claim_of(2))]) == [None]
    used.close()
    if not (child := fork()):
        os._exit(0 if unused.swap([claim(claim_of(3))]) == [None] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert unused.get([claim_of(3).id]) == [claim_of(3)]


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
