"""URLs of DynamoDB stores: `dynamodb://table?region=eu-west-1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import COMPACT, Options, flag, parse_options, shown, timeout_s

_TABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoConfig:
    """Which table to use, and how."""

    table: str
    region: str | None = None  # None: the one of the environment, as for all AWS tools
    endpoint: str | None = None  # of a server other than AWS, such as one for tests
    compact: bool = False  # keep the label, but neither scope nor key; see `compact_record`
    timeout_s: float = 5.0  # for a request, including its retry
    # How many requests of one batch, or of one event loop, run at the same time. 32: a batch of 256
    # takes eight rounds of a few milliseconds. More threads would mostly wait for the interpreter
    # lock.
    concurrency: int = 32

    def __str__(self) -> str:
        return f"dynamodb table {self.table}"


def parse_url(url: str) -> DynamoConfig:
    """Return the table and the options in *url*."""
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.fragment or not _TABLE_NAME.fullmatch(parts.netloc):
        raise Misconfigured(
            f"{shown(url)} names no table; write dynamodb://table?region=eu-west-1, with a name of "
            "3 to 255 letters, digits, '_', '-' or '.'"
        )
    return DynamoConfig(table=parts.netloc, **parse_options("dynamodb", parts.query, _OPTIONS))


def _region(value: str) -> str:
    if not value:
        raise ValueError("the region is empty")
    return value


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if not parts.hostname or parts.port == 0 or not value.startswith(("http://", "https://")):
        raise ValueError("the endpoint is not a URL")
    return value


def _concurrency(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}", value):
        raise ValueError("the concurrency is not a number from 1 to 999")
    return int(value)


_OPTIONS: Options = {
    "region": ("region", _region, "region=eu-west-1"),
    "endpoint": ("endpoint", _endpoint, "endpoint=http://localhost:8000"),
    "compact": ("compact", flag, COMPACT),
    "timeout": ("timeout_s", timeout_s, "timeout=5s"),
    "concurrency": ("concurrency", _concurrency, "concurrency=32 (1 to 999)"),
}
