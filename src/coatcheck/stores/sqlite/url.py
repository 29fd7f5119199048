"""URLs of SQLite stores: `sqlite:///relative.db` and `sqlite:////absolute.db`."""

from __future__ import annotations

import os
from typing import TypedDict
from urllib.parse import parse_qsl, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import no_option, seconds_of, shown


class SqliteOptions(TypedDict, total=False):
    """Keyword arguments of `SqliteStore` that a URL may set."""

    compact: bool
    busy_timeout_s: float


def parse_url(url: str) -> tuple[str, SqliteOptions]:
    """Return the path and the options in *url*; raise `Misconfigured` if it has no usable path."""
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.fragment or path in ("", ":memory:") or not _is_file_name(path):
        raise Misconfigured(
            f"{shown(url)} names no file; write sqlite:///relative.db or sqlite:////absolute.db "
            "('#' as %23), or memory:// for a store that is lost when the process ends"
        )
    return path, _parse_options(parts.query)


def _is_file_name(path: str) -> bool:
    """Return False for a path that the operating system cannot represent."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _parse_options(query: str) -> SqliteOptions:
    options: SqliteOptions = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "compact" and value in ("0", "1"):
            options["compact"] = value == "1"
        elif name == "busy_timeout":
            options["busy_timeout_s"] = seconds_of(f"sqlite: {name}", value)
        else:
            problem = no_option("sqlite", name, value, ("compact",))
            raise Misconfigured(
                f"{problem}; the options are compact=0 or 1 (keep neither scopes nor keys) and "
                "busy_timeout=5s (how long to wait while another process holds the write lock)"
            )
    return options
