"""Dangers: can this Redis forget? What is asked of a server, and what its answers mean.

Below `redis_flow.py`. A store is not opened where a danger was not allowed by its name. While it
runs, every new connection is asked again, and every server from time to time (`Watch`): where a
danger has come, nothing begins there any more, but what has begun may end. The doctor asks, too.

Most of it is read from `INFO`, which a managed Redis answers, too; where `CONFIG` is forbidden,
what cannot be known is said as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Finding
from coatcheck.stores.redis_replies import Refusal, Reply
from coatcheck.stores.redis_url import SENTINEL_EXAMPLE, Shape
from coatcheck.stores.redis_values import Command, packed

logger = logging.getLogger("coatcheck")

# 6.2 (2021): the first that can be told a time to forget in the command that writes.
_VERSION_MIN = (6, 2)
# 0.9: what is left is some hours of growth for most, and time to act.
_MEMORY_SHARE_MAX = 0.9

# What every server is asked, in one go.
QUESTIONS = (
    Command(b"", packed(b"INFO")),
    Command(b"", packed(b"CONFIG", b"GET", b"save")),
    Command(b"", packed(b"CONFIG", b"GET", b"appendfsync")),
)


class Danger(NamedTuple):
    """A way in which acknowledged records could be lost."""

    name: str  # as it can be allowed; empty where it cannot
    message: str

    @property
    def sentence(self) -> str:
        """With what to do about it."""
        hint = f" (or, knowing that, write ?allow={self.name})" if self.name else ""
        return f"{self.message}{hint}"


class Health(NamedTuple):
    """What one server says of itself."""

    dangers: tuple[Danger, ...]
    findings: tuple[Finding, ...]

    @property
    def is_replica(self) -> bool:
        """Somebody else is the master."""
        return any(danger.name == "replica" for danger in self.dangers)


class Watch:
    """
    What is known of the servers of one store while it runs.

    Args:
        allow: the dangers that are known and wanted.
        shape: with Sentinels and in a cluster roles change, and whoever has become a replica says
            so itself; of one server that is a danger like any other.
    """

    def __init__(self, allow: frozenset[str], shape: Shape) -> None:
        self.refused = ""  # why nothing may begin; empty: it may
        self.is_spread = shape == "cluster"
        self._allow = allow
        self._shape = shape
        self._found: dict[str, str] = {}  # by the name of the server

    def health_of(self, name: str, told: Sequence[Reply]) -> Health:
        """What a server's answers to the `QUESTIONS` mean."""
        return health_of(name, told, is_cluster=self.is_spread)

    def refusal_of(self, health: Health, *, but: str = "") -> str:
        """Why such a server is refused, *but* for this danger; empty: it is not."""
        allowed = {*self._allow, but} - {""}
        sentences = (danger.sentence for danger in health.dangers if danger.name not in allowed)
        return next(sentences, "")

    def meet(self, name: str, health: Health) -> None:
        """
        A connection is new; raise, if it leads to a replica, or to a danger that was not known.

        Whoever wanted to write on it has asked before that was found; the next one will know.
        """
        for danger in health.dangers:
            if danger.name == "replica" and danger.name not in self._allow and not self.is_spread:
                raise StoreUnavailable(danger.sentence)
        was_known = name in self._found
        self._adopt({**self._found, name: self.refusal_of(health, but="replica")})
        if name in self._found and not was_known:
            raise StoreUnavailable(self._found[name])

    def learn(self, healths: Mapping[str, Health]) -> None:
        """All servers have been asked; what was known before is forgotten."""
        but = "" if self._shape == "single" else "replica"
        self._adopt({name: self.refusal_of(health, but=but) for name, health in healths.items()})

    def _adopt(self, found: Mapping[str, str]) -> None:
        before, self._found = self._found, {name: why for name, why in found.items() if why}
        self.refused = next(iter(self._found.values()), "")
        for name, why in self._found.items():
            if before.get(name) != why:
                logger.error("nothing begins on this store any more: %s", why)
        if before and not self._found:
            logger.warning("%s could forget, and can no longer: used again", ", ".join(before))


