"""The capabilities of each store: its URLs, what it needs, and which promises it keeps.

The table in the documentation and the law-suite read this. If a store cannot keep a promise, a
field here says so, and the law asserts what the store does instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from coatcheck.errors import Misconfigured

logger = logging.getLogger("coatcheck")

# DynamoDB documents 400 kB for an item. 400 000 holds whether a kilobyte is 1000 bytes or 1024.
ITEM_BYTES_MAX = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """The capabilities of one store."""

    title: str
    urls: tuple[str, ...]
    module: str  # in coatcheck.stores
    name: str  # of its class
    extra: str = ""  # installs its driver: pip install 'coatcheck[extra]'
    survives: str
    shared_by: str
    keeps: str = "everything"
    # The size of the largest record. A larger one is stored without its response, so that a retry
    # is refused instead of executed; if it is still too large, it is refused.
    record_bytes_max: int | None = None
    durable: bool = True  # acknowledged writes are there after close, crash and reopening
    shared: bool = True  # every process that opens the URL sees the same records
    closes: bool = True  # a closed store refuses further use with StoreUnavailable
    sweeps: bool = True  # deletes expired records in `sweep`; otherwise by itself, on its own clock
    # Expired records can be archived before they are deleted; "usually": unless the store deletes
    # them first.
    archives: Literal["yes", "usually", "no"] = "yes"
    transacts: bool = False  # a record can be written in the handler's own transaction
    # Opening it raises `Misconfigured` if its servers could lose records. Only the servers know.
    refuses_servers: bool = False


MEMORY = StoreInfo(
    title="memory",
    urls=("memory://",),
    module="memory",
    name="MemoryStore",
    survives="nothing",
    shared_by="one process",
    durable=False,
    shared=False,
    closes=False,
)
SQLITE = StoreInfo(
    title="SQLite",
    urls=("sqlite:///path", "sqlite:////absolute/path"),
    module="sqlite.store",
    name="SqliteStore",
    survives="a crash of the process and of the machine",
    shared_by="any number of processes on one machine",
    transacts=True,
)
POSTGRES = StoreInfo(
    title="PostgreSQL",
    urls=(
        "postgresql://user@host/database",
        "postgres://user@host/database",
        "postgresql+psycopg://user@host/database",
        "postgresql+asyncpg://user@host/database",
    ),
    module="postgres.store",
    name="PostgresStore",
    extra="postgres",
    survives="what a commit survives; with a synchronous standby, the loss of the primary",
    shared_by="any number of machines",
    transacts=True,
)
MYSQL = StoreInfo(
    title="MySQL and MariaDB",
    urls=(
        "mysql://user@host/database",
        "mysql+pymysql://user@host/database",
        "mariadb://user@host/database",
    ),
    module="mysql.store",
    name="MysqlStore",
    extra="mysql",
    survives="what a commit survives",
    shared_by="any number of machines",
    transacts=True,
)
REDIS = StoreInfo(
    title="Redis and Valkey",
    urls=(
        "redis://host/0",
        "rediss://host/0",
        "redis+sentinel://host,host/service/0",
        "redis+cluster://host",
    ),
    module="redis.store",
    name="RedisStore",
    extra="redis",
    survives="a crash of the process and of the machine, as far as its append-only file was synced",
    shared_by="any number of machines",
    sweeps=False,
    archives="no",
    refuses_servers=True,
)
DYNAMODB = StoreInfo(
    title="DynamoDB",
    urls=("dynamodb://table?region=…",),
    module="dynamodb.store",
    name="DynamoStore",
    extra="dynamodb",
    survives="the loss of a data centre",
    shared_by="any number of machines",
    keeps="400 kB; a longer response is not stored, and its retries get `result-unavailable`",
    record_bytes_max=ITEM_BYTES_MAX,
    sweeps=False,
    archives="usually",
)

STORES = (MEMORY, SQLITE, POSTGRES, MYSQL, REDIS, DYNAMODB)

# By the scheme of its URLs.
BY_SCHEME = {url.partition(":")[0]: info for info in STORES for url in info.urls}


def info_of(store: object) -> StoreInfo | None:
    """
    Return the capabilities of *store*, which is a URL or a store.

    None: the application wrote it itself, or there is no such URL.
    """
    if isinstance(store, str):
        return BY_SCHEME.get(store.partition(":")[0])
    info = getattr(store, "info", None)
    return info if isinstance(info, StoreInfo) else None


def is_compact(store: object) -> bool:
    """Return whether *store*, a URL or a store, keeps fewer texts for people; see `compact=1`."""
    if isinstance(store, str):
        return "compact=1" in store.partition("?")[2].split("&")
    return getattr(store, "is_compact", False) is True


def refuse_archive(store: object) -> None:
    """
    Raise if nothing of *store* could ever be archived; warn if something could be missed.

    *store* is a URL or a store.
    """
    info = info_of(store)
    if info is None or info.archives == "yes":
        return
    if info.archives == "no":
        raise Misconfigured(
            f"{info.title} deletes expired records by itself without reporting them, so archive= "
            "would never be called; leave it out, or use another store"
        )
    logger.warning(
        "coatcheck: %s may delete an expired record before it is archived; disable the table's "
        "time to live to prevent that",
        info.title,
    )
