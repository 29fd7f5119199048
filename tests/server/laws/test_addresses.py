"""X3: only the client that sent a request can use the address of its operation.

The stranger of these laws is well informed: she runs a copy of the service, with the same clock,
and computes the address that a guessed request would be given.
"""

import json

import pytest

from coatcheck import open_store
from coatcheck.core.identity import caller_digest, digested, operation_id
from coatcheck.core.record import Record
from coatcheck.server.polling import token_of
from tests.support.failing_stores import Faulty
from tests.support.http import ORDER, Headers, Response
from tests.support.times import eventually

from .api import Api, OpenApi
from .shop import Call, Gate, Said, in_turn, says

ASYNC = ("Prefer", "respond-async")
# Over WSGI the client whose request runs always waits for its response.
over_asgi = pytest.mark.parametrize("open_api", ["asgi"], indirect=True)
ADA, EVE = [("Cookie", "session=ada")], [("Cookie", "session=eve")]
ADAS_BEARER, EVES_BEARER = [("Authorization", "Bearer ada")], [("Authorization", "Bearer eve")]

PATH = "/idempotency/operations/"


def asked(api: Api, address: str, headers: Headers = (), method: str = "GET") -> Response:
    """The answer at *address*; where the middleware knows of none, it is the application's."""
    api.shop.answers[address] = says(404, b"no such page")
    return api.send(method, address, headers)


def is_unknown(api: Api, address: str, headers: Headers = ()) -> bool:
    """*address* is a path of the application like any other, for who brings *headers*."""
    response = asked(api, address, headers)
    return (response.status, response.body) == (404, b"no such page")


