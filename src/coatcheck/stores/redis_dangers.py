"""Dangers: can this Redis forget? What is asked of a server, and what its answers mean.

Beside `redis.py`, which refuses to open where a danger was not allowed, and asks again whenever the
doctor does. Most of it is read from `INFO`, which a managed Redis answers, too; where `CONFIG` is
forbidden, what cannot be known is said as a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from coatcheck.errors import Misconfigured
from coatcheck.stores.contract import Finding
from coatcheck.stores.redis_line import Line
from coatcheck.stores.redis_replies import Refusal

# 6.2 (2021): the first that can be told a time to forget in the command that writes.
_VERSION_MIN = (6, 2)
# 0.9: what is left is some hours of growth for most, and time to act.
_MEMORY_SHARE_MAX = 0.9


class Danger(NamedTuple):
    """A way in which acknowledged records could be lost."""

    name: str  # as it can be allowed
    message: str


class Health(NamedTuple):
    """What one server says of itself."""

    dangers: tuple[Danger, ...]
    findings: tuple[Finding, ...]


def health_of(line: Line, *, is_cluster: bool) -> Health:
    """Ask one server about all there is to know."""
    told = line.ask("INFO")
    if type(told) is Refusal:
        message = (
            f"{line.name}: whether it can forget is not known, because it refuses INFO: {told}"
        )
        return Health((), (Finding("warning", message),))
    info = dict(text.split(":", 1) for text in told.decode().splitlines() if ":" in text)
    _refuse_what_cannot_work(line.name, info, is_cluster=is_cluster)
    save = line.ask("CONFIG", "GET", "save")
    fsync = line.ask("CONFIG", "GET", "appendfsync")
    dangers: list[Danger] = []
    findings: list[Finding] = []
    for found in (
        *_about_memory(info),
        *_about_role(info),
        *_about_disk(info, _value(save), _value(fsync)),
    ):
        if isinstance(found, Danger):
            dangers.append(found._replace(message=f"{line.name}: {found.message}"))
        else:
            findings.append(found._replace(message=f"{line.name}: {found.message}"))
    return Health(tuple(dangers), tuple(findings))


def _value(told: object) -> str | None:
    """The one setting that was asked for; None where that is forbidden."""
    if isinstance(told, list) and len(told) == 2:
        value: bytes = told[1]
        return value.decode()
    return None


def _refuse_what_cannot_work(name: str, info: Mapping[str, str], *, is_cluster: bool) -> None:
    version = info.get("redis_version", "")
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
    if numbers and numbers < _VERSION_MIN:
        raise Misconfigured(f"{name}: Redis {version}; at least 6.2 is needed, or any Valkey")
    if info.get("cluster_enabled") == "1" and not is_cluster:
        raise Misconfigured(f"{name}: is a node of a cluster; write redis+cluster://")


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
    survives = {"always": "a power cut", "everysec": "a crash; a power cut costs a second"}
    kept = survives.get(fsync or "", "a crash")
    return Finding("ok", f"append-only file; what was acknowledged survives {kept}")
