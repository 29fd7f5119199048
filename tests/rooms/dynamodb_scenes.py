"""What the tests of the DynamoDB store share: records, both ways to a table, and false answers."""

import asyncio
import io
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from botocore.awsrequest import AWSResponse
from servers.dynamodb import dynamodb

from coatcheck.core.record import RUNNING, Record, Swap, completed
from coatcheck.stores.contract import Wire
from coatcheck.stores.dynamodb import DynamoStore
from coatcheck.stores.dynamodb_wire import DynamoWire

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30
NOW_MS = 1_800_000_000_000
LARGE = 700_000  # bytes of noise: over the limit, and cannot be deflated below it

_numbers = count()


def fresh_url() -> str:
    return f"dynamodb://rooms_{next(_numbers)}?{dynamodb().place}"


def claim_of(number: int) -> Record:
    """A claim as a server makes it; ids come in no order, as digests do."""
    id = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")
    ends = (NOW_MS + 60_000, NOW_MS + 86_400_000, NOW_MS + 90_000_000)
    people = ("POST /orders", id[:8].hex(), f"order-{number}")
    return Record(id, NOW_MS, RUNNING, 1, id[::-1], NOW_MS, *ends, 7, *people, None, None)


def claims(start: int, number: int) -> list[Swap]:
    return [Swap(c.id, 0, c) for c in map(claim_of, range(start, start + number))]


class OverWire:
    """A store whose swaps and reads go over a wire, for tests that know no event loop."""

    def __init__(self, url: str) -> None:
        self._store = DynamoStore.from_url(url)
        self._runner = asyncio.Runner()
        self.wire = self._runner.run(self._wired())

    async def _wired(self) -> DynamoWire:
        wire: Wire = self._store.wire()
        assert isinstance(wire, DynamoWire)
        return wire

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        return self._runner.run(self.wire.swap(swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        return self._runner.run(self.wire.get(ids))

    def connected(self) -> Any:
        return self._runner.run(self.wire._connected())

    def close(self) -> None:
        self._runner.run(self.wire.close())
        self._runner.close()
        self._store.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


Either = DynamoStore | OverWire
WAYS = {"threads": DynamoStore.from_url, "loop": OverWire}


def client_of(store: Either) -> Any:
    """What sends the swaps and reads of *store*."""
    return store.connected() if isinstance(store, OverWire) else store._line._connected()


def on(store: Either, event: str, handler: Any) -> None:
    """Have *handler* called by the store's client."""
    client_of(store).meta.events.register(event, handler)


@contextmanager
def requests_of(store: Either) -> Iterator[list[str]]:
    """The names of all requests that *store* sends, every try."""
    with requests_by(client_of(store)) as sent:
        yield sent


@contextmanager
def requests_by(client: Any) -> Iterator[list[str]]:
    """The names of all requests that *client* sends, every try."""
    sent: list[str] = []

    def note(request: Any, **_: Any) -> None:
        sent.append(request.headers["X-Amz-Target"].decode().partition(".")[2])

    client.meta.events.register("before-send.dynamodb", note)
    yield sent
    client.meta.events.unregister("before-send.dynamodb", note)


class Body(io.BytesIO):
    """What was said, as botocore reads it."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


class AsyncBody(io.BytesIO):
    """The same for aiobotocore."""

    async def read(self) -> bytes:  # type: ignore[override]
        return super().read()


def said(store: Either, status: int, body: bytes) -> Any:
    """An answer that nobody has given, for the store's client."""
    if isinstance(store, OverWire):
        return AioAWSResponse("", status, {}, AsyncBody(body))
    return AWSResponse("", status, {}, Body(body))


def refused(store: Either, status: int, code: str, text: str = "no") -> Any:
    """What AWS says when it refuses."""
    told = {"__type": f"com.amazonaws.dynamodb#{code}", "message": text}
    return said(store, status, json.dumps(told).encode())


def pauses_of(store: Either, monkeypatch: Any) -> list[float]:
    """How long the store would have paused, by itself or in its client; it does not."""
    pauses: list[float] = []
    go_on = asyncio.sleep

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        await go_on(0)

    if isinstance(store, OverWire):
        monkeypatch.setattr(asyncio, "sleep", pause)
    else:
        monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def swap(store: Any, id: bytes, expected: int, record: Record | None) -> Record | None:
    return store.swap([Swap(id, expected, record)])[0]


def claimed(store: Either, number: int = 1) -> Record:
    claim = claim_of(number)
    assert swap(store, claim.id, 0, claim) is None
    return claim


def answered(store: Either, response: bytes, number: int = 1) -> Record:
    claim = claimed(store, number)
    answer = completed(claim, response)
    assert swap(store, claim.id, claim.version, answer) is None
    return answer