def address_and_gate(api: Api, headers: Headers = (), body: bytes = ORDER) -> tuple[str, Gate]:
    """The address that a duplicate is given; its operation has finished when the gate is open."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"Ada's order"))
    api.start_post(headers=headers, body=body)
    gate.wait_until_entered()
    response = api.post(headers=[*headers, ASYNC], body=body)
    assert response.status == 202
    address = response.header("location")
    assert address is not None
    return address, gate


def finished(api: Api, headers: Headers = ()) -> str:
    """The same where it has finished."""
    address, gate = address_and_gate(api, headers)
    gate.open()
    eventually(lambda: asked(api, address, headers).status == 201)
    return address


@pytest.fixture
def guess(open_api: OpenApi):
    """The address that a stranger works out for a request, with a copy of her own."""

    def guessed(headers: Headers = (), body: bytes = ORDER, secret: str = "") -> str:
        settings = {"secret": secret}
        copy = open_api(in_flight="202", store=open_store("memory://"), settings=settings)
        address, gate = address_and_gate(copy, headers, body)
        gate.open()
        return address

    return guessed


@pytest.mark.parametrize("in_flight", ["wait", "202"])
def test_a_stranger_without_the_cookie_cannot_compute_the_address(
    open_api: OpenApi, guess, in_flight: str
):
    """X3, S1: neither before nor after it has finished; her POST is refused, and so is her GET."""
    api = open_api(in_flight=in_flight)
    gate = api.shop.answers["/orders"] = Gate(says(201, b"Ada's order"))
    first = api.start_post(headers=ADA)
    gate.wait_until_entered()
    guesses = [guess(headers) for headers in (EVE, [], EVES_BEARER)]
    for is_finished in (False, True):
        if is_finished:
            gate.open()
            assert first.result(20).body == b"Ada's order"
        for address in guesses:
            for headers in (EVE, [], EVES_BEARER):
                assert is_unknown(api, address, headers)
    assert api.post(headers=EVE).code == "key-reused"


def test_route_and_key_alone_give_no_address(api: Api):
    """X3: without `caller=` and without `secret=` both ids can be worked out by anybody."""
    assert api.post(headers=ADA).status == 201
    unknown = caller_digest("")
    id = operation_id(caller=unknown, route="POST /orders", key="k-1")
    assert api.records()[0].id == id
    for seal in (digested(b"coatcheck-poll", b"", id + unknown.encode()), b"", b"\0" * 16, id):
        for headers in (EVE, ADA, []):
            assert is_unknown(api, f"{PATH}{(id + seal).hex()}", headers)


def test_the_address_needs_the_cookie_of_its_request(open_api: OpenApi):
    """X3: an address from a log is useless without it."""
    api = open_api(in_flight="202")
    address, gate = address_and_gate(api, ADA)
    for is_finished in (False, True):
        if is_finished:
            gate.open()
            eventually(lambda: asked(api, address, ADA).status != 202)
        assert asked(api, address, ADA).status == (201 if is_finished else 202)
        for headers in (
            EVE,
            [],
            EVES_BEARER,
            [*ADA, *EVES_BEARER],
            [("Cookie", "session=ada; token=b")],
        ):
            assert is_unknown(api, address, headers)


def test_the_address_needs_the_credential_of_its_request_and_no_cookie(open_api: OpenApi, guess):
    """X3, S1: a credential names the caller, and then cookies may come and go."""
    api = open_api(in_flight="202")
    address = finished(api, [*ADAS_BEARER, *ADA])
    assert asked(api, address, [*ADAS_BEARER, *EVE]).body == b"Ada's order"
    for headers in (EVES_BEARER, ADA, EVE, []):
        assert is_unknown(api, address, headers)
        assert is_unknown(api, guess(headers), headers)


def test_without_a_caller_the_request_identifies_the_address(open_api: OpenApi, guess):
    """X3: who could not send the same request again does not find its address either."""
    api = open_api(in_flight="202")
    address, gate = address_and_gate(api, body=b'{"item": 7}')
    assert asked(api, address).status == 202
    assert is_unknown(api, guess(body=b'{"item": 8}'))
    assert is_unknown(api, address, EVES_BEARER)
    gate.open()


def test_an_address_without_a_session_may_be_asked_with_one(open_api: OpenApi):
    """X3, S4: the client may have got it meanwhile, and without it would see the same."""
    api = open_api(in_flight="202")
    address, gate = address_and_gate(api)
    assert asked(api, address, ADA).status == 202
    assert asked(api, api.post(headers=[*ADA, ASYNC]).header("location"), ADA).status == 202
    gate.open()


def test_an_address_is_of_one_moment(open_api: OpenApi, guess, clock):
    """X3: who tries out small bodies at leisure has to try out milliseconds as well."""
    api = open_api(in_flight="202")
    address = finished(api)
    clock.advance(0.001)
    assert guess() != address
    assert is_unknown(api, guess())


@pytest.mark.parametrize("headers", [ADA, ADAS_BEARER, []], ids=["cookie", "bearer", "nothing"])
def test_with_a_secret_the_address_cannot_be_computed(open_api: OpenApi, guess, headers: Headers):
    """X3: nor another service, which has a secret of its own."""
    api = open_api(in_flight="202", settings={"secret": "ours"})
    address = finished(api, headers)
    assert not is_unknown(api, address, headers)
    for secret in ("", "theirs", "our"):
        assert is_unknown(api, guess(headers, secret=secret), headers)
    assert guess(headers, secret="ours") == address
    other = open_api(in_flight="202", settings={"secret": "theirs"})
    assert is_unknown(other, address, headers)


def sealed_for(record: Record, caller: str) -> str:
    """The address that *caller* can compute from all of *record*."""
    return PATH + token_of(record, caller_digest("own", caller).encode(), b"")


def test_the_record_of_another_caller_gives_no_address(open_api: OpenApi):
    """X3: names may be easy to guess; the record says whose it is."""
    api = open_api(caller=lambda request: request.header(b"x-user").decode())
    assert api.post(headers=[("X-User", "ada")]).status == 201
    (record,) = api.records()
    assert asked(api, sealed_for(record, "ada"), [("X-User", "ada")]).status == 201
    assert is_unknown(api, sealed_for(record, "eve"), [("X-User", "eve")])


def test_a_compact_store_has_addresses_too(open_api: OpenApi, guess, tmp_path):
    """X3: a record that hardly says whose it is still holds the digest of the request."""
    store = open_store(f"sqlite:///{tmp_path}/compact.db?compact=1")
    api = open_api(in_flight="202", store=store)
    address = finished(api, ADA)
    assert len(api.records()[0].scope) == 1
    for headers in (EVE, [], EVES_BEARER):
        assert is_unknown(api, address, headers)
        assert is_unknown(api, guess(headers), headers)


def test_a_function_has_no_address(api: Api):
    """X3: what it returned was never for a client."""
    api.run("k-1", lambda: "for the caller of the function", scope="s")
    (record,) = api.records()
    token = token_of(record, caller_digest("").encode(), b"")
    assert is_unknown(api, PATH + token)


def test_an_address_that_was_tampered_with_is_none(open_api: OpenApi):
    """X3: whatever was changed, added or left out, and however it is written."""
    api = open_api(in_flight="202")
    address = finished(api, ADA)
    token = address.removeprefix(PATH)
    changed = [
        token[:at] + format(int(token[at], 16) ^ 1, "x") + token[at + 1 :]
        for at in range(len(token))
    ]
    spelled = ["", token[:-1], token[:-2], token + "0", token + "00", token.upper(), token[:32]]
    spaced = [f"{token[:2]}%20{token[2:]}", f"{token}%0A", f"{token}/", f"{token}%C3%A9"]
    for wrong in (*changed, *spelled, *spaced, "0" * 64, "é" * 32, "x" * 64):
        response = api.send("GET", PATH + wrong.replace("é", "%C3%A9"), ADA)
        assert response.status == 201, wrong  # an order, as at every other path of the shop
        assert json.loads(response.body)["order"] == len(api.shop.effects)
    assert asked(api, address, ADA).body == b"Ada's order"


def test_an_unknown_and_a_foreign_address_cost_the_same(open_api: OpenApi, new_store):
    """X3: one look at the store for either, and then the application."""
    store = Faulty(new_store())
    looks: list[object] = []
    get = store.get
    store.get = lambda ids: looks.append(ids) or get(ids)  # type: ignore[method-assign,func-returns-value]
    api = open_api(in_flight="202", store=store)
    address = finished(api, ADA)
    for wrong in (address, address[:-1] + format(int(address[-1], 16) ^ 1, "x"), PATH + "0" * 64):
        looks.clear()
        assert is_unknown(api, wrong, EVE)
        assert len(looks) == 1
    looks.clear()
    assert is_unknown(api, f"{PATH}nonsense", EVE)
    assert looks == []


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "POST"])
def test_only_get_and_head_ask(open_api: OpenApi, method: str):
    """L3: a preflight, for one, is the application's to answer."""
    api = open_api(in_flight="202")
    assert asked(api, finished(api), method=method).body == b"no such page"


