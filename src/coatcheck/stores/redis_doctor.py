"""The doctor of the Redis store: what requests and operators need is done, to a record of its own.

Beside `redis_dangers.py`, which knows what a server says of itself: whether a user may write, and
whether the server takes anything, is only known by trying. The record is written under our prefix,
on every server, and deleted again; if the doctor dies between, the server forgets it in a minute.

Invariant: what fails is an error that begins with the name of the command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from coatcheck.core.record import RUNNING, Record, Swap, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Bell, Finding
from coatcheck.stores.redis_flow import Unacknowledged, refuse_refusal
from coatcheck.stores.redis_line import Line
from coatcheck.stores.redis_places import Place
from coatcheck.stores.redis_replies import Reply
from coatcheck.stores.redis_values import Command, Keys, Packer, packed, stored

# 60 s: longer than any probe takes, and soon over.
_FORGOTTEN_MS = 60_000

_Attempts: TypeAlias = Iterator[tuple[str, Callable[[], object]]]


def findings_by_trying(
    name: str, place: Place, keys: Keys, packer: Packer, bell: Bell
) -> Iterator[Finding]:
    """What does not work, each reason once."""
    probe = _Probe(name, place, keys, packer)
    told: set[str] = set()
    for command, attempt in probe.attempts(bell):
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - the bell raises what it likes
            if (why := str(error)) not in told:
                told.add(why)
                yield Finding("error", f"{command} does not work: {why}")


class _Probe:
    """Everything that is tried, in an order in which each finds what it needs."""

    def __init__(self, name: str, place: Place, keys: Keys, packer: Packer) -> None:
        self._name = name
        self._place = place
        self._keys = keys
        self._packer = packer

    def attempts(self, bell: Bell) -> _Attempts:
        for server in self._place.servers():
            yield "TIME", partial(self._ask, server, "TIME")
            yield "SCAN", partial(self._ask, server, "SCAN", "0", "COUNT", "1")
        for id in self._place.an_id_each():
            yield from self._with_a_record(id)
        yield "SUBSCRIBE", bell.open
        yield "PUBLISH", lambda: bell.ring("")
        bell.close()

    def _with_a_record(self, id: bytes) -> _Attempts:
        now_ms = time.time_ns() // 1_000_000
        ends_ms = now_ms + _FORGOTTEN_MS
        times = (now_ms, ends_ms, ends_ms, ends_ms)
        record = Record(id, now_ms, RUNNING, 1, b"", *times, 1, "doctor", "", "", None, None)
        key, (value, forget_ms) = self._keys.key_of(id), stored(record, compact=True)
        (change,) = self._packer.calls_of([Swap(id, record.version, completed(record, b""))])
        by_text = self._packer.by_text(change)
        (read,) = self._packer.reads_of([id])
        write = packed(b"SET", key, value, b"PXAT", b"%d" % forget_ms)
        yield "SET", lambda: self._write(Command(id, write))
        yield "GET", lambda: self._write(Command(id, packed(b"GET", key)))
        part = packed(b"GETRANGE", key, b"1", b"8")
        yield "GETRANGE", lambda: self._write(Command(id, part))
        yield "MGET", lambda: self._told(self._place.read([read]))
        yield "EVAL", lambda: self._write(by_text)  # first, so that the server knows the script
        yield "EVALSHA", lambda: self._write(change)
        yield "DEL", lambda: self._write(Command(id, packed(b"DEL", key)))

    def _ask(self, server: Line, *words: str) -> None:
        refuse_refusal(server.name, server.ask(*words))

    def _write(self, command: Command) -> None:
        self._told(self._place.write([command]))

    def _told(self, replies: list[Reply]) -> None:
        (reply,) = replies
        if isinstance(reply, Unacknowledged):
            raise reply.outage
        if isinstance(reply, StoreUnavailable):  # of one server of several
            raise reply
        refuse_refusal(self._name, reply)
