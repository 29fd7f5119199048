"""URLs of the Redis store: which servers they name, and with which options.

Anything that is not understood is refused here, with a message that shows what to write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import COMPACT, Options, flag, parse_options, shown, timeout_s

# The risks that the store refuses unless the URL allows them by name; see `safety.py`.
RISKS = ("eviction", "no-persistence", "replica")

Shape: TypeAlias = Literal["single", "sentinel", "cluster"]

_PORT = 6379
_SENTINEL_PORT = 26379
_SHAPES: dict[str, Shape] = {
    "redis": "single",
    "rediss": "single",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
}
SENTINEL_EXAMPLE = "redis+sentinel://host1:26379,host2:26379/service/0"
_EXAMPLES = (
    f"redis://host:6379/0, rediss://host:6379/0, {SENTINEL_EXAMPLE} "
    "or redis+cluster://host1:6379,host2:6379"
)


class Address(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Which servers to use, and how."""

    shape: Shape
    addresses: tuple[Address, ...]  # the server; or some Sentinels, or some nodes of the cluster
    service: str = ""  # Sentinel: the name of the master's service
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    tls_ca: str = ""  # file of trusted certificates; empty: those of the system
    sentinel_username: str | None = None  # the Sentinels' own login, if they have one
    sentinel_password: str | None = field(default=None, repr=False)
    prefix: str = "coatcheck:"  # of all keys
    compact: bool = False  # keep only digests; label, scope and key are stored empty
    # 5 s, for connecting and for each answer: thousands of times what an answer takes. After that
    # an error serves the caller better.
    timeout_s: float = 5.0
    wait: int = 0  # how many replicas must acknowledge a write
    allow: frozenset[str] = frozenset()  # the `RISKS` that are accepted

    def __str__(self) -> str:
        return f"redis {','.join(str(address) for address in self.addresses)}"


def parse_url(url: str) -> RedisConfig:
    """Return the servers and the options in *url*."""
    parts = urlsplit(url)
    shape = _SHAPES[parts.scheme]
    options = parse_options("redis", parts.query, _OPTIONS)
    for name in ("sentinel_username", "sentinel_password"):
        if name in options and shape != "sentinel":
            raise Misconfigured(f"redis: {name}= is for redis+sentinel:// only")
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, database = _path(parts, shape)
    default_port = _SENTINEL_PORT if shape == "sentinel" else _PORT
    addresses = tuple(_address(host, default_port) for host in hosts.split(","))
    if shape == "single" and len(addresses) > 1:
        raise Misconfigured(f"{parts.scheme}:// names one server; write {_EXAMPLES}")
    return RedisConfig(
        shape=shape,
        addresses=addresses,
        service=service,
        database=database,
        username=unquote(username) or None,
        password=unquote(password) or None,
        **{"is_tls": parts.scheme == "rediss", **options},
    )


def _address(text: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        return Address(parts.hostname or "localhost", parts.port or default_port)
    except ValueError:
        # Neither the error nor the whole text: what looks like a port may be a password.
        host = text.partition(":")[0]
        raise Misconfigured(f"redis: {host}:… is not host:port; write {_EXAMPLES}") from None


def _path(parts: SplitResult, shape: str) -> tuple[str, int]:
    """Return the Sentinel service and the number of the database."""
    words = unquote(parts.path).strip("/").split("/")
    service = words.pop(0) if shape == "sentinel" and words else ""
    database = words.pop(0) if words else ""
    is_known = not words and not parts.fragment and (database or "0").isdecimal()
    if not is_known or (shape == "sentinel" and not service):
        raise Misconfigured(f"{shown(parts.geturl())} is not understood; write {_EXAMPLES}")
    number = int(database or "0")
    if shape == "cluster" and number:
        raise Misconfigured(f"redis+cluster: database {number}; a cluster has only database 0")
    return service, number


def _prefix(value: str) -> str:
    if set("{}") & set(value):  # Redis Cluster would take one for the brace before the id
        raise ValueError("the prefix has braces")
    return value


def _replicas(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", value):
        raise ValueError("not a number of replicas")
    return int(value)


def _risks(value: str) -> frozenset[str]:
    risks = frozenset(value.split(","))
    if not risks <= set(RISKS):
        raise ValueError("not a known risk")
    return risks


_OPTIONS: Options = {
    "prefix": ("prefix", _prefix, "prefix=coatcheck: (of all keys, without braces)"),
    "compact": ("compact", flag, COMPACT),
    "timeout": ("timeout_s", timeout_s, "timeout=5s"),
    "wait": ("wait", _replicas, "wait=1 (replicas that must acknowledge a write)"),
    "tls": ("is_tls", flag, "tls=0 or 1"),
    "tls_ca": ("tls_ca", str, "tls_ca=/path/to/ca.pem"),
    "sentinel_username": ("sentinel_username", str, "sentinel_username=NAME (of the Sentinels)"),
    "sentinel_password": ("sentinel_password", str, "sentinel_password=WORD (of the Sentinels)"),
    "allow": ("allow", _risks, f"allow=NAME,NAME of {', '.join(RISKS)}"),
}
