"""The faults of DynamoDB and of the network before it, by threads and from event loops alike."""

import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError
from dynamodb_scenes import (
    TIMEOUT_S,
    WAYS,
    Either,
    claim_of,
    claimed,
    claims,
    client_of,
    fresh_url,
    on,
    pauses_of,
    refused,
    requests_of,
    said,
    swap,
)
from servers import until
from servers.dynamodb import Dynamodb

from coatcheck import Engine, Policy
from coatcheck.core.record import COMPLETED, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, open_store
from coatcheck.stores.batching import call_apart
from coatcheck.stores.dynamodb import DynamoStore
from coatcheck.stores.dynamodb_flow import CONFLICT_TRIES_MAX

# 2 s: less than a request may take in all.
TRIED_AGAIN_S_MAX = 2


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


@pytest.fixture
def store(way: str) -> Iterator[Either]:
    """A store that is asked by threads, or from an event loop."""
    with closing(WAYS[way](fresh_url())) as store:
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
def test_what_aws_refuses_is_an_outage_and_ambiguous_only_where_it_may_have_written(
    store, monkeypatch, status, code, is_ambiguous
):
    """D2: nothing runs, and the caller is told why."""
    pauses_of(store, monkeypatch)
    on(store, "before-send.dynamodb", lambda **_: refused(store, status, code, "so it is"))
    for call in (
        lambda: claimed(store),
        lambda: store.swap([Swap(b"%d" % n, 1, None) for n in (1, 2)]),
    ):
        with pytest.raises(StoreUnavailable, match=store.name) as caught:
            call()
        assert caught.value.is_ambiguous == is_ambiguous
        assert (
            "so it is" in str(caught.value)
            or "throttled" in str(caught.value)
            or "no such" in str(caught.value)
        )


def refuse_first(store: Either, times: int, code: str) -> None:
    """Have the first requests refused, and the others answered by DynamoDB."""
    asked = count()
    on(
        store,
        "before-send.dynamodb",
        lambda **_: refused(store, 400, code) if next(asked) < times else None,
    )


@pytest.mark.parametrize(
    ("times", "code"),
    [
        (1, "ProvisionedThroughputExceededException"),
        (1, "ThrottlingException"),
        (1, "TransactionConflictException"),
        (CONFLICT_TRIES_MAX - 1, "TransactionConflictException"),
    ],
)
def test_what_passes_is_tried_again_and_is_no_outage(store, monkeypatch, times, code):
    """D1, D2: a moment of throttling, or of somebody else's transaction on the same item."""
    pauses = pauses_of(store, monkeypatch)
    with requests_of(store) as sent:
        refuse_first(store, times, code)
        claim = claimed(store)
    assert sent == ["PutItem"] * (times + 1)
    assert len(pauses) == times
    assert sum(pauses) <= TRIED_AGAIN_S_MAX
    assert swap(store, claim.id, claim.version, None) is None


def test_a_conflict_that_does_not_pass_is_given_up(store, monkeypatch):
    """D2: after a few tries it is an outage, in which nothing was written."""
    pauses_of(store, monkeypatch)
    with requests_of(store) as sent:
        refuse_first(store, 1_000, "TransactionConflictException")
        with pytest.raises(StoreUnavailable, match="somebody's transaction") as caught:
            claimed(store)
    assert len(sent) == CONFLICT_TRIES_MAX
    assert not caught.value.is_ambiguous


def test_a_write_that_may_have_been_heard_before_a_conflict_is_ambiguous_to_the_end(
    store, monkeypatch
):
    """L1, D2: the last refusal is clean, and says nothing of the tries before it."""
    pauses_of(store, monkeypatch)
    answers = iter(
        [
            (500, "InternalServerError"),
            (400, "TransactionConflictException"),
            (400, "AccessDeniedException"),
        ]
    )
    on(store, "before-send.dynamodb", lambda **_: refused(store, *next(answers)))
    with pytest.raises(StoreUnavailable, match="AccessDenied") as caught:
        claimed(store)
    assert next(answers, None) is None
    assert caught.value.is_ambiguous


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"", b"{}"])
def test_a_yes_that_is_not_from_dynamodb_is_none(store, page):
    """D2: a proxy's page with the status 200 must not pass for a claim that won."""
    on(store, "before-send.dynamodb", lambda **_: said(store, 200, page))
    with pytest.raises(StoreUnavailable, match="not DynamoDB") as caught:
        claimed(store)
    assert caught.value.is_ambiguous