def test_head_gets_the_same_without_the_body(open_api: OpenApi):
    """L3: RFC 9110 §9.3.2; a server may send whatever it is given."""
    api = open_api(in_flight="202")
    address, gate = address_and_gate(api)
    for _ in range(2):
        got, head = asked(api, address), asked(api, address, method="HEAD")
        assert (head.status, head.headers, head.body) == (got.status, got.headers, b"")
        assert head.header("content-length") == str(len(got.body))
        gate.open()
        eventually(lambda: asked(api, address).status != 202)


def test_the_response_at_the_address_is_not_cached(open_api: OpenApi):
    """X3: what the handler allowed for its POST is no word about a GET that asks for it."""
    lines = [
        *(("Cache-Control", "public, max-age=600"), ("Expires", "Tue, 17 Nov 2099 11:12:48 GMT")),
        *(("Last-Modified", "Tue, 17 Nov 2020 11:12:48 GMT"), ("ETag", '"1"'), ("Pragma", "x")),
        *(("CDN-Cache-Control", "max-age=600"), ("Surrogate-Control", "max-age=600")),
        ("X-Kept", "1"),
    ]
    api = open_api(in_flight="202")
    api.shop.answers["/orders"] = gate = Gate(says(201, b"Ada's order", headers=lines))
    api.start_post()
    gate.wait_until_entered()
    address = api.post(headers=[ASYNC]).header("location")
    gate.open()
    eventually(lambda: asked(api, address).status == 201)
    response = asked(api, address)
    assert response.body == b"Ada's order"
    assert response.all("cache-control") == ["no-store"]
    assert response.header("x-kept") == "1"
    gone = {name.lower() for name, _ in lines} - {"cache-control", "x-kept"}
    assert gone.isdisjoint(name for name, _ in response.headers)
    assert api.post().header("cache-control") == "public, max-age=600"  # a POST, as it was


