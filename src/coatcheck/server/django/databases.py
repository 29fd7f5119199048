"""Databases: a store in a database of the project, without a second configuration.

The store opens connections of its own, to the database that `DATABASES` names. In transaction mode
the record is written on Django's connection instead. `manage.py migrate` creates the tables, with
the store's own schema code, when Django has migrated that database.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections, router

from coatcheck.errors import Misconfigured
from coatcheck.stores import Migration, migrate_store
from coatcheck.stores.url import did_you_mean

# Options of Django's PostgreSQL backend that libpq does not know.
_NOT_LIBPQ = frozenset(
    {"assume_role", "isolation_level", "pool", "server_side_binding", "prepare_threshold"}
)
_BY_URL = "give settings.COATCHECK['store'] the URL of the store instead"


def is_alias(alias: str) -> bool:
    """The project has a database *alias*."""
    return alias in _aliases()


def _aliases() -> list[str]:
    return list(connections)


def check_alias(name: str, alias: str) -> None:
    """Refuse an *alias* that the project does not have; *name* is that of the setting."""
    if not is_alias(alias):
        hint = did_you_mean(alias, _aliases())
        raise Misconfigured(
            f"settings.COATCHECK[{name!r}] is {alias!r}, which is neither an alias of DATABASES"
            f"{hint} nor a URL such as redis://localhost/0"
        )


def connection_source(alias: str) -> Callable[[], object]:
    """Return a function that returns Django's connection to *alias* in the calling thread."""
    return functools.partial(connections.__getitem__, alias)


def url_of_database(alias: str) -> str | None:
    """The URL of the store in the database *alias*; None: it is an in-memory database."""
    connection = connections[alias]
    settings: Mapping[str, Any] = connection.settings_dict
    if connection.vendor == "sqlite":
        return None if connection.is_in_memory_db() else _sqlite_url(settings)
    if connection.vendor == "postgresql":
        return _postgresql_url(settings)
    if connection.vendor == "mysql":
        return _mysql_url(alias, settings)
    raise Misconfigured(
        f"DATABASES[{alias!r}] is a database of the kind {connection.vendor!r}, in which no store "
        f"can be; {_BY_URL}"
    )


def _sqlite_url(settings: Mapping[str, Any]) -> str:
    url = "sqlite:///" + quote(os.path.abspath(settings["NAME"]))  # noqa: PTH100 - as Django does
    timeout_s = settings["OPTIONS"].get("timeout")
    return f"{url}?busy_timeout={timeout_s:g}s" if timeout_s else url


def _postgresql_url(settings: Mapping[str, Any]) -> str:
    """As libpq reads it: everything may be an option, also the directory of a socket."""
    named = {"dbname": settings["NAME"], "host": settings["HOST"], "port": settings["PORT"]}
    options = {n: v for n, v in settings["OPTIONS"].items() if n not in _NOT_LIBPQ}
    given = {n: str(v) for n, v in {**named, **options}.items() if isinstance(v, str | int) and v}
    return f"postgresql://{_login(settings)}?{urlencode(given, quote_via=quote)}"


def _mysql_url(alias: str, settings: Mapping[str, Any]) -> str:
    host, options = settings["HOST"] or "localhost", settings["OPTIONS"]
    for name in ("read_default_file", "read_default_group", "unix_socket"):
        if name in options:
            raise Misconfigured(f"DATABASES[{alias!r}] has the option {name}; {_BY_URL}")
    if host.startswith("/"):
        raise Misconfigured(f"DATABASES[{alias!r}] is reached by a socket; {_BY_URL}")
    port = f":{settings['PORT']}" if settings["PORT"] else ""
    host = f"[{host}]" if ":" in host else host
    url = f"mysql://{_login(settings)}{host}{port}/{quote(str(settings['NAME']), safe='')}"
    certificate = (options.get("ssl") or {}).get("ca")
    return f"{url}?ssl_ca={quote(str(certificate), safe='')}" if certificate else url


def _login(settings: Mapping[str, Any]) -> str:
    user, password = (quote(str(settings[name] or ""), safe="") for name in ("USER", "PASSWORD"))
    return f"{user}:{password}@" if password else f"{user}@" if user else ""


def create_tables(store_alias: str | None, using: str) -> Migration | None:
    """Create or upgrade the tables of the store, if it is in the database *using*."""
    if using != store_alias or not router.allow_migrate(using, "coatcheck", model_name="operation"):
        return None
    url = url_of_database(using)
    return None if url is None else migrate_store(url)