def health_of(name: str, told: Sequence[Reply], *, is_cluster: bool) -> Health:
    """What the answers to the `QUESTIONS` mean, of the server that is called *name*."""
    about, save, fsync = told
    if type(about) is Refusal:
        message = f"{name}: whether it can forget is not known, because it refuses INFO: {about}"
        return Health((), (Finding("warning", message),))
    info = dict(text.split(":", 1) for text in about.decode().splitlines() if ":" in text)
    dangers: list[Danger] = []
    findings: list[Finding] = []
    for found in (
        *_about_kind(info, is_cluster=is_cluster),
        *_about_memory(info),
        *_about_role(info),
        *_about_disk(info, _value(save), _value(fsync)),
    ):
        if isinstance(found, Danger):
            dangers.append(found._replace(message=f"{name}: {found.message}"))
        else:
            findings.append(found._replace(message=f"{name}: {found.message}"))
    return Health(tuple(dangers), tuple(findings))


def _value(told: object) -> str | None:
    """The one setting that was asked for; None where that is forbidden."""
    if isinstance(told, list) and len(told) == 2:
        value: bytes = told[1]
        return value.decode()
    return None


def _about_kind(info: Mapping[str, str], *, is_cluster: bool) -> Iterator[Danger | Finding]:
    """What could not work at all."""
    version = info.get("redis_version", "")
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
    if numbers and numbers < _VERSION_MIN:
        yield Danger("", f"Redis {version}; at least 6.2 is needed, or any Valkey")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # in Redis, in Valkey
        yield Danger("", f"is a Sentinel, which holds no records; write {SENTINEL_EXAMPLE}")
    elif info.get("cluster_enabled") == "1" and not is_cluster:
        yield Danger("", "is a node of a cluster; write redis+cluster://")


def _about_memory(info: Mapping[str, str]) -> Iterator[Danger | Finding]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield Danger(
            "eviction",
            f"maxmemory-policy is {policy}: when memory is short, records are thrown away and "
            "their requests run twice; set it to noeviction",
        )
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit and used > limit * _MEMORY_SHARE_MAX:
        share = f"{used * 100 // limit} % of maxmemory is used"
        yield Finding("warning", f"{share}; when it is full, nothing can be written")


def _about_role(info: Mapping[str, str]) -> Iterator[Danger | Finding]:
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        yield Danger("replica", f"is a replica of {master}, which refuses writes; name the master")


def _about_disk(
    info: Mapping[str, str], save: str | None, fsync: str | None
) -> Iterator[Danger | Finding]:
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            yield Finding("error", "the last write to the append-only file has failed")
        yield _about_fsync(fsync)
        return
    if save is None:
        yield Finding(
            "warning",
            "has no append-only file, and does not say whether it saves snapshots (CONFIG is "
            "forbidden); without either a restart forgets every record",
        )
    elif not save:
        yield Danger(
            "no-persistence",
            "keeps nothing on disk: a restart forgets every record; set appendonly yes",
        )
    else:
        yield Finding(
            "warning",
            f"saves snapshots only (save {save}): a crash forgets what came after the last one; "
            "set appendonly yes",
        )
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding("error", "the last snapshot could not be saved")


def _about_fsync(fsync: str | None) -> Finding:
    if fsync == "no":
        message = "appendfsync is no: a power cut forgets what the system had not written yet"
        return Finding("warning", message)
    if fsync == "always":
        return Finding("ok", "append-only file; what was acknowledged survives a power cut")
    # While a sync takes long, the server acknowledges before it writes.
    message = (
        "append-only file; a power cut costs the last second of what was acknowledged, and a crash "
        "of the server nothing, unless its disk was busy just then; with appendfsync always both "
        "cost nothing"
    )
    return Finding("ok", message)
