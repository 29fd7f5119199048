"""The table "On the wire", row by row: exactly what a client sees, over every adapter."""

import json
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from coatcheck.core.problem import KINDS
from coatcheck.server.callers import Refused
from tests.support.failing_stores import Faulty
from tests.support.http import Response

from .api import OpenApi
from .shop import Gate, says


class Row(NamedTuple):
    """One situation: how to come into it, and what it is answered with."""

    make: Callable[..., Response]
    status: int
    code: str
    retry: str
    retry_after: str | None = None
    has_reference: bool = True


def missing(open_api, clock, store) -> Response:
    return open_api(required=True).post(key=None)


def malformed(open_api, clock, store) -> Response:
    return open_api().post(key="a,b")


def other_request(open_api, clock, store) -> Response:
    api = open_api()
    api.post()
    return api.post(body=b'{"item": 2}')


def still_running(open_api, clock, store) -> Response:
    api = open_api(in_flight="409")
    api.claim("k-1", "/orders")
    return api.post()


def in_doubt(open_api, clock, store) -> Response:
    api = open_api(recovery="manual")
    api.claim("k-1", "/orders")
    clock.advance(61)
    return api.post()


def not_kept(open_api, clock, store) -> Response:
    api = open_api(response_bytes_max=1)
    api.post()
    return api.post()


def late(open_api, clock, store) -> Response:
    api = open_api(on_expired="refuse")
    api.post()
    clock.advance(24 * 3_600)
    return api.post()


def late_compatible(open_api, clock, store) -> Response:
    api = open_api(on_expired="refuse", expired_status=429)
    api.post()
    clock.advance(24 * 3_600)
    return api.post()


def large_body(open_api, clock, store) -> Response:
    return open_api(body_bytes_max=10).post()


def refused_caller(open_api, clock, store) -> Response:
    def caller(_request):
        raise Refused(401, "who are you?")

    return open_api(caller=caller).post()


def crowded_key(open_api, clock, store) -> Response:
    api = open_api(waiters_max=0)
    api.claim("k-1", "/orders")
    return api.post()


def crowded_caller(open_api, clock, store) -> Response:
    api = open_api(live_keys_max=1)
    api.post("k-1")
    return api.post("k-2")


def exhausted(open_api, clock, store) -> Response:
    api = open_api(attempts_max=1)
    api.shop.answers["/orders"] = says(503, b"not now")
    api.post()
    return api.post()


def store_down(open_api, clock, store) -> Response:
    store.is_down = True
    return open_api(store=store).post()


def store_down_at_the_end(open_api, clock, store) -> Response:
    def fall(swaps) -> None:
        store.is_down = True

    store.after = fall
    return open_api(store=store, patience=0).post()


