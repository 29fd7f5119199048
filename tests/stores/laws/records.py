"""Records to write. Most carry no scope and no key, so that a compact store keeps all of them.

The laws live in the year 2100: a store that forgets by itself, on its own clock, leaves their
records alone, and what a law says about time depends on nothing but its arguments.
"""

from __future__ import annotations

from random import Random

from coatcheck.core.flow import Flow
from coatcheck.core.record import RUNNING, Record, Swap, next_version

NOW_MS = 4_102_444_800_000  # 2100-01-01
LEASE_MS = 60_000
WINDOW_MS = 24 * 3_600_000
RETENTION_MS = WINDOW_MS + 3_600_000


# 1 MiB: beyond every page, packet and inline limit a database has by default; and noise, which no
# store makes smaller.
LARGE = Random(2100).randbytes(1 << 20)


def id_of(number: int) -> bytes:
    """16 bytes that sort like *number*, with every byte value somewhere."""
    return number.to_bytes(4, "big") + bytes((number + n) % 256 for n in range(12))


ID = id_of(1)


def claim_of(id: bytes = ID, *, now_ms: int = NOW_MS, nonce: int = 1) -> Record:
    """The first claim of a life that begins at *now_ms*."""
    return Record(
        id=id,
        version=now_ms,
        state=RUNNING,
        attempt=1,
        fingerprint=id[::-1],
        created_ms=now_ms,
        lease_until_ms=now_ms + LEASE_MS,
        window_until_ms=now_ms + WINDOW_MS,
        expires_ms=now_ms + RETENTION_MS,
        nonce=nonce,
        label="",
        scope="",
        key="",
        progress=None,
        response=None,
    )


def next_attempt(standing: Record, now_ms: int, *, nonce: int) -> Record:
    """The claim that goes on with the life of *standing*."""
    return standing._replace(
        version=next_version(standing, now_ms),
        state=RUNNING,
        attempt=standing.attempt + 1,
        lease_until_ms=now_ms + LEASE_MS,
        nonce=nonce,
    )


def new_life(standing: Record, now_ms: int, *, nonce: int) -> Record:
    """The claim that begins again after the window of *standing*."""
    fresh = claim_of(standing.id, now_ms=now_ms, nonce=nonce)
    return fresh._replace(
        version=next_version(standing, now_ms),
        label=standing.label,
        scope=standing.scope,
        key=standing.key,
    )


def claimed(record: Record) -> Flow[Record]:
    """*record*, now standing where there was none."""
    assert (yield from Swap(record.id, 0, record)) is None
    return record


def changed(before: Record, after: Record) -> Flow[Record]:
    """*after*, now standing in place of *before*."""
    assert (yield from Swap(before.id, before.version, after)) is None
    return after


def assert_exactly(standing: Record | None, record: Record) -> None:
    """*standing* is *record*: field by field, and of the same types, for 1 == True == 1.0."""
    assert type(standing) is Record
    assert standing == record
    assert [type(field) for field in standing] == [type(field) for field in record]
