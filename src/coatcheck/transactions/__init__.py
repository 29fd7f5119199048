"""Adapters for the application's own connections, each used for the length of one transaction.

A connection is recognised by the name of its type, so that no driver is imported before the
application uses it. `contract` defines what an adapter does; then comes one file for each family of
drivers. `sources` gets connections from what the application passes in, `in_threads` lets an event
loop use connections for sync code, `pool` keeps the store's own connections, `run_to_end` finishes
work whose caller was cancelled, `errors` classifies the errors of the drivers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from coatcheck.errors import Misconfigured
from coatcheck.transactions.contract import AsyncTransactionConnection, TransactionConnection

__all__ = [
    "AsyncTransactionConnection",
    "TransactionConnection",
    "adapter_for",
    "is_async",
    "is_connection",
    "is_of_async_driver",
]

# (package of the driver, is it async) -> (our module, our class).
_ADAPTERS = {
    ("sqlite3", False): ("dbapi", "SqliteConnection"),
    ("psycopg", False): ("psycopg", "PsycopgConnection"),
    ("pymysql", False): ("dbapi", "PymysqlConnection"),
    ("MySQLdb", False): ("dbapi", "PymysqlConnection"),
    ("sqlalchemy", False): ("sqlalchemy", "AlchemyConnection"),
    ("django", False): ("django", "DjangoConnection"),
    ("psycopg", True): ("psycopg", "AsyncPsycopgConnection"),
    ("asyncpg", True): ("asyncpg", "AsyncpgConnection"),
    ("aiosqlite", True): ("async_dbapi", "AiosqliteConnection"),
    ("asyncmy", True): ("async_dbapi", "AsyncmyConnection"),
    ("aiomysql", True): ("async_dbapi", "AsyncmyConnection"),
    ("sqlalchemy", True): ("sqlalchemy", "AsyncAlchemyConnection"),
}
_ASYNC_DRIVERS = frozenset({"asyncpg", "aiosqlite", "asyncmy", "aiomysql"})
# Names of connection types. Pools and the like come from the same packages and are not in here.
_TYPE_NAMES = frozenset(
    {
        *("Connection", "Session", "scoped_session", "BaseDatabaseWrapper", "ConnectionProxy"),
        *("AsyncConnection", "AsyncSession", "async_scoped_session", "PoolConnectionProxy"),
    }
)

# The adapter of each type seen so far: the look-up by names runs once per type, not per operation.
_adapter_of_type: dict[type[Any], Callable[[Any], Any]] = {}


def adapter_for(handle: Any) -> TransactionConnection | AsyncTransactionConnection:  # noqa: ANN401 - of any driver
    """Return the adapter for *handle*, a connection or session of the application."""
    type_ = type(handle)
    adapter = _adapter_of_type.get(type_)
    if adapter is None:
        adapter = _adapter_of_type[type_] = _load_adapter(type_)
    connection: TransactionConnection | AsyncTransactionConnection = adapter(handle)
    return connection


def _load_adapter(type_: type[Any]) -> Callable[[Any], Any]:
    driver = _driver_of_connection(type_)
    if driver is None:
        drivers = ", ".join(dict.fromkeys(name for name, _ in _ADAPTERS))
        raise Misconfigured(
            f"{type_.__module__}.{type_.__qualname__} is not a supported connection; transactions "
            f"work with connections and sessions of {drivers}"
        )
    module, name = _ADAPTERS[driver]
    adapter: Callable[[Any], Any] = getattr(import_module(f"coatcheck.transactions.{module}"), name)
    return adapter


def is_connection(handle: Any) -> bool:  # noqa: ANN401 - of any driver
    """*handle* is a connection or session, not a pool or a function that returns one."""
    return _driver_of_connection(type(handle)) is not None


def is_async(handle: Any) -> bool:  # noqa: ANN401 - of any driver
    """*handle* is a connection for async code."""
    driver = _driver_of_connection(type(handle))
    return driver is not None and driver[1]


def is_of_async_driver(type_: type[Any]) -> bool:
    """*type_* belongs to an async driver, such as its pools, or its name begins with "async"."""
    return any(_driver_of(ancestor)[1] for ancestor in type_.__mro__)


def _driver_of_connection(type_: type[Any]) -> tuple[str, bool] | None:
    for ancestor in type_.__mro__:  # the application may use a subclass of its own
        driver = _driver_of(ancestor)
        if ancestor.__name__ in _TYPE_NAMES and driver in _ADAPTERS:
            return driver
    return None


def _driver_of(type_: type[Any]) -> tuple[str, bool]:
    """Return the package that *type_* comes from, and whether it is for async code."""
    driver = type_.__module__.partition(".")[0].removeprefix("_")
    return driver, driver in _ASYNC_DRIVERS or type_.__name__.lower().startswith("async")
