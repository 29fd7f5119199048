"""The URL of a MySQL store: what each part of it means, and errors that help to correct it.

Invariant: no message shows a password.
"""

from __future__ import annotations

import re
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.mysql.connection import Server
from coatcheck.stores.mysql.schema import META_TABLE
from coatcheck.stores.url import COMPACT, Options, flag, parse_options, timeout_s

_PORT = 3306
TABLE = "coatcheck_records"
# 64 characters is what a name may have; these need no escaping anywhere.
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MALFORMED = (
    "mysql: the URL must be mysql://user:password@host:3306/database, with '@' as %40, '/' as %2F, "
    "'#' as %23 and so on in the name and the password"
)


class ParsedUrl(NamedTuple):
    """The parts of a URL."""

    server: Server
    table: str
    compact: bool


def parse_url(url: str) -> ParsedUrl:
    """Return the parts of *url*; raise `Misconfigured` if a part or an option makes no sense."""
    parts = urlsplit(url)
    options = parse_options("mysql", parts.query, _OPTIONS)
    table, compact = options.pop("table", TABLE), options.pop("compact", False)
    server = Server(
        host=parts.hostname or "",
        port=_port(parts),
        user=None if parts.username is None else unquote(parts.username),
        password=unquote(parts.password or ""),
        database=_database(parts),
        tls=_tls(is_on=options.pop("ssl", None), ca=options.pop("ssl_ca", None)),
        **options,
    )
    return ParsedUrl(server, table, compact)


def _database(parts: SplitResult) -> str:
    database = unquote(parts.path.removeprefix("/"))
    if not parts.hostname or not database or "/" in database or parts.fragment:
        raise Misconfigured(_MALFORMED)
    return database


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or _PORT
    except ValueError:
        # Without its cause: what that error calls a port may be the beginning of a password.
        raise Misconfigured(_MALFORMED) from None


def _tls(*, is_on: bool | None, ca: str | None) -> ssl.SSLContext | bool | None:
    """Return the context that verifies the server; False: no TLS; None: the driver's default."""
    if is_on is False or (is_on is None and ca is None):
        return is_on
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise Misconfigured(f"mysql: ssl_ca={ca} is not a readable certificate") from error


def _table(value: str) -> str:
    if not _TABLE_NAME.fullmatch(value) or value == META_TABLE:
        raise ValueError("it cannot be the name of our table; use letters, digits and '_'")
    return value


_OPTIONS: Options = {
    "table": ("table", _table, f"table={TABLE}"),
    "compact": ("compact", flag, COMPACT),
    "timeout": ("timeout_s", timeout_s, "timeout=5s (how long to wait for the server)"),
    "transaction_timeout": (
        *("transaction_timeout_s", timeout_s),
        "transaction_timeout=60s (the same for each statement of transaction mode)",
    ),
    "ssl": ("ssl", flag, "ssl=0 or 1 (require TLS and verify it)"),
    "ssl_ca": ("ssl_ca", str, "ssl_ca=FILE (by this certificate)"),
}
