"""The stores under law; what each of them promises, it declares itself.

A promise that a store cannot keep is a field of its declaration, never a skipped test: the law
that needs it asks (`ReadDeclaration`) and asserts what the store does instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from servers.dynamodb import dynamodb
from servers.mariadb import mariadb
from servers.postgres import postgres
from servers.redis import cluster, redis_server, sentinel_set

from coatcheck import KeyRing
from coatcheck.core.record import Record
from coatcheck.stores import (
    AsyncStore,
    Store,
    ThreadedStore,
    declared,
    open_async_store,
    open_store,
)
from coatcheck.stores.at_rest import AtRest
from coatcheck.stores.declared import Declaration


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of store; *fresh_url* names an empty one that may use the given directory."""

    name: str
    fresh_url: Callable[[Path], str]
    declared: Declaration
    keeps_labels: bool = True  # label, scope and key come back; a compact store drops them
    keyring: KeyRing | None = None  # what it keeps is sealed
    histories: int = 300  # random ones for each driver; fewer where each step is a round trip
    # How often a crowd meets. Fewer times where its requests stand in line for the stand-in, one at a
    # time: there is only the order in which they come, and that is another one for each record.
    rounds: int = 25
    only_threads: bool = False  # event loops ask through a thread, though there could be a wire

    def open(self, url: str) -> Store:
        store = open_store(url)
        return store if self.keyring is None else AtRest(store, self.keyring)

    def open_async(self, url: str) -> AsyncStore:
        is_wired = self.keyring is None and not self.only_threads
        return open_async_store(url) if is_wired else ThreadedStore(self.open(url))

    @property
    def durable(self) -> bool:
        return self.declared.durable

    @property
    def shared(self) -> bool:
        return self.declared.shared

    @property
    def closes(self) -> bool:
        return self.declared.closes

    @property
    def sweeps(self) -> bool:
        return self.declared.sweeps

    def as_kept(self, record: Record) -> Record:
        """What this store gives back of *record*."""
        if not self._fits(record.response):
            record = record._replace(response=None)
        return record if self.keeps_labels else record._replace(label="", scope="", key="")

    def refuses(self, record: Record) -> bool:
        """It does not fit, whatever is left out."""
        return not self._fits(record.progress)

    def _fits(self, noise: bytes | None) -> bool:
        """What is large in the laws is so by far, and cannot be made smaller."""
        bytes_max = self.declared.record_bytes_max
        return bytes_max is None or len(noise or b"") <= bytes_max


KINDS = (
    Kind(name="memory", fresh_url=lambda _directory: "memory://", declared=declared.MEMORY),
    Kind(
        name="sqlite",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db",
        declared=declared.SQLITE,
    ),
    Kind(
        name="sqlite-compact",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db?compact=1",
        declared=declared.SQLITE,
        keeps_labels=False,
    ),
    Kind(
        name="sealed",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db",
        declared=declared.SQLITE,
        keyring=KeyRing({"old": b"o" * 32, "new": b"n" * 32}),
    ),
    Kind(
        name="postgres",
        fresh_url=lambda _directory: postgres().fresh_url(),
        declared=declared.POSTGRES,
        histories=60,
    ),
    Kind(
        name="mysql",
        fresh_url=lambda _directory: mariadb().fresh_url(),
        declared=declared.MYSQL,
        histories=60,
    ),
    Kind(
        name="redis",
        fresh_url=lambda _directory: redis_server().fresh_url(),
        declared=declared.REDIS,
        histories=60,
    ),
    Kind(
        name="redis-sentinel",
        fresh_url=lambda _directory: sentinel_set().fresh_url(),
        declared=declared.REDIS,
        histories=30,
    ),
    Kind(
        name="redis-cluster",
        fresh_url=lambda _directory: cluster().fresh_url(),
        declared=declared.REDIS,
        histories=30,
    ),
    Kind(
        name="dynamodb",
        fresh_url=lambda _directory: dynamodb().fresh_url(),
        declared=declared.DYNAMODB,
        histories=10,
        rounds=5,
    ),
    Kind(
        name="dynamodb-threads",  # as without aiobotocore
        fresh_url=lambda _directory: dynamodb().fresh_url(),
        declared=declared.DYNAMODB,
        histories=10,
        rounds=5,
        only_threads=True,
    ),
)
