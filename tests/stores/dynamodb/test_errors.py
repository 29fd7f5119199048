"""Errors of DynamoDB and of the network in front of it."""

import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from coatcheck.core.record import Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.dynamodb.store import DynamoStore
from tests.stores.dynamodb.scenes import (
    TIMEOUT_S,
    answer,
    claim_of,
    claimed,
    claims,
    client_of,
    fresh_url,
    on,
    refused,
    requests_of,
    swap,
    without_pauses,
)
from tests.support.batches import call_apart
from tests.support.servers.dynamodb import Dynamodb

# 2 s: less than a request may take in all.
PAUSES_S_MAX = 2


@pytest.fixture
def store() -> Iterator[DynamoStore]:
    with closing(DynamoStore.from_url(fresh_url())) as store:
        yield store


@pytest.mark.parametrize(
    ("status", "code", "is_ambiguous"),
    [
        (400, "ProvisionedThroughputExceededException", False),
        (400, "ThrottlingException", False),
        (400, "RequestLimitExceeded", False),
        (400, "TransactionConflictException", False),
        (400, "AccessDeniedException", False),
        (400, "ExpiredTokenException", False),
        (400, "ResourceNotFoundException", False),
        (500, "InternalServerError", True),
        (503, "ServiceUnavailable", True),
    ],
)
def test_an_error_of_aws_is_an_outage_and_ambiguous_only_if_it_may_have_written(
    store, monkeypatch, status, code, is_ambiguous
):
    """D2: nothing executes, and the error has the reason."""
    without_pauses(monkeypatch)
    on(store, "before-send.dynamodb", lambda **_: refused(status, code, "so it is"))
    for call in (
        lambda: claimed(store),
        lambda: store.swap([Swap(b"%d" % n, 1, None) for n in (1, 2)]),
    ):
        with pytest.raises(StoreUnavailable, match=store.config.table) as caught:
            call()
        assert caught.value.is_ambiguous == is_ambiguous
        assert (
            "so it is" in str(caught.value)
            or "throttled" in str(caught.value)
            or "no such" in str(caught.value)
        )


@pytest.mark.parametrize("code", ["ProvisionedThroughputExceededException", "ThrottlingException"])
def test_a_moment_of_throttling_is_no_outage(store, monkeypatch, code):
    """D1, D2: the request is sent once more."""
    pauses = without_pauses(monkeypatch)
    codes = [code]
    with requests_of(store) as sent:
        on(
            store,
            "before-send.dynamodb",
            lambda **_: refused(400, codes.pop()) if codes else None,
        )
        claimed(store)
    assert sent == ["PutItem"] * 2
    assert len(pauses) == 1
    assert sum(pauses) <= PAUSES_S_MAX


def test_an_ambiguous_attempt_before_a_clear_refusal_makes_the_write_ambiguous(store, monkeypatch):
    """L1, D2: the last refusal is clear, but says nothing about the attempt before it."""
    without_pauses(monkeypatch)
    answers = iter([(500, "InternalServerError"), (400, "AccessDeniedException")])
    on(store, "before-send.dynamodb", lambda **_: refused(*next(answers)))
    with pytest.raises(StoreUnavailable, match="AccessDenied") as caught:
        claimed(store)
    assert next(answers, None) is None
    assert caught.value.is_ambiguous


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"", b"{}"])
def test_a_success_that_is_not_from_dynamodb_is_an_outage(store, page):
    """D2: a proxy's page with the status 200 must not count as a claim."""
    on(store, "before-send.dynamodb", lambda **_: answer(200, page))
    with pytest.raises(StoreUnavailable, match="not from DynamoDB") as caught:
        claimed(store)
    assert caught.value.is_ambiguous


def test_a_refused_write_does_not_fail_the_rest_of_its_batch(store):
    """L1, D2: each swap has its own outcome; the batch as a whole is ambiguous, with its cause."""

    def refuse_one(request: Any, **_: Any) -> Any:
        is_this = b"order-3" in request.body
        return refused(400, "AccessDeniedException", "not this one") if is_this else None

    on(store, "before-send.dynamodb.PutItem", refuse_one)
    standing = claim_of(5)._replace(nonce=1)
    store.swap([Swap(standing.id, 0, standing)])
    results, errors = call_apart(store.swap, claims(0, 8))
    assert [error is not None for error in errors] == [number == 3 for number in range(8)]
    assert results == [None] * 5 + [standing] + [None] * 2
    refusal = errors[3]
    assert isinstance(refusal, StoreUnavailable)
    assert not refusal.is_ambiguous
    assert store.get([claim_of(3).id, claim_of(7).id]) == [None, claim_of(7)]
    with pytest.raises(StoreUnavailable, match="not this one") as caught:
        store.swap(claims(0, 8))
    assert caught.value.is_ambiguous
    cause = caught.value.__cause__
    assert isinstance(cause, ClientError)
    assert cause.response["Error"]["Code"] == "AccessDeniedException"


