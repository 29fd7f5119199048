"""Where a DynamoDB store is and how it is talked to: what stands in its URL."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import no_option, seconds_of, shown

_TABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    Which table, where, and how it is talked to.

    Args:
        table: its name.
        region: where it is; else what the environment says, as for all AWS tools.
        endpoint: another address than AWS's own, such as that of a stand-in.
        compact: keep only digests; label, scope and key are not stored.
        timeout_s: how long a request may take, its second try included.
        concurrency: how many requests are under way at a time: of a batch, or of an event loop.
    """

    table: str
    region: str | None = None
    endpoint: str | None = None
    compact: bool = False
    timeout_s: float = 5.0
    # 32: a batch of 256 takes eight rounds of a few milliseconds; more threads than that would
    # only stand in line for the interpreter.
    concurrency: int = 32

    def __str__(self) -> str:
        return f"dynamodb table {self.table}"


def place_of(url: str) -> Place:
    """The place that *url* names: `dynamodb://table?region=eu-west-1`."""
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.fragment or not _TABLE_NAME.fullmatch(parts.netloc):
        raise Misconfigured(
            f"{shown(url)} names no table; write dynamodb://table?region=eu-west-1, the name with "
            "3 to 255 letters, digits, '_', '-' or '.'"
        )
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        try:
            field, read = _OPTIONS[name]
            options[field] = read(value)
        except (KeyError, ValueError) as error:
            raise Misconfigured(
                f"{no_option('dynamodb', name, value, _OPTIONS)}; there are region=eu-west-1, "
                "endpoint=http://localhost:8000, compact=0 or 1 (keep only digests), timeout=5s "
                "and concurrency=32 (1 to 999)"
            ) from error
    return Place(table=parts.netloc, **options)


def _region(value: str) -> str:
    if not value:
        raise ValueError("a region has a name")
    return value


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if not parts.hostname or parts.port == 0 or not value.startswith(("http://", "https://")):
        raise ValueError("an endpoint is a URL")
    return value


def _flag(value: str) -> bool:
    return bool(("0", "1").index(value))


def _seconds(value: str) -> float:
    if (seconds := seconds_of("dynamodb: timeout", value)) <= 0:
        raise ValueError("nothing is done in no time")
    return seconds


def _count(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}", value):
        raise ValueError("a few threads, not none and not thousands")
    return int(value)


_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "region": ("region", _region),
    "endpoint": ("endpoint", _endpoint),
    "compact": ("compact", _flag),
    "timeout": ("timeout_s", _seconds),
    "concurrency": ("concurrency", _count),
}