ROWS = (
    Row(missing, 400, "key-missing", "new-key", has_reference=False),
    Row(malformed, 400, "key-invalid", "new-key", has_reference=False),
    Row(other_request, 422, "key-reused", "never"),
    Row(still_running, 409, "in-progress", "same-key", "1"),
    Row(in_doubt, 409, "outcome-unknown", "never"),
    Row(not_kept, 409, "result-unavailable", "never"),
    Row(late, 409, "key-expired", "never"),
    Row(late_compatible, 429, "key-expired", "never"),
    Row(large_body, 413, "body-too-large", "never", has_reference=False),
    Row(refused_caller, 401, "caller-refused", "same-key", has_reference=False),
    Row(crowded_key, 429, "too-many-waiting", "same-key", "1"),
    Row(crowded_caller, 429, "too-many-keys", "same-key", "60", has_reference=False),
    Row(exhausted, 409, "too-many-attempts", "never"),
    Row(store_down, 503, "store-unavailable", "same-key", "1"),
    Row(store_down_at_the_end, 503, "store-unavailable", "same-key", "1"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.make.__name__)
def test_a_refusal_is_a_problem_document_as_the_table_says(
    open_api: OpenApi, clock, new_store, row: Row
):
    """K3, F1, L3, L12, T2, X2, D2: status, code, headers and members."""
    answer = row.make(open_api, clock, Faulty(new_store()))
    document = answer.problem
    assert (answer.status, document["code"]) == (row.status, row.code)
    assert document["status"] == answer.status
    assert document["retry"] == row.retry
    assert answer.header("retry-after") == row.retry_after
    assert set(document) - {"reference"} == {"type", "title", "status", "detail", "code", "retry"}
    assert ("reference" in document) == row.has_reference
    assert answer.header("idempotency-reference") == document.get("reference")
    assert all(document[member] for member in document)
    where = urlsplit(document["type"])
    assert where.scheme == "https"
    assert where.netloc
    assert where.fragment == row.code
    assert answer.header("content-length") == str(len(answer.body))
    assert answer.header("cache-control") == "no-store"
    assert answer.all("idempotent-replayed") == []


def test_every_code_has_its_row():
    """K3: what is particular to WSGI is tested there."""
    assert {row.code for row in ROWS} == set(KINDS) - {"body-incomplete"}


def test_every_code_has_a_title_of_its_own():
    """K3: and so a client can tell them apart by any member."""
    assert len({kind.title for kind in KINDS.values()}) == len(KINDS)


def test_the_docs_can_be_elsewhere(open_api: OpenApi):
    """K3: the type is a link into the API's own docs."""
    refused = open_api(docs_url="https://shop.example/docs").post(key="a,b")
    assert refused.problem["type"] == "https://shop.example/docs#key-invalid"


def test_the_first_answer_is_the_handlers_own_and_one_header_more(open_api: OpenApi):
    """K5, L2: the first two rows."""
    api = open_api()
    api.shop.answers["/orders"] = says(201, b"made", headers=[("X-One", "1")])
    first, again = api.post(), api.post()
    own = [header for header in first.headers if header[0] != "content-length"]
    assert own == [
        ("content-type", "text/plain"),
        ("x-one", "1"),
        ("idempotency-reference", first.reference),
    ]
    assert again.headers == [
        ("content-type", "text/plain"),
        ("x-one", "1"),
        ("content-length", "4"),
        ("idempotent-replayed", "true"),
        ("idempotency-reference", first.reference),
    ]
    assert (first.status, first.body) == (again.status, again.body) == (201, b"made")


def test_a_refusal_tells_nothing_of_the_stored_request_or_answer(open_api: OpenApi):
    """F1, L3: neither a mismatch nor a conflict."""
    api = open_api(in_flight="409")
    api.shop.answers["/orders"] = says(201, b"card 4242")
    api.post("a-key-longer-than-eight", body=b'{"card": 4242}')
    mismatch = api.post("a-key-longer-than-eight", body=b"{}")
    assert b"4242" not in mismatch.body
    assert b"a-key-longer-than-eight" not in mismatch.body


# --- 202 ------------------------------------------------------------------------------------


@pytest.mark.served
def test_a_duplicate_can_be_given_an_address_to_ask_at(open_api: OpenApi):
    """L3: 202 while the first runs, and the result there when it is done."""
    api = open_api(in_flight="202")
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    told = api.post()
    assert (told.status, told.header("retry-after")) == (202, "1")
    address = told.header("location")
    assert address is not None
    assert api.send("GET", address).status == 202
    gate.open()
    assert first.result(20).status == 201
    polled = api.send("GET", address)
    assert (polled.status, polled.body) == (201, b"done")
    assert polled.reference == told.reference == first.result(20).reference
    assert api.post().is_replay
    assert api.effects() == 1


def test_the_address_is_for_its_caller_only(open_api: OpenApi):
    """L3, S1: for anybody else it is a path of the application like any other."""
    api = open_api(in_flight="202")
    api.claim("k-1", "/orders")
    address = api.post().header("location")
    assert api.send("GET", address).status == 202
    api.shop.answers[address] = says(404, b"no such page")
    assert api.send("GET", address, [("Authorization", "Bearer eve")]).body == b"no such page"
    for wrong in (address[:-1] + "0", address[:-2], address + "00", f"/x{address}"):
        api.shop.answers[wrong] = says(404, b"no such page")
        assert api.send("GET", wrong).body == b"no such page"


def test_the_address_is_closed_while_the_store_is_down(open_api: OpenApi, new_store):
    """D2: it says so, and nothing else."""
    store = Faulty(new_store())
    api = open_api(in_flight="202", store=store)
    api.claim("k-1", "/orders")
    address = api.post().header("location")
    store.is_down = True
    assert api.send("GET", address).code == "store-unavailable"


def test_all_duplicates_get_one_address(open_api: OpenApi):
    """L3."""
    api = open_api(in_flight="202")
    api.claim("k-1", "/orders")
    assert len({api.post().header("location") for _ in range(5)}) == 1


def test_the_address_shows_that_the_executor_is_gone_and_what_to_do(open_api: OpenApi, clock):
    """L3, L5: no client polls for ever after a crash."""
    api = open_api(in_flight="202", lease="60s", window="24h")
    api.claim("k-1", "/orders")
    address = api.post().header("location")
    clock.advance(60)
    told = api.send("GET", address)
    assert (told.status, told.header("cache-control")) == (200, "no-store")
    members = json.loads(told.body)
    assert (members["status"], members["retry"]) == ("interrupted", "same-key")
    assert api.post().status == 201
    assert api.send("GET", address).status == 201
    clock.advance(24 * 3_600)
    assert api.send("GET", address).status == 404


def test_the_address_is_only_for_reading(open_api: OpenApi):
    """L3: whatever would change something there is the application's."""
    api = open_api(in_flight="202", methods={"PATCH", "POST"})
    api.claim("k-1", "/orders")
    address = api.post().header("location")
    api.shop.answers[address] = says(405, b"not here")
    assert api.send("HEAD", address).status == 202
    for method in ("PUT", "DELETE", "POST"):
        assert api.send(method, address).body == b"not here"
