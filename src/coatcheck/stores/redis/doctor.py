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
from coatcheck.stores.redis.client import Server
from coatcheck.stores.redis.cluster import Topology
from coatcheck.stores.redis.errors import Reply, raise_error
from coatcheck.stores.redis.records import Command, Commands, encode
from coatcheck.stores.redis.swap import NotReplicated

# 60 s: longer than a check takes.
_EXPIRES_MS = 60_000

_Attempts: TypeAlias = Iterator[tuple[str, Callable[[], object]]]


def findings_by_trying(name: str, topology: Topology, commands: Commands) -> Iterator[Finding]:
    """Yield an error for each command that fails, each reason once."""
    doctor = _Doctor(name, topology, commands)
    reasons: set[str] = set()
    for command, attempt in doctor.attempts():
        try:
            attempt()
        except CoatcheckError as error:
            if (reason := str(error)) not in reasons:
                reasons.add(reason)
                yield Finding("error", f"{command} does not work: {reason}")


class _Doctor:
    """The attempts, in an order in which each finds the record that it needs."""

    def __init__(self, name: str, topology: Topology, commands: Commands) -> None:
        self._name = name
        self._topology = topology
        self._commands = commands

    def attempts(self) -> _Attempts:
        for server in self._topology.servers():
            yield "TIME", partial(self._ask, server, "TIME")
            yield "SCAN", partial(self._ask, server, "SCAN", "0", "COUNT", "1")
        for id in self._topology.id_per_server():
            yield from self._with_record(id)

    def _with_record(self, id: bytes) -> _Attempts:
        now_ms = time.time_ns() // 1_000_000
        ends_ms = now_ms + _EXPIRES_MS
        times = (now_ms, ends_ms, ends_ms, ends_ms)
        record = Record(id, now_ms, RUNNING, 1, b"", *times, 1, "doctor", "", "", None, None)
        key, (value, at_ms) = self._commands.keys.key_of(id), encode(record, compact=True)
        (change,) = self._commands.swap([Swap(id, record.version, completed(record, b""))])
        (read,) = self._commands.get([id])
        yield "SET", partial(self._write, Command(("SET", key, value, "PXAT", at_ms), id))
        yield "GET", partial(self._write, Command(("GET", key), id))
        yield "GETRANGE", partial(self._write, Command(("GETRANGE", key, 1, 8), id))
        yield "MGET", lambda: self._check(self._topology.read([read]))
        # EVAL first: it also stores the script, which EVALSHA needs.
        yield "EVAL", partial(self._write, self._commands.with_script_text(change))
        yield "EVALSHA", partial(self._write, change)
        yield "DEL", partial(self._write, Command(("DEL", key), id))

    def _ask(self, server: Server, *words: str) -> None:
        raise_error(server.name, server.operators.ask(*words))

    def _write(self, command: Command) -> None:
        self._check(self._topology.write([command]))

    def _check(self, replies: list[Reply]) -> None:
        (reply,) = replies
        if isinstance(reply, NotReplicated):
            raise reply.error
        if isinstance(reply, StoreUnavailable):  # one server of several
            raise reply
        raise_error(self._name, reply)