def refusing(store: Either, number: int) -> None:
    """From now on, what is written about claim *number* is refused."""
    name = f"order-{number}".encode()

    def refuse_one(request: Any, **_: Any) -> Any:
        is_this = name in request.body
        return refused(store, 400, "AccessDeniedException", "not this one") if is_this else None

    on(store, "before-send.dynamodb.PutItem", refuse_one)


def test_a_batch_of_which_some_took_effect_is_ambiguous_for_who_takes_it_as_one(store):
    """L1, D2: it may not be told that nothing was written."""
    refusing(store, 3)
    with pytest.raises(StoreUnavailable, match="not this one") as caught:
        store.swap(claims(0, 8))
    assert caught.value.is_ambiguous
    assert list(store.get([claim.id for claim in claims(0, 8)])).count(None) == 1


def test_a_batch_that_failed_in_part_has_the_driver_s_own_error_as_its_cause(store):
    """D2: whoever looks into it finds what AWS has said."""
    refusing(store, 3)
    with pytest.raises(StoreUnavailable) as caught:
        store.swap(claims(0, 8))
    cause = caught.value.__cause__
    assert isinstance(cause, ClientError)
    assert cause.response["Error"]["Code"] == "AccessDeniedException"


def test_a_write_that_is_refused_takes_nobody_of_its_batch_with_it(store):
    """L1, D2: each has a request of its own, and is told what became of that."""
    refusing(store, 3)
    standing = claim_of(5)
    store.swap([Swap(standing.id, 0, standing._replace(nonce=1))])
    results, errors = call_apart(store.swap, claims(0, 8))
    assert [error is not None for error in errors] == [number == 3 for number in range(8)]
    assert results == [None] * 5 + [standing._replace(nonce=1)] + [None] * 2
    refusal = errors[3]
    assert isinstance(refusal, StoreUnavailable)
    assert not refusal.is_ambiguous
    assert store.get([claim_of(3).id, claim_of(7).id]) == [None, claim_of(7)]


def test_no_claim_stands_whose_caller_was_refused_for_another():
    """L1: they came while a first claim was on its way, and left together."""
    with Engine(fresh_url(), policy=Policy(wait=0, patience=0)) as engine:
        store = engine.store
        assert isinstance(store, DynamoStore)
        gate = threading.Event()
        on(store, "before-send.dynamodb.PutItem", lambda request, **_: held(request, gate))
        refusing(store, 3)
        with ThreadPoolExecutor(9) as threads:
            keys = ("first", *(f"order-{number}" for number in range(8)))
            asked = []
            queue = engine._batcher._swaps
            for key in keys:
                asked.append(threads.submit(engine.run, key, lambda: "done", scope="s"))
                until(lambda: queue._leader is not None and len(queue._waiting) == len(asked) - 1)
            gate.set()
        told = [one.exception() or one.result() for one in asked]
        assert [str(one) for one in told].count("done") == 8
        assert isinstance(told[4], StoreUnavailable)
        assert {record.state for record in store.find(Query()).records} == {COMPLETED}


def held(request: Any, gate: threading.Event) -> None:
    """The first claim does not leave before all others are there."""
    if b"first" in request.body:
        assert gate.wait(TIMEOUT_S)


def test_a_part_of_the_table_without_capacity_is_not_read_and_all_else_is(store, monkeypatch):
    """D2: its error is about what lies there."""
    pauses_of(store, monkeypatch)
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
def turned(store: Either, port: int) -> Iterator[None]:
    """All that *store* sends goes to another port of this machine."""

    def turn(request: Any, **_: Any) -> None:
        request.url = f"http://127.0.0.1:{port}/"

    on(store, "before-send.dynamodb", turn)
    yield
    client_of(store).meta.events.unregister("before-send.dynamodb", turn)


