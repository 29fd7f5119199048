"""URLs of the Redis store: which servers they name, and how they are to be used.

Above `redis_line.py` and `redis_places.py`, which connect to what was named. Whatever cannot be
meant is refused here, with a sentence that says what could be.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, TypedDict
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.url import no_option, seconds_of, shown

# The dangers that are refused unless they are allowed by name; see `redis_dangers.py`.
DANGERS = ("eviction", "no-persistence", "replica")

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
_THERE_ARE = (
    "there are prefix=coatcheck: (of all keys), compact=0 or 1 (keep only digests), timeout=5s, "
    "wait=1 (replicas that must have a write before it counts), tls=0 or 1, tls_ca=/path/to/ca.pem,"
    " sentinel_username=NAME and sentinel_password=WORD (of the Sentinels' own) "
    f"and allow=NAME,NAME of {', '.join(DANGERS)}"
)
# What stands behind the question mark, too, but says how to be let in.
_AT_THE_DOOR = frozenset({"tls", "tls_ca", "sentinel_username", "sentinel_password"})


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """Which servers, and how to be let in."""

    shape: Shape
    addresses: tuple[Address, ...]
    service: str = ""  # sentinel: what the master is known as
    database: int = 0
    username: str | None = None
    password: str | None = None
    is_tls: bool = False
    tls_ca: str = ""  # where the certificates are that we trust; empty: the system's
    sentinel_username: str | None = None  # the Sentinels have a login of their own, or none
    sentinel_password: str | None = None

    @property
    def name(self) -> str:
        """For people; whoever reads a log learns no password."""
        return f"redis {','.join(str(address) for address in self.addresses)}"


class Options(TypedDict, total=False):
    """What stands behind the question mark."""

    prefix: str
    compact: bool
    timeout_s: float
    wait: int
    allow: frozenset[str]


def target_and_options(url: str) -> tuple[Target, Options]:
    """What *url* names, and how it wants it used."""
    parts = urlsplit(url)
    shape = _SHAPES[parts.scheme]
    options: Options = {}
    door: dict[str, str] = {"tls": "1" if parts.scheme == "rediss" else "0"}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name.startswith("sentinel_") and name in _AT_THE_DOOR and shape != "sentinel":
            raise Misconfigured(f"redis: {name}= is for redis+sentinel:// alone")
        if name in _AT_THE_DOOR and (name != "tls" or value in ("0", "1")):
            door[name] = value
        else:
            _take(options, name, value)
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
        is_tls=door["tls"] == "1",
        tls_ca=door.get("tls_ca", ""),
        sentinel_username=door.get("sentinel_username") or None,
        sentinel_password=door.get("sentinel_password") or None,
    )
    return target, options


def _address(text: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        return Address(parts.hostname or "localhost", parts.port or default_port)
    except ValueError:
        # Not from that error, and not as it is written: what it takes for a port may be a password.
        host = text.partition(":")[0]
        raise Misconfigured(f"redis: {host}:… names no server; write {_EXAMPLES}") from None


def _path(parts: SplitResult, shape: str) -> tuple[str, int]:
    """The service and the number of the database."""
    words = unquote(parts.path).strip("/").split("/")
    service = words.pop(0) if shape == "sentinel" and words else ""
    database = words.pop(0) if words else ""
    is_known = not words and not parts.fragment and (database or "0").isdecimal()
    if not is_known or (shape == "sentinel" and not service):
        raise Misconfigured(f"{shown(parts.geturl())} cannot be meant; write {_EXAMPLES}")
    number = int(database or "0")
    if shape == "cluster" and number:
        raise Misconfigured(f"redis+cluster: database {number}; a cluster has none but 0")
    return service, number


def _take(options: Options, name: str, value: str) -> None:
    if name == "compact" and value in ("0", "1"):
        options["compact"] = value == "1"
    elif name == "prefix" and not set("{}") & set(value):
        options["prefix"] = value
    elif name == "timeout":
        options["timeout_s"] = _seconds(name, value)
    elif name == "wait" and value.isdecimal():
        options["wait"] = int(value)
    elif name == "allow" and set(value.split(",")) <= set(DANGERS):
        options["allow"] = frozenset(value.split(","))
    else:
        hint = "a prefix holds no braces; " if name == "prefix" else ""
        told = no_option("redis", name, value, ("compact", "prefix", "wait", "allow", "tls"))
        raise Misconfigured(f"{told}; {hint}{_THERE_ARE}")


def _seconds(name: str, value: str) -> float:
    seconds = seconds_of(f"redis: {name}", value)
    if seconds <= 0:
        raise Misconfigured(f"redis: {name}={value} leaves no time to answer")
    return seconds