def test_an_address_shows_nothing_of_the_next_generation(open_api: OpenApi, clock):
    """W1, X3: after its window the key is another operation's, which has an address of its own."""
    api = open_api(in_flight="202", window="1h", lease="60s")
    address = finished(api, ADA)
    clock.advance(3_600)
    gone = asked(api, address, ADA)
    assert (gone.status, json.loads(gone.body)) == (404, {"status": "gone"})
    assert api.post(headers=ADA).status == 201
    assert is_unknown(api, address, ADA)


def test_a_request_that_was_refused_before_the_handler_has_no_address(open_api: OpenApi):
    """L4, X3: the next request with the key may be of another client."""
    api = open_api(in_flight="202")
    gate = api.shop.answers["/orders"] = Gate(in_turn(says(401, b"who are you?"), says(201, b"ok")))
    first = api.start_post(headers=EVE)
    gate.wait_until_entered()
    address = api.post(headers=EVE).header("location")
    assert address is not None
    gate.open()
    assert first.result(20).status == 401
    assert is_unknown(api, address, EVE)
    assert api.post(headers=ADA).body == b"ok"
    assert is_unknown(api, address, EVE)


@over_asgi
def test_every_client_with_an_address_gets_the_progress(open_api: OpenApi):
    """L3, L10: the first client, a duplicate and a poll get the same."""
    api = open_api(in_flight="202")
    gate = api.shop.answers["/orders"] = Gate()
    first = api.post(headers=[ASYNC])
    gate.wait_until_entered()
    second, third = api.post(), asked(api, first.header("location") or "")
    assert first.status == second.status == third.status == 202
    assert first.body == second.body == third.body
    assert first.header("location") == second.header("location") == third.header("location")
    gate.open()


def test_the_application_chooses_where_addresses_are(open_api: OpenApi):
    """L3."""
    api = open_api(in_flight="202", status_path="/how-far/")
    address, gate = address_and_gate(api)
    token = address.removeprefix("/how-far/")
    assert len(token) == 64
    assert asked(api, address).status == 202
    assert asked(api, address).header("location") == address
    assert is_unknown(api, PATH + token)
    gate.open()


def test_a_transaction_has_no_address(open_api: OpenApi, tmp_path):
    """L3, L9: nothing is there before it is all there, so a duplicate gets 409."""
    store = open_store(f"sqlite:///{tmp_path}/together.db")
    api = open_api(mode="transaction", in_flight="202", store=store)
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    assert api.post().code == "in-progress"
    gate.open()
    assert first.result(20).status == 201
    assert api.post().is_replay


@over_asgi
def test_a_client_that_gets_202_has_an_operation_to_poll(open_api: OpenApi, new_store):
    """L10: also if it accepts while a refusal before the handler is being released."""
    store = Faulty(new_store())
    api = open_api(store=store, in_flight="202")
    refused = says(403, b"not you")

    def refuse(call: Call) -> Said:
        operation = call.operation

        def lose_patience(_swaps: object) -> None:
            store.before = len
            operation.accept()

        store.before = lose_patience
        return refused(call)

    api.shop.answers["/orders"] = refuse
    response = api.post()
    assert (response.status, response.body) == (403, b"not you")
    assert api.post().status == 403
    assert api.effects() == 2
