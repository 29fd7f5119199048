"""The URL of a MySQL store: what each part of it means, and errors that help to correct it.

Invariant: no message shows a password.
"""

from __future__ import annotations

import re
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.mysql.connection import Server
from coatcheck.stores.mysql.schema import META_TABLE
from coatcheck.stores.url import no_option, seconds_of

PORT = 3306
TABLE = "coatcheck_records"
# 5 s: hundreds of commits. A caller that has waited that long is better off with an error.
TIMEOUT = "5s"
# 60 s: the handler's own statements may take long, and MySQL lets them wait 50 s for a lock.
TRANSACTION_TIMEOUT = "60s"

# 64 characters is what a name may have; these need no escaping anywhere.
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MALFORMED = (
    "mysql: the URL must be mysql://user:password@host:3306/database, with '@' as %40, '/' as %2F, "
    "'#' as %23 and so on in the name and the password"
)
_NAMES = ("table", "compact", "timeout", "transaction_timeout", "ssl", "ssl_ca")
_OPTIONS = (
    f"table={TABLE}, compact=0 or 1 (keep neither scopes nor keys), timeout=5s (how long to wait "
    "for the server), transaction_timeout=60s (the same for each statement of transaction mode), "
    "ssl=0 or 1 (require TLS and verify it) and ssl_ca=FILE (by this certificate)"
)


class ParsedUrl(NamedTuple):
    """The parts of a URL."""

    server: Server
    table: str
    compact: bool


def parse_url(url: str) -> ParsedUrl:
    """Return the parts of *url*; raise `Misconfigured` if a part or an option makes no sense."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _NAMES:
            raise Misconfigured(f"{no_option('mysql', name, value, _NAMES)}; there are {_OPTIONS}")
    table = options.get("table", TABLE)
    if not _TABLE_NAME.fullmatch(table) or table == META_TABLE:
        raise Misconfigured(
            f"mysql: table={table} cannot be the name of our table; use letters, digits and '_'"
        )
    server = Server(
        host=parts.hostname or "",
        port=_port(parts),
        user=None if parts.username is None else unquote(parts.username),
        password=unquote(parts.password or ""),
        database=_database(parts),
        timeout_s=_seconds(options, "timeout", TIMEOUT),
        transaction_timeout_s=_seconds(options, "transaction_timeout", TRANSACTION_TIMEOUT),
        tls=_tls(options),
    )
    return ParsedUrl(server, table, _flag(options, "compact", "0"))


def _database(parts: SplitResult) -> str:
    database = unquote(parts.path.removeprefix("/"))
    if not parts.hostname or not database or "/" in database or parts.fragment:
        raise Misconfigured(_MALFORMED)
    return database


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or PORT
    except ValueError:
        # Without its cause: what that error calls a port may be the beginning of a password.
        raise Misconfigured(_MALFORMED) from None


def _flag(options: dict[str, str], name: str, default: str) -> bool:
    value = options.get(name, default)
    if value not in ("0", "1"):
        raise Misconfigured(f"mysql: {name}={value} is no option; there are {_OPTIONS}")
    return value == "1"


def _seconds(options: dict[str, str], name: str, default: str) -> float:
    value = options.get(name, default)
    seconds = seconds_of(f"mysql: {name}", value)
    if seconds <= 0:
        raise Misconfigured(f"mysql: {name}={value} must be longer than 0")
    return seconds


def _tls(options: dict[str, str]) -> ssl.SSLContext | bool | None:
    """Return the context that verifies the server; False: no TLS; None: the driver's default."""
    ca = options.get("ssl_ca")
    if ca is None and "ssl" not in options:
        return None
    if not _flag(options, "ssl", "1"):
        return False
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise Misconfigured(f"mysql: ssl_ca={ca} is not a readable certificate") from error
