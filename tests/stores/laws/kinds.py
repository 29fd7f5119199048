"""The stores under law.

If a store cannot keep a promise, a field of its `StoreInfo` says so. No test is skipped: the law
reads the field (`ReadKind`) and asserts what the store does instead.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coatcheck import KeyRing
from coatcheck.core.record import Record
from coatcheck.stores import (
    AsyncStore,
    Store,
    ThreadedStore,
    open_async_store,
    open_store,
    registry,
)
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.registry import StoreInfo
from examples.own_store import LogStore
from tests.support.servers.dynamodb import dynamodb
from tests.support.servers.mariadb import mariadb
from tests.support.servers.postgres import postgres
from tests.support.servers.redis import cluster, redis_server, sentinel_set


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of store; *fresh_url* names an empty one that may use the given directory."""

    name: str
    fresh_url: Callable[[Path], str]
    info: StoreInfo
    open_url: Callable[[str], Store] = open_store
    is_compact: bool = False  # it drops the key, and the scope but for its first character
    keyring: KeyRing | None = None  # responses are encrypted
    histories: int = 300  # random ones for each driver; fewer where each step is a round trip
    # How often concurrent callers meet. Fewer times where the server of the tests serves one request
    # at a time: then only their order varies, and that is another one for each record.
    rounds: int = 25
    is_threaded: bool = False  # `ThreadedStore`, though the store has a backend for event loops

    def open(self, url: str) -> Store:
        store = self.open_url(url)
        return store if self.keyring is None else EncryptedStore(store, self.keyring)

    def open_async(self, url: str) -> AsyncStore:
        return open_async_store(url) if self.is_plain else ThreadedStore(self.open(url))

    @property
    def is_plain(self) -> bool:
        """Its URL is all that is needed to open it."""
        return self.open_url is open_store and self.keyring is None and not self.is_threaded

    @property
    def durable(self) -> bool:
        return self.info.durable

    @property
    def shared(self) -> bool:
        return self.info.shared

    @property
    def closes(self) -> bool:
        return self.info.closes

    @property
    def sweeps(self) -> bool:
        return self.info.sweeps

    def as_kept(self, record: Record) -> Record:
        """What this store gives back of *record*."""
        if not self._fits(record.response):
            record = record._replace(response=None)
        return record._replace(scope=record.scope[:1], key="") if self.is_compact else record

    def refuses(self, record: Record) -> bool:
        """It does not fit, whatever is left out."""
        return not self._fits(record.progress)

    def _fits(self, noise: bytes | None) -> bool:
        """What is large in the laws is so by far, and cannot be made smaller."""
        bytes_max = self.info.record_bytes_max
        return bytes_max is None or len(noise or b"") <= bytes_max


def _application_file(directory: Path) -> str:
    """A file with a table of its own, and so with a journal instead of a write-ahead log."""
    with closing(sqlite3.connect(directory / "laws.db")) as connection:
        connection.execute("create table orders (id)")
    return f"sqlite:///{directory}/laws.db"


# The store of docs/howto/own-store.md, with the promises of SQLite.
OWN = Kind(
    name="own-store",
    fresh_url=lambda directory: f"{directory}/keys.log",
    info=registry.SQLITE,
    open_url=LogStore,
    histories=30,
)

KINDS = (
    OWN,
    Kind(name="memory", fresh_url=lambda _directory: "memory://", info=registry.MEMORY),
    Kind(
        name="sqlite",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db",
        info=registry.SQLITE,
    ),
    Kind(
        name="sqlite-in-the-file-of-an-application",
        fresh_url=_application_file,
        info=registry.SQLITE,
        histories=60,
    ),
    Kind(
        name="sqlite-compact",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db?compact=1",
        info=registry.SQLITE,
        is_compact=True,
    ),
    Kind(
        name="encrypted",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db",
        info=registry.SQLITE,
        keyring=KeyRing({"old": b"o" * 32, "new": b"n" * 32}),
    ),
    Kind(
        name="postgres",
        fresh_url=lambda _directory: postgres().fresh_url(),
        info=registry.POSTGRES,
        histories=60,
    ),
    Kind(
        name="postgres-threads",
        fresh_url=lambda _directory: postgres().fresh_url(),
        info=registry.POSTGRES,
        histories=30,
        is_threaded=True,
    ),
    Kind(
        name="mysql",
        fresh_url=lambda _directory: mariadb().fresh_url(),
        info=registry.MYSQL,
        histories=60,
    ),
    Kind(
        name="redis",
        fresh_url=lambda _directory: redis_server().fresh_url(),
        info=registry.REDIS,
        histories=60,
    ),
    Kind(
        name="redis-sentinel",
        fresh_url=lambda _directory: sentinel_set().fresh_url(),
        info=registry.REDIS,
        histories=30,
    ),
    Kind(
        name="redis-cluster",
        fresh_url=lambda _directory: cluster().fresh_url(),
        info=registry.REDIS,
        histories=30,
    ),
    Kind(
        name="dynamodb",
        fresh_url=lambda _directory: dynamodb().fresh_url(),
        info=registry.DYNAMODB,
        histories=10,
        rounds=5,
    ),
)
