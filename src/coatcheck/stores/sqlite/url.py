"""URLs of SQLite stores: `sqlite:///relative.db` and `sqlite:////absolute.db`."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import COMPACT, Options, duration_s, flag, parse_options, shown

_OPTIONS: Options = {
    "compact": ("compact", flag, COMPACT),
    "busy_timeout": (
        *("busy_timeout_s", duration_s),
        "busy_timeout=5s (how long to wait while another process holds the write lock)",
    ),
}


def parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Return the path in *url*, and the keyword arguments of `SqliteStore` that it sets."""
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.fragment or path in ("", ":memory:") or not _is_file_name(path):
        is_one_slash_short = parts.netloc and "@" not in parts.netloc
        hint = (
            f" (did you mean sqlite:///{parts.netloc}{parts.path}?)" if is_one_slash_short else ""
        )
        raise Misconfigured(
            f"{shown(url)} names no file{hint}; write sqlite:///relative.db or "
            "sqlite:////absolute.db ('#' as %23), or memory:// for a store that is lost when the "
            "process ends"
        )
    return path, parse_options("sqlite", parts.query, _OPTIONS)


def _is_file_name(path: str) -> bool:
    """Return False for a path that the operating system cannot represent."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
