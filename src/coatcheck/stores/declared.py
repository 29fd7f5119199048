"""What each store declares of itself: its URL, what it needs, and which promises it can keep.

The table in the documentation and the law-suite are made from this: a promise that a store cannot
keep is a field here, and the law then asserts what the store does instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from coatcheck.errors import Misconfigured

logger = logging.getLogger("coatcheck")

# Of DynamoDB. 400 kB is documented; as 400 000 there is no question of what a kilobyte is.
ITEM_BYTES_MAX = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One store."""

    title: str
    urls: tuple[str, ...]
    module: str  # in coatcheck.stores
    name: str  # of its class
    extra: str = ""  # what brings its driver: pip install 'coatcheck[extra]'
    survives: str
    shared_by: str
    keeps: str = "everything"
    # The most that one record may take; one that takes more loses its response, so that a retry is
    # told, and is refused where it would not fit even so.
    record_bytes_max: int | None = None
    durable: bool = True  # what was acknowledged is there after close, crash and reopening
    shared: bool = True  # every process that opens the URL sees the same records
    closes: bool = True  # a closed store refuses further use with StoreUnavailable
    sweeps: bool = True  # forgets when told to, on the caller's clock; else by itself, on its own
    # What is about to be forgotten can be archived first; "usually": unless the store was quicker.
    archives: Literal["yes", "usually", "no"] = "yes"
    transacts: bool = False  # a record can be written in the handler's own transaction (L9)
    wakes: bool = False  # who waits on another node is woken by a bell; else it only polls


MEMORY = Declaration(
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
SQLITE = Declaration(
    title="SQLite",
    urls=("sqlite:///path", "sqlite:////absolute/path"),
    module="sqlite",
    name="SqliteStore",
    survives="a crash of the process and of the machine",
    shared_by="any number of processes on one machine",
    transacts=True,
)
POSTGRES = Declaration(
    title="PostgreSQL",
    urls=("postgresql://user@host/database",),
    module="postgres",
    name="PostgresStore",
    extra="postgres",
    survives="what a commit survives; with a synchronous standby, the loss of the primary",
    shared_by="any number of machines",
    wakes=True,
    transacts=True,
)
MYSQL = Declaration(
    title="MySQL and MariaDB",
    urls=("mysql://user@host/database",),
    module="mysql",
    name="MysqlStore",
    extra="mysql",
    survives="what a commit survives",
    shared_by="any number of machines",
    transacts=True,
)
REDIS = Declaration(
    title="Redis and Valkey",
    urls=(
        "redis://host/0",
        "rediss://host/0",
        "redis+sentinel://host,host/service/0",
        "redis+cluster://host",
    ),
    module="redis",
    name="RedisStore",
    extra="redis",
    survives="a crash of the process and of the machine, as far as its append-only file was synced",
    shared_by="any number of machines",
    sweeps=False,
    archives="no",
    wakes=True,
)
DYNAMODB = Declaration(
    title="DynamoDB",
    urls=("dynamodb://table?region=…",),
    module="dynamodb",
    name="DynamoStore",
    extra="dynamodb",
    survives="the loss of a data centre",
    shared_by="any number of machines",
    keeps="400 kB; a longer response is not kept, and a retry is told so",
    record_bytes_max=ITEM_BYTES_MAX,
    archives="usually",
)

DECLARED = (MEMORY, SQLITE, POSTGRES, MYSQL, REDIS, DYNAMODB)

# By the scheme of its URLs.
BY_SCHEME = {url.partition(":")[0]: declared for declared in DECLARED for url in declared.urls}


def refuse_archive(store: object) -> None:
    """
    Raise, if nothing of *store* could ever be archived; warn, if something could be missed.

    *store* is a URL, or what its URL opens; of a store of somebody else's nothing is known.
    """
    if isinstance(store, str):
        declared = BY_SCHEME.get(store.partition(":")[0])
    else:
        declared = getattr(store, "declared", None)
    if not isinstance(declared, Declaration) or declared.archives == "yes":
        return
    if declared.archives == "no":
        raise Misconfigured(
            f"{declared.title}: such a store forgets by itself and tells nobody what, so archive= "
            "would never be called; leave it out, or use another store"
        )
    logger.warning(
        "%s: the store may delete a record before it is archived, unless its table has no time to "
        "live",
        declared.title,
    )