# Closing then resets the connection, and whoever listens does not see its end but an error.
AT_ONCE = struct.pack("ii", 1, 0)


def hang_up(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    connection.close()


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_write_whose_first_try_was_heard_is_ambiguous_though_nobody_hears_the_second(
    store, monkeypatch, how
):
    """L5, D2: the last error says that nobody is there; the first try may have done its work."""
    pauses_of(store, monkeypatch)
    deaf = socket.create_server(("127.0.0.1", 0))

    def hear_once() -> None:
        connection, _ = deaf.accept()
        heard_by(connection)
        deaf.close()
        hang_up(connection, how)

    thread = threading.Thread(target=hear_once)
    thread.start()
    with turned(store, deaf.getsockname()[1]):
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        thread.join(TIMEOUT_S)
        assert caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        assert not caught.value.is_ambiguous


def heard_by(connection: socket.socket) -> bytes:
    """A whole request."""
    heard = connection.recv(1 << 16)
    while b"\r\n\r\n" not in heard:
        heard += connection.recv(1 << 16)
    headers, _, body = heard.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", headers)
    assert found is not None
    while len(body) < int(found[1]):
        body += connection.recv(1 << 16)
    return headers + b"\r\nConnection: close\r\n\r\n" + body


def passed_on(store: Either, request: bytes) -> bytes:
    """What DynamoDB says to *request*."""
    place = urlsplit(store._place.endpoint)
    with socket.create_connection((place.hostname, place.port)) as line:
        line.sendall(request)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))


@pytest.mark.parametrize("how", ["closed", "reset", "cut off", "late"])
def test_a_write_whose_answer_is_lost_finds_itself_when_it_is_sent_again(way, monkeypatch, how):
    """L5, D1: whatever became of the connection after the request was carried out."""
    tries: list[bytes] = []

    def lose_the_first(server: socket.socket, store: Either) -> None:
        first, _ = server.accept()
        tries.append(passed_on(store, heard_by(first)))
        if how == "cut off":
            first.sendall(tries[0][:-1])
        if how != "late":
            hang_up(first, how)
        second, _ = server.accept()
        tries.append(passed_on(store, heard_by(second)))
        second.sendall(tries[1])
        first.close()
        second.close()

    claim = claim_of(1)
    with (
        closing(WAYS[way](fresh_url() + "&timeout=2s")) as store,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        pauses_of(store, monkeypatch)
        thread = threading.Thread(target=lose_the_first, args=(server, store))
        thread.start()
        with turned(store, server.getsockname()[1]):
            assert swap(store, claim.id, 0, claim) == claim
        thread.join(TIMEOUT_S)
        assert [answer.split()[1] for answer in tries] == [b"200", b"400"]
        assert store.get([claim.id]) == [claim]


@pytest.fixture
def server() -> Iterator[Dynamodb]:
    """One of the test's own, to be killed."""
    server = Dynamodb()
    yield server
    server.remove()


def test_a_server_that_falls_silent_dies_and_comes_back_needs_nothing_from_us(server, way):
    """D2: bounded time-outs, a clear error, and on with it, without opening the store again."""
    url = server.fresh_url() + "&timeout=1s"
    with closing(WAYS[way](url)) as store:
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
        # An event loop that stood still has not seen yet that its connection has ended.
        assert way == "loop" or not caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store, 3)
        assert not caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable):
            store.swap(claims(0, 5))
        server.start()
        with pytest.raises(StoreUnavailable, match="no such table"):  # the stand-in has forgotten
            claimed(store, 3)
        DynamoStore.from_url(url).close()
        again = claimed(store, 3)
        assert store.get([again.id, claim.id]) == [again, None]


def test_a_store_that_cannot_be_reached_is_an_outage_at_the_start():
    """D2: and not a wrong setting, for it may come up any moment."""
    with pytest.raises(StoreUnavailable, match="Could not connect"):
        open_store("dynamodb://orders?region=eu-west-1&endpoint=http://127.0.0.1:1&timeout=1s")
