"""What the tests of the DynamoDB store share: records, access to the client, and fake answers."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from botocore.awsrequest import AWSResponse

from coatcheck.core.record import RUNNING, Record, Swap, completed
from coatcheck.stores.dynamodb.store import DynamoStore
from tests.support.servers.dynamodb import dynamodb

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30
NOW_MS = 1_800_000_000_000
LARGE = 700_000  # random bytes: over the limit, and not compressible

_numbers = count()


def fresh_url() -> str:
    return f"dynamodb://rooms_{next(_numbers)}?{dynamodb().place}"


def claim_of(number: int) -> Record:
    """A claim as a server makes it; the ids are in no order, like digests."""
    id = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")
    ends = (NOW_MS + 60_000, NOW_MS + 86_400_000, NOW_MS + 90_000_000)
    people = ("POST /orders", id[:8].hex(), f"order-{number}")
    return Record(id, NOW_MS, RUNNING, 1, id[::-1], NOW_MS, *ends, 7, *people, None, None)


def claims(start: int, number: int) -> list[Swap]:
    return [Swap(c.id, 0, c) for c in map(claim_of, range(start, start + number))]


def client_of(store: DynamoStore) -> Any:
    """The botocore client of *store*."""
    return store._client.botocore_client()


def on(store: DynamoStore, event: str, handler: Any) -> None:
    """Register *handler* for an event of the store's client."""
    client_of(store).meta.events.register(event, handler)


@contextmanager
def requests_of(store: DynamoStore) -> Iterator[list[str]]:
    """Collect the names of all requests that *store* sends, including retries."""
    sent: list[str] = []

    def note(request: Any, **_: Any) -> None:
        sent.append(request.headers["X-Amz-Target"].decode().partition(".")[2])

    on(store, "before-send.dynamodb", note)
    yield sent
    client_of(store).meta.events.unregister("before-send.dynamodb", note)


class Body(io.BytesIO):
    """The body of a fake answer, as botocore reads it."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def answer(status: int, body: bytes) -> Any:
    """A fake answer."""
    return AWSResponse("", status, {}, Body(body))


def refused(status: int, code: str, text: str = "no") -> Any:
    """A fake error of AWS."""
    error = {"__type": f"com.amazonaws.dynamodb#{code}", "message": text}
    return answer(status, json.dumps(error).encode())


def without_pauses(monkeypatch: Any) -> list[float]:
    """Skip all pauses of the store and of botocore; return how long they would have been."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def swap(store: Any, id: bytes, expected: int, record: Record | None) -> Record | None:
    return store.swap([Swap(id, expected, record)])[0]


def claimed(store: DynamoStore, number: int = 1) -> Record:
    claim = claim_of(number)
    assert swap(store, claim.id, 0, claim) is None
    return claim


def completed_with(store: DynamoStore, response: bytes, number: int = 1) -> Record:
    claim = claimed(store, number)
    record = completed(claim, response)
    assert swap(store, claim.id, claim.version, record) is None
    return record
