"""The doctor of the Redis store: runs every command that requests and operators need.

Beside `safety.py`, which reads what a server reports about itself. Whether the user may run a
command, and whether the server accepts writes, is only known by trying. On every server the doctor
writes one record under the store's prefix and deletes it; if the doctor dies between, the record
expires within a minute.

Invariant: each error begins with the name of the command that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from coatcheck.core.record import RUNNING, Record, Swap, completed
from coatcheck.errors import CoatcheckError, StoreUnavailable
from coatcheck.stores.contract import Finding
from coatcheck.stores.redis.cluster import Topology
from coatcheck.stores.redis.errors import Reply, raise_error
from coatcheck.stores.redis.records import Command, Commands, encode
from coatcheck.stores.redis.swap import NotReplicated

# 60 s: longer than a check takes.
_EXPIRES_MS = 60_000

_Attempts: TypeAlias = Iterator[tuple[str, Callable[[], Reply]]]


def findings_by_trying(name: str, topology: Topology, commands: Commands) -> Iterator[Finding]:
    """Yield an error for each command that fails, each reason once."""
    reasons: set[str] = set()
    for command, attempt in _attempts(topology, commands):
        try:
            _raise_failure(name, attempt())
        except CoatcheckError as error:
            if (reason := str(error)) not in reasons:
                reasons.add(reason)
                yield Finding("error", f"{command} does not work: {reason}")


def _attempts(topology: Topology, commands: Commands) -> _Attempts:
    """Yield the commands in an order in which each finds the record that it needs."""
    for server in topology.servers():
        yield "TIME", partial(server.operators.ask, "TIME")
        yield "SCAN", partial(server.operators.ask, "SCAN", "0", "COUNT", "1")
    for id in topology.id_per_server():
        now_ms = time.time_ns() // 1_000_000
        ends_ms = now_ms + _EXPIRES_MS
        times = (now_ms, ends_ms, ends_ms, ends_ms)
        record = Record(id, now_ms, RUNNING, 1, b"", *times, 1, "doctor", "", "", None, None)
        key, (value, at_ms) = commands.keys.key_of(id), encode(record)
        (change,) = commands.swap([Swap(id, record.version, completed(record, b""))])
        (read,) = commands.get([id])
        writes = {
            "SET": Command(("SET", key, value, "PXAT", at_ms), id),
            "GET": Command(("GET", key), id),
            "GETRANGE": Command(("GETRANGE", key, 1, 8), id),
            # EVAL first: it also stores the script, which EVALSHA needs.
            "EVAL": commands.with_script_text(change),
            "EVALSHA": change,
            "DEL": Command(("DEL", key), id),
        }
        yield "MGET", partial(topology.read, [read])
        for name, command in writes.items():
            yield name, partial(topology.write, [command])


def _raise_failure(name: str, reply: Reply) -> None:
    """Raise if *reply*, or the one reply in a list, is an error."""
    if isinstance(reply, list) and len(reply) == 1:
        (reply,) = reply
    if isinstance(reply, NotReplicated):
        raise reply.error
    if isinstance(reply, StoreUnavailable):  # one server of several
        raise reply
    raise_error(name, reply)
