"""URLs of the Redis store: which servers they name, and with which options.

Anything that is not understood is refused here, with a message that shows what to write.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, TypedDict
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import no_option, seconds_of, shown

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
_KNOWN_OPTIONS = (
    "the options are prefix=coatcheck: (of all keys), compact=0 or 1 (keep neither scopes nor "
    "keys), timeout=5s, wait=1 (replicas that must acknowledge a write), tls=0 or 1, "
    "tls_ca=/path/to/ca.pem, sentinel_username=NAME and sentinel_password=WORD (of the Sentinels) "
    f"and allow=NAME,NAME of {', '.join(RISKS)}"
)
# The options that say how to connect and log in, not how to use the store.
_CONNECT_OPTIONS = frozenset({"tls", "tls_ca", "sentinel_username", "sentinel_password"})


class Address(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """Which servers, and how to connect and log in."""

    shape: Shape
    addresses: tuple[Address, ...]
    service: str = ""  # Sentinel: the name of the master's service
    database: int = 0
    username: str | None = None
    password: str | None = None
    is_tls: bool = False
    tls_ca: str = ""  # file of trusted certificates; empty: those of the system
    sentinel_username: str | None = None  # the Sentinels' own login, if they have one
    sentinel_password: str | None = None

    @property
    def name(self) -> str:
        """The addresses, for logs and error messages; no password."""
        return f"redis {','.join(str(address) for address in self.addresses)}"


class Options(TypedDict, total=False):
    """How to use the store; see `RedisStore`."""

    prefix: str
    compact: bool
    timeout_s: float
    wait: int
    allow: frozenset[str]


def target_and_options(url: str) -> tuple[Target, Options]:
    """Return the servers that *url* names, and its options."""
    parts = urlsplit(url)
    shape = _SHAPES[parts.scheme]
    options: Options = {}
    connect: dict[str, str] = {"tls": "1" if parts.scheme == "rediss" else "0"}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name.startswith("sentinel_") and name in _CONNECT_OPTIONS and shape != "sentinel":
            raise Misconfigured(f"redis: {name}= is for redis+sentinel:// only")
        if name in _CONNECT_OPTIONS and (name != "tls" or value in ("0", "1")):
            connect[name] = value
        else:
            _set_option(options, name, value)
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, database = _path(parts, shape)
    default_port = _SENTINEL_PORT if shape == "sentinel" else _PORT
    addresses = tuple(_address(host, default_port) for host in hosts.split(","))
    if shape == "single" and len(addresses) > 1:
        raise Misconfigured(f"{parts.scheme}:// names one server; write {_EXAMPLES}")
    target = Target(
        shape=shape,
        addresses=addresses,
        service=service,
        database=database,
        username=unquote(username) or None,
        password=unquote(password) or None,
        is_tls=connect["tls"] == "1",
        tls_ca=connect.get("tls_ca", ""),
        sentinel_username=connect.get("sentinel_username") or None,
        sentinel_password=connect.get("sentinel_password") or None,
    )
    return target, options


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


def _set_option(options: Options, name: str, value: str) -> None:
    if name == "compact" and value in ("0", "1"):
        options["compact"] = value == "1"
    elif name == "prefix" and not set("{}") & set(value):
        options["prefix"] = value
    elif name == "timeout":
        options["timeout_s"] = _seconds(name, value)
    elif name == "wait" and value.isdecimal():
        options["wait"] = int(value)
    elif name == "allow" and set(value.split(",")) <= set(RISKS):
        options["allow"] = frozenset(value.split(","))
    else:
        hint = "a prefix must not contain braces; " if name == "prefix" else ""
        refusal = no_option("redis", name, value, ("compact", "prefix", "wait", "allow", "tls"))
        raise Misconfigured(f"{refusal}; {hint}{_KNOWN_OPTIONS}")


def _seconds(name: str, value: str) -> float:
    seconds = seconds_of(f"redis: {name}", value)
    if seconds <= 0:
        raise Misconfigured(f"redis: {name}={value} leaves no time to answer; write timeout=5s")
    return seconds
