"""Lent connections: the application's own, for the length of one transaction (L9).

Known by their types' names, so that no driver is imported before somebody uses it. `contract` says
what is done with one; then one file for each family of drivers; `source` says where they come
from, `threads` how an event loop uses those for sync code, `readable` how it waits for a socket,
`ending` that what was begun is ended, `trouble` what their errors mean.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from coatcheck.errors import Misconfigured
from coatcheck.lent.contract import AsyncLent, Lent

__all__ = ["AsyncLent", "Lent", "is_async", "is_connection", "is_of_async_driver", "lent_by"]

# Where a type comes from, whether its name says that it is async, and what it is to us.
_KINDS = {
    ("sqlite3", False): ("dbapi", "SqliteLent"),
    ("psycopg", False): ("psycopg", "PsycopgLent"),
    ("pymysql", False): ("dbapi", "PymysqlLent"),
    ("MySQLdb", False): ("dbapi", "PymysqlLent"),
    ("sqlalchemy", False): ("sqlalchemy", "AlchemyLent"),
    ("django", False): ("django", "DjangoLent"),
    ("psycopg", True): ("psycopg", "PsycopgAsyncLent"),
    ("asyncpg", True): ("asyncpg", "AsyncpgLent"),
    ("aiosqlite", True): ("asynchronous", "AiosqliteLent"),
    ("asyncmy", True): ("asynchronous", "AsyncmyLent"),
    ("aiomysql", True): ("asynchronous", "AsyncmyLent"),
    ("sqlalchemy", True): ("sqlalchemy", "AsyncAlchemyLent"),
}
_ALWAYS_ASYNC = frozenset({"asyncpg", "aiosqlite", "asyncmy", "aiomysql"})
# Of the same packages come pools and the like, which only lead to one of these.
_NAMES = frozenset(
    {
        *("Connection", "Session", "scoped_session", "BaseDatabaseWrapper", "ConnectionProxy"),
        *("AsyncConnection", "AsyncSession", "async_scoped_session", "PoolConnectionProxy"),
    }
)


def lent_by(handle: Any) -> Lent | AsyncLent:  # noqa: ANN401 - of whatever driver
    """*handle*, a connection or session of the application's, as we use it."""
    known = _KNOWN.get(type(handle)) or _known(type(handle))
    lent: Lent | AsyncLent = known(handle)
    return lent


# What we have made of a type before, because it is asked for each transaction.
_KNOWN: dict[type[Any], Callable[[Any], Any]] = {}


def _known(type_: type[Any]) -> Callable[[Any], Any]:
    kind = _kind_of(type_)
    if kind is None:
        name = f"{type_.__module__}.{type_.__qualname__}"
        drivers = ", ".join(dict.fromkeys(driver for driver, _ in _KINDS))
        raise Misconfigured(f"{name} is no connection that is known here; there are {drivers}")
    module, name = _KINDS[kind]
    known: Callable[[Any], Any] = getattr(import_module(f"coatcheck.lent.{module}"), name)
    _KNOWN[type_] = known
    return known


def is_connection(handle: Any) -> bool:  # noqa: ANN401 - of whatever driver
    """*handle* is a connection or session, not something that leads to one."""
    return _kind_of(type(handle)) is not None


def is_async(handle: Any) -> bool:  # noqa: ANN401 - of whatever driver
    """*handle* is a connection for async code."""
    kind = _kind_of(type(handle))
    return kind is not None and kind[1]


def _kind_of(type_: type[Any]) -> tuple[str, bool] | None:
    for ancestor in type_.__mro__:  # an application may have a type of its own
        kind = _driver_of(ancestor)
        if ancestor.__name__ in _NAMES and kind in _KINDS:
            return kind
    return None


def is_of_async_driver(type_: type[Any]) -> bool:
    """*type_* is of a driver for async code, or called so: its pools, say."""
    return any(_driver_of(ancestor)[1] for ancestor in type_.__mro__)


def _driver_of(type_: type[Any]) -> tuple[str, bool]:
    """Where *type_* comes from, and whether it is for async code."""
    driver = type_.__module__.partition(".")[0].removeprefix("_")
    return driver, driver in _ALWAYS_ASYNC or type_.__name__.lower().startswith("async")