def test_a_throttled_part_of_the_table_fails_only_the_reads_of_that_part(store, monkeypatch):
    """D2: all other records are returned."""
    without_pauses(monkeypatch)
    written = claims(0, 120)
    store.swap(written)
    ids = [claim.id for claim in written]

    def leave_out(parsed: Any, **_: Any) -> None:
        for table, items in parsed.get("Responses", {}).items():
            if left := [item for item in items if item["key"]["S"] == "order-7"]:
                items[:] = [item for item in items if item not in left]
                keys = [{"id": item["id"]} for item in left]
                parsed["UnprocessedKeys"] = {table: {"Keys": keys}}

    on(store, "after-call.dynamodb.BatchGetItem", leave_out)
    found, errors = call_apart(store.get, ids)
    assert [number for number, error in enumerate(errors) if error] == [7]
    assert "throttled" in str(errors[7])
    wanted = [claim.record for claim in written]
    assert found == [*wanted[:7], None, *wanted[8:]]


@contextmanager
def turned(store: DynamoStore, port: int) -> Iterator[None]:
    """Send all requests of *store* to another port of this machine."""

    def turn(request: Any, **_: Any) -> None:
        request.url = f"http://127.0.0.1:{port}/"

    on(store, "before-send.dynamodb", turn)
    yield
    client_of(store).meta.events.unregister("before-send.dynamodb", turn)


# With this option closing resets the connection, so the peer gets an error and not an end.
LINGER_OFF = struct.pack("ii", 1, 0)


def close_connection(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_OFF)
    connection.close()


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_write_is_ambiguous_if_its_first_attempt_was_received_and_its_second_was_not(
    store, monkeypatch, how
):
    """L5, D2: the last error is a refused connection, but the first attempt may have been applied."""
    without_pauses(monkeypatch)
    server = socket.create_server(("127.0.0.1", 0))

    def receive_once() -> None:
        connection, _ = server.accept()
        request_from(connection)
        server.close()
        close_connection(connection, how)

    thread = threading.Thread(target=receive_once)
    thread.start()
    with turned(store, server.getsockname()[1]):
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        thread.join(TIMEOUT_S)
        assert caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        assert not caught.value.is_ambiguous


def request_from(connection: socket.socket) -> bytes:
    """Receive a whole request."""
    received = connection.recv(1 << 16)
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    headers, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", headers)
    assert found is not None
    while len(body) < int(found[1]):
        body += connection.recv(1 << 16)
    return headers + b"\r\nConnection: close\r\n\r\n" + body


def forward(store: DynamoStore, request: bytes) -> bytes:
    """Send *request* to DynamoDB and return the answer."""
    place = urlsplit(store.config.endpoint)
    with socket.create_connection((place.hostname, place.port)) as line:
        line.sendall(request)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))


@pytest.mark.parametrize("how", ["closed", "reset", "cut off", "late"])
def test_a_retried_write_whose_answer_was_lost_conflicts_with_itself(monkeypatch, how):
    """L5, D1: however the connection ended after DynamoDB had carried out the request."""
    attempts: list[bytes] = []

    def lose_the_first(server: socket.socket, store: DynamoStore) -> None:
        first, _ = server.accept()
        attempts.append(forward(store, request_from(first)))
        if how == "cut off":
            first.sendall(attempts[0][:-1])
        if how != "late":
            close_connection(first, how)
        second, _ = server.accept()
        attempts.append(forward(store, request_from(second)))
        second.sendall(attempts[1])
        first.close()
        second.close()

    claim = claim_of(1)
    with (
        closing(DynamoStore.from_url(fresh_url() + "&timeout=2s")) as store,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        without_pauses(monkeypatch)
        thread = threading.Thread(target=lose_the_first, args=(server, store))
        thread.start()
        with turned(store, server.getsockname()[1]):
            assert swap(store, claim.id, 0, claim) == claim
        thread.join(TIMEOUT_S)
        assert [answer.split()[1] for answer in attempts] == [b"200", b"400"]
        assert store.get([claim.id]) == [claim]


@pytest.fixture
def server() -> Iterator[Dynamodb]:
    """A server of the test's own, to be killed."""
    server = Dynamodb()
    yield server
    server.remove()


def test_a_store_recovers_from_a_server_that_hangs_dies_and_restarts(server):
    """D2: a bounded time, a clear error, and no need to open the store again."""
    url = server.fresh_url() + "&timeout=1s"
    with closing(DynamoStore.from_url(url)) as store:
        claim = claimed(store)
        server.kill(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timeout") as caught:
            claimed(store, 2)
        assert caught.value.is_ambiguous
        assert time.monotonic() - began_s < 5
        server.kill(signal.SIGCONT)
        assert store.get([claim.id]) == [claim]
        server.kill()
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store, 3)
        assert not caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable):
            store.swap(claims(0, 5))
        server.start()
        with pytest.raises(StoreUnavailable, match="no such table"):  # the test server has lost it
            claimed(store, 3)
        DynamoStore.from_url(url).close()
        again = claimed(store, 3)
        assert store.get([again.id, claim.id]) == [again, None]
