"""Safety: can this Redis server lose records that it has acknowledged?

A store does not open on a server with a risk that the URL does not allow by name. While the store
runs, each new connection asks again, and so does the store once a minute (`SafetyMonitor`). If a
risk has appeared, claims are refused, but operations that are running can still complete. The
doctor shows the same findings.

Most answers come from `INFO`, which managed services allow. If `CONFIG` is forbidden, the doctor
warns about what could not be checked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Finding
from coatcheck.stores.redis.records import Words
from coatcheck.stores.redis.url import SENTINEL_EXAMPLE, Shape

logger = logging.getLogger("coatcheck")

# 6.2 (2021): the first version whose SET takes an absolute expiry time (PXAT).
_VERSION_MIN = (6, 2)
# 0.9: for most servers the rest is some hours of growth, which is time to act.
_MEMORY_SHARE_MAX = 0.9

# What every server is asked, in one round trip.
QUESTIONS: tuple[Words, ...] = (
    ("INFO",),
    ("CONFIG", "GET", "save"),
    ("CONFIG", "GET", "appendfsync"),
)


class Risk(NamedTuple):
    """A way in which the server could lose acknowledged records."""

    name: str  # for `allow=`; empty if it cannot be allowed
    message: str

    @property
    def advice(self) -> str:
        """The message, with how to allow the risk."""
        hint = f" (or accept the risk with ?allow={self.name})" if self.name else ""
        return f"{self.message}{hint}"


class Health(NamedTuple):
    """The answers of one server, interpreted."""

    risks: tuple[Risk, ...]
    findings: tuple[Finding, ...]

    @property
    def is_replica(self) -> bool:
        """Whether another server is the master."""
        return any(risk.name == "replica" for risk in self.risks)


class SafetyMonitor:
    """
    The risks of one store's servers while it runs; the URL may *allow* some of them by name.

    With Sentinel and in a cluster, roles change, and a server that became a replica refuses writes
    by itself. For a single server being a replica is a risk like any other.
    """

    def __init__(self, allow: frozenset[str], shape: Shape) -> None:
        self.refusal = ""  # why claims are refused; empty: they are not
        self.is_cluster = shape == "cluster"
        self.allow = allow
        self._shape = shape
        self._refusals: dict[str, str] = {}  # by the server's name

    def health_of(self, name: str, replies: Sequence[Any]) -> Health:
        """Interpret the *replies* of the server *name* to the `QUESTIONS`."""
        about, save, fsync = replies
        if isinstance(about, ResponseError):
            message = f"{name}: refuses INFO, so whether it could lose records is unknown: {about}"
            return Health((), (Finding("warning", message),))
        info = dict(line.split(":", 1) for line in about.decode().splitlines() if ":" in line)
        found = [
            item._replace(message=f"{name}: {item.message}")
            for item in (
                *_about_kind(info, is_cluster=self.is_cluster),
                *_about_memory(info),
                *_about_role(info),
                *_about_disk(info, _setting(save), _setting(fsync)),
            )
        ]
        return Health(
            tuple(item for item in found if isinstance(item, Risk)),
            tuple(item for item in found if isinstance(item, Finding)),
        )

    def refusal_of(self, health: Health, *, ignore: str = "") -> str:
        """Return why such a server is refused, empty if it is not; *ignore* the risk named so."""
        allowed = {*self.allow, ignore} - {""}
        return next((risk.advice for risk in health.risks if risk.name not in allowed), "")

    def on_connect(self, name: str, replies: Sequence[Any]) -> None:
        """
        Check a new connection; raise if it leads to a replica or to a risk that was not known.

        The caller passed the check for claims before this risk was found; the next one will not.
        """
        health = self.health_of(name, replies)
        for risk in health.risks:
            if risk.name == "replica" and risk.name not in self.allow and not self.is_cluster:
                raise StoreUnavailable(risk.advice)
        was_known = name in self._refusals
        self._set({**self._refusals, name: self.refusal_of(health, ignore="replica")})
        if name in self._refusals and not was_known:
            raise StoreUnavailable(self._refusals[name])

    def update(self, healths: Mapping[str, Health]) -> None:
        """Replace what is known by the current health of all servers."""
        ignore = "" if self._shape == "single" else "replica"
        self._set({name: self.refusal_of(h, ignore=ignore) for name, h in healths.items()})

    def _set(self, refusals: Mapping[str, str]) -> None:
        before, self._refusals = self._refusals, {n: why for n, why in refusals.items() if why}
        self.refusal = next(iter(self._refusals.values()), "")
        for name, why in self._refusals.items():
            if before.get(name) != why:
                logger.error("coatcheck: new requests get 503 until this is repaired: %s", why)
        if before and not self._refusals:
            logger.warning(
                "coatcheck: %s is safe again; new requests are accepted", ", ".join(before)
            )


def _setting(reply: object) -> str | None:
    """Return the value in a reply to CONFIG GET; None if the server refuses it."""
    if isinstance(reply, list) and len(reply) == 2:
        value: bytes = reply[1]
        return value.decode()
    return None


def _about_kind(info: Mapping[str, str], *, is_cluster: bool) -> Iterator[Risk | Finding]:
    """Yield why this server cannot hold records at all."""
    version = info.get("redis_version", "")
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
    if numbers and numbers < _VERSION_MIN:
        yield Risk("", f"Redis {version} is too old; use Redis 6.2 or newer, or any Valkey")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # Redis, Valkey
        yield Risk("", f"is a Sentinel, which holds no records; write {SENTINEL_EXAMPLE}")
    elif info.get("cluster_enabled") == "1" and not is_cluster:
        yield Risk("", "is a node of a cluster; write redis+cluster://")


def _about_memory(info: Mapping[str, str]) -> Iterator[Risk | Finding]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield Risk(
            "eviction",
            f"maxmemory-policy is {policy}: when memory is short, Redis evicts records and their "
            "requests run twice; set it to noeviction",
        )
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit and used > limit * _MEMORY_SHARE_MAX:
        share = f"{used * 100 // limit} % of maxmemory is used"
        yield Finding("warning", f"{share}; when it is full, Redis refuses every write")


def _about_role(info: Mapping[str, str]) -> Iterator[Risk | Finding]:
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        yield Risk("replica", f"is a replica of {master} and refuses writes; name the master")


def _about_disk(
    info: Mapping[str, str], save: str | None, fsync: str | None
) -> Iterator[Risk | Finding]:
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            yield Finding("error", "the last write to the append-only file failed")
        yield _about_fsync(fsync)
        return
    if save is None:
        yield Finding(
            "warning",
            "has no append-only file, and CONFIG is forbidden, so whether it saves snapshots is "
            "unknown; without either a restart loses every record",
        )
    elif not save:
        yield Risk(
            "no-persistence",
            "keeps nothing on disk: a restart loses every record; set appendonly yes",
        )
    else:
        yield Finding(
            "warning",
            f"saves snapshots only (save {save}): a crash loses every record written after the "
            "last snapshot; set appendonly yes",
        )
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding("error", "the last snapshot could not be saved")


def _about_fsync(fsync: str | None) -> Finding:
    if fsync == "no":
        message = "appendfsync is no: a power cut loses what the system had not written to disk"
        return Finding("warning", message)
    if fsync == "always":
        return Finding("ok", "append-only file; acknowledged records survive a power cut")
    # While a sync takes long, the server acknowledges before it writes.
    message = (
        "append-only file; a power cut loses the last second of acknowledged records, a crash of "
        "the server none unless its disk was busy; appendfsync always loses nothing in both cases"
    )
    return Finding("ok", message)
