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
from coatcheck.transactions.contract import TransactionConnection

__all__ = [
    "TransactionConnection",
    "adapter_for",
    "is_async",
    "is_connection",
    "is_of_async_driver",
]

# Package of the driver -> our module and class.
_ADAPTERS = {
    "sqlite3": ("dbapi", "SqliteConnection"),
    "aiosqlite": ("dbapi", "SqliteConnection"),
    "psycopg": ("psycopg", "PsycopgConnection"),
    "asyncpg": ("asyncpg", "AsyncpgConnection"),
    "pymysql": ("dbapi", "MysqlConnection"),
    "MySQLdb": ("dbapi", "MysqlConnection"),
    "asyncmy": ("dbapi", "MysqlConnection"),
    "aiomysql": ("dbapi", "MysqlConnection"),
    "sqlalchemy": ("sqlalchemy", "AlchemyConnection"),
    "django": ("django", "DjangoConnection"),
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
_adapter_of_type: dict[type[Any], Callable[[Any], TransactionConnection]] = {}


def adapter_for(handle: Any) -> TransactionConnection:  # noqa: ANN401 - of any driver
    """Return the adapter for *handle*, a connection or session of the application."""
    type_ = type(handle)
    adapter = _adapter_of_type.get(type_)
    if adapter is None:
        adapter = _adapter_of_type[type_] = _load_adapter(type_)
    return adapter(handle)


def _load_adapter(type_: type[Any]) -> Callable[[Any], TransactionConnection]:
    base = _drivers_own(type_)
    if base is None:
        raise Misconfigured(
            f"{type_.__module__}.{type_.__qualname__} is not a supported connection; transactions "
            f"work with connections and sessions of {', '.join(_ADAPTERS)}"
        )
    module, name = _ADAPTERS[_package_of(base)]
    adapter: Callable[[Any], TransactionConnection] = getattr(
        import_module(f"coatcheck.transactions.{module}"), name
    )
    return adapter


def is_connection(handle: Any) -> bool:  # noqa: ANN401 - of any driver
    """*handle* is a connection or session, not a pool or a function that returns one."""
    return _drivers_own(type(handle)) is not None


def is_async(handle: Any) -> bool:  # noqa: ANN401 - of any driver
    """*handle* is a connection for async code."""
    base = _drivers_own(type(handle))
    return base is not None and _is_for_async_code(base)


def is_of_async_driver(type_: type[Any]) -> bool:
    """*type_* belongs to an async driver, such as its pools, or its name begins with "async"."""
    return any(map(_is_for_async_code, type_.__mro__))


def _drivers_own(type_: type[Any]) -> type[Any] | None:
    """Return the connection type of a driver that *type_* is, or is a subclass of."""
    for ancestor in type_.__mro__:
        if ancestor.__name__ in _TYPE_NAMES and _package_of(ancestor) in _ADAPTERS:
            return ancestor
    return None


def _is_for_async_code(type_: type[Any]) -> bool:
    return _package_of(type_) in _ASYNC_DRIVERS or type_.__name__.lower().startswith("async")


def _package_of(type_: type[Any]) -> str:
    return type_.__module__.partition(".")[0].removeprefix("_")
