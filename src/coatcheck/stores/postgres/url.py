"""The URL of a PostgreSQL store: what is ours in it, and what both drivers make of the rest.

The rest is libpq's: psycopg takes it as it is. asyncpg has keywords of its own, and takes an
option that it does not know for a setting of the server. So the options are split here. A URL with
an option that only libpq can honour is used through threads.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from coatcheck.errors import Misconfigured
from coatcheck.stores.postgres.errors import one_line
from coatcheck.stores.url import COMPACT, Options, flag, parse_options, timeout_s

# 5 s: thousands of round trips. A server that takes longer is down for all that a client can tell.
TIMEOUT_S = 5.0
_PORT = 5432


def _schema(value: str) -> str:
    if not value:
        raise ValueError("name a schema")
    return value


_OPTIONS: Options = {
    "schema": ("schema", _schema, "schema=NAME"),
    "compact": ("compact", flag, COMPACT),
    "timeout": ("timeout_s", timeout_s, "timeout=5s"),
}


def parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Return libpq's part of *url*, and the keyword arguments of `PostgresStore` that it sets."""
    parts = urlsplit(url)
    query = parts.query.replace("+", "%2B")  # for libpq a + is no space
    pairs = parse_qsl(query, keep_blank_values=True)
    ours = [pair for pair in pairs if pair[0] in _OPTIONS]
    rest = urlencode([pair for pair in pairs if pair not in ours], quote_via=quote)
    options = parse_options("postgresql", urlencode(ours), _OPTIONS, "those of libpq")
    # Not `urlunsplit`, which drops the two slashes of a URL without a host.
    return f"postgresql://{parts.netloc}{parts.path}{'?' if rest else ''}{rest}", options


def conninfo_of(given: str, timeout_s: float) -> str:
    """Return *given*, a connection string or URL, with time limits and for a writable server."""
    try:
        chosen = conninfo_to_dict(given)
    except ProgrammingError as error:
        raise Misconfigured(f"postgresql: {one_line(error)}") from error
    defaults: dict[str, Any] = {
        "application_name": "coatcheck",
        "connect_timeout": max(2, round(timeout_s)),  # libpq takes 1 for 2
        "tcp_user_timeout": round(timeout_s * 1_000),
    }
    ours = {
        "client_encoding": "UTF8",
        "target_session_attrs": "read-write",  # a standby may lack what was acknowledged
    }
    return make_conninfo(**{**defaults, **chosen, **ours})


# What asyncpg reads from a URL under libpq's name.
_SHARED_WITH_ASYNCPG = (
    *("user", "password", "dbname", "passfile", "target_session_attrs", "krbsrvname", "gsslib"),
    *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version"),
)
# What libpq sends to the server as settings of the session.
_SERVER_SETTINGS = ("application_name", "options")
# What asyncpg cannot do, or not in each of its releases; None: whatever the value.
_ONLY_LIBPQ = {
    "channel_binding": "require",
    "gssencmode": "require",
    "require_auth": None,
    "requirepeer": None,
    "sslcertmode": "require",
    "service": None,
    "sslcrldir": None,
    "sslnegotiation": "direct",
    "sslrootcert": "system",
}


def asyncpg_options(conninfo: str, settings: dict[str, str] | None) -> dict[str, Any] | None:
    """
    Return the keywords of `asyncpg.connect` that mean what *conninfo* means to libpq.

    None if asyncpg cannot honour all of it. With *settings* of the session, every statement is
    prepared.
    """
    options = {**_libpq_defaults(), **conninfo_to_dict(conninfo)}
    for name, value in _ONLY_LIBPQ.items():
        if options.get(name) and value in (None, options[name]):
            return None
    shared = {name: options[name] for name in _SHARED_WITH_ASYNCPG if options.get(name)}
    sent = {name: options[name] for name in _SERVER_SETTINGS if options.get(name)}
    hosts = options.get("host") or options.get("hostaddr")
    ports = [int(port or _PORT) for port in str(options.get("port", "")).split(",")]
    return {
        "dsn": f"postgresql://?{urlencode(shared, quote_via=quote)}",
        "host": str(hosts).split(",") if hosts else None,
        "port": ports[0] if len(ports) == 1 else ports,
        "server_settings": {**sent, **(settings or {})},
        "statement_cache_size": 100 if settings else 0,
        "max_cached_statement_lifetime": 0,
        "timeout": None,  # see `async_backend.py`
    }


def _libpq_defaults() -> dict[str, str]:
    """Return the defaults of libpq and those of the environment, such as PGOPTIONS."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in Conninfo.get_defaults()
        if option.val
    }
