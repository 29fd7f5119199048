"""K: what a key is, where it comes from, and what it is called."""

import json
import re

import pytest

from tests.support.http import with_key

from .api import Api, OpenApi


@pytest.mark.served
def test_a_first_request_is_answered_as_without_a_key(api: Api):
    """K1, K5: the handler's own response, and its reference; nothing says replay."""
    bare = api.post(key=None)
    first = api.post(key="k-1")
    assert first.status == bare.status == 201
    assert json.loads(first.body) == {"order": 2}
    assert first.header("content-type") == bare.header("content-type")
    assert first.header("idempotent-replayed") is None
    assert re.fullmatch(r"[0-9A-Z]{4}-[0-9A-Z]{4}-[0-9A-Z]{4}", first.reference)
    assert bare.all("idempotency-reference") == []


def test_a_retry_with_the_same_key_has_one_effect(api: Api):
    """K1, L2; and K2, as far as a server sees it."""
    first, second, third = api.post(), api.post(), api.post()
    assert api.effects() == 1
    assert not first.is_replay
    assert second.is_replay
    assert third.is_replay
    assert first.body == second.body == third.body


def test_two_keys_with_the_same_content_are_two_actions(api: Api):
    """K1: nothing is deduplicated by content; and K2, as far as a server sees it."""
    api.post("k-1")
    api.post("k-2")
    assert api.effects() == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("k-1", '"k-1"'),
        ('"k-1"', "k-1"),
        ("k-1", " k-1\t"),
        (r'"a\"b\\c"', r'"a\"b\\c"'),
        ("a/b+c=", '"a/b+c="'),
    ],
)
def test_both_spellings_of_a_key_are_one_key(api: Api, one: str, other: str):
    """K1."""
    first, second = api.post(one), api.post(other)
    assert api.effects() == 1
    assert second.is_replay
    assert second.reference == first.reference


@pytest.mark.persists
@pytest.mark.parametrize(
    ("one", "other"), [("abc", "ABC"), ('"k"', '"k "'), ("k", "k."), ("1", "01")]
)
def test_keys_are_opaque_and_compared_exactly(api: Api, one: str, other: str):
    """K1."""
    assert api.post(one).status == api.post(other).status == 201
    assert api.effects() == 2


@pytest.mark.persists
@pytest.mark.parametrize("key", ["'OR'1=1--", "*", "%00", "../../x", "{{7*7}}", "%0d%0aX:1", "<b>"])
def test_keys_that_look_like_something_mean_nothing(api: Api, key: str):
    """K1: the server never reads meaning into a key."""
    first, second = api.post(key), api.post(key)
    assert first.status == 201
    assert second.is_replay
    assert api.effects() == 1


@pytest.mark.served
def test_the_name_of_the_header_has_no_case(api: Api):
    """K1: IDEMPOTENCY-KEY is the same field."""
    api.send("POST", "/orders", [("Idempotency-Key", "k-1")])
    assert api.send("POST", "/orders", [("IDEMPOTENCY-KEY", "k-1")]).is_replay


@pytest.mark.persists
def test_a_key_may_have_255_characters_and_not_one_more(api: Api):
    """K1, K3, X2: and two long keys with the same beginning are never one."""
    longest = "k" * 255
    assert api.post(longest).status == 201
    assert api.post(longest).is_replay
    for tail in ("a", "b", "a" * 8_000):
        refused = api.post(longest + tail)
        assert (refused.status, refused.code) == (400, "key-invalid")
        assert "255" in refused.problem["detail"]
    assert api.effects() == 1


NO_KEYS = (
    *("", "   ", '""', '"  "', '"abc', r'"a\x"', 'a"b', "\xe9", "k\x01", "k\x7f"),
    *('"a","b"', "a,b", "a b", '"a";p=1', "a;p=1", '"a" b'),
)


@pytest.mark.parametrize("key", NO_KEYS)
def test_what_is_not_a_key_is_refused_and_nothing_runs(api: Api, key: str):
    """K3: refused with what is wrong and where the docs are; never run unguarded."""
    refused = api.post(key)
    assert (refused.status, refused.code) == (400, "key-invalid")
    assert refused.problem["retry"] == "new-key"
    assert refused.problem["detail"].startswith("Idempotency-Key: ")
    assert refused.problem["type"].startswith("https://")
    assert api.shop.effects == []
    assert api.records() == []


@pytest.mark.served
@pytest.mark.parametrize("other", ["k-2", "k-1"])
def test_a_key_that_is_sent_twice_is_refused(api: Api, other: str):
    """K3: even twice the same: which of two was meant is a guess."""
    refused = api.post("k-1", headers=[("Idempotency-Key", other)])
    assert (refused.status, refused.code) == (400, "key-invalid")
    assert api.shop.effects == []


def test_a_missing_key_is_refused_where_it_is_required(open_api: OpenApi):
    """K3."""
    api = open_api(required=True)
    refused = api.post(key=None)
    assert (refused.status, refused.code) == (400, "key-missing")
    assert "Idempotency-Key" in refused.problem["detail"]
    assert api.shop.effects == []
    assert api.post("k-1").status == 201


def test_a_missing_key_is_no_matter_where_it_is_optional(api: Api):
    """K3: two requests without a key are two actions, and nothing is kept of them."""
    assert api.post(key=None).status == api.post(key=None).status == 201
    assert api.effects() == 2
    assert api.records() == []


def test_the_header_can_have_another_name(open_api: OpenApi):
    """K1: for APIs that call it differently."""
    api = open_api(key_header="PayPal-Request-Id", replayed_header="X-Again")
    api.post(key=None, headers=[("PayPal-Request-Id", "k-1")])
    again = api.post(key=None, headers=[("PayPal-Request-Id", "k-1")])
    assert again.header("x-again") == "true"
    assert api.effects() == 1
    assert api.post(key="k-1").header("x-again") is None
    assert api.effects() == 2


# --- natural keys ---------------------------------------------------------------------------


def order_number(request) -> str:
    return request.json().get("number", "")


def test_a_request_can_bring_its_key_in_its_body(open_api: OpenApi):
    """K4."""
    api = open_api(key=order_number)
    first = api.post(None, body=b'{"number": "o-1"}')
    again = api.post(None, body=b'{ "number": "o-1" }')
    other = api.post(None, body=b'{"number": "o-2"}')
    assert again.is_replay
    assert again.body == first.body
    assert other.status == 201
    assert api.effects() == 2
    assert api.shop.effects[0].body == b'{"number": "o-1"}'


def test_a_header_goes_before_a_natural_key(open_api: OpenApi):
    """K4: who sends a key means it."""
    api = open_api(key=order_number)
    api.post("k-1", body=b'{"number": "o-1"}')
    api.post("k-2", body=b'{"number": "o-1"}')
    assert api.effects() == 2


def test_a_request_without_a_natural_key_runs_unguarded_or_is_refused(open_api: OpenApi):
    """K3, K4: as the policy says."""
    optional = open_api(key=order_number)
    assert optional.post(None, body=b'{"item": 1}').status == 201
    assert optional.shop.effects[0].body == b'{"item": 1}'
    assert optional.records() == []
    required = open_api(key=order_number, required=True)
    refused = required.post(None, body=b'{"item": 1}')
    assert (refused.status, refused.code) == (400, "key-missing")
    assert required.shop.effects == []


@pytest.mark.served
@pytest.mark.parametrize("required", [False, True])
def test_a_large_request_without_a_natural_key_reaches_the_handler_whole(
    open_api: OpenApi, required: bool
):
    """K4: also where the body had to be spooled to look for the key."""
    api = open_api(key=lambda request: request.json()["number"], required=required)
    body = json.dumps({"number": "", "filling": "x" * 2_000_000}).encode()
    answer = api.post(None, body=body)
    assert answer.status == (400 if required else 201)
    assert [call.body == body for call in api.shop.effects] == ([] if required else [True])


TOO_LONG = b'{"number": "%b"}' % (b"n" * 256)
NO_NATURAL_KEYS = (b"not json", b"[]", b"", b"3", b"\xff" * 100_000, b"[" * 200_000, TOO_LONG)


@pytest.mark.parametrize("body", NO_NATURAL_KEYS, ids=lambda body: str(body[:12]))
def test_a_natural_key_that_cannot_be_found_is_the_clients_mistake(open_api: OpenApi, body: bytes):
    """K3, K4, X2: 400, never a 500; nothing runs, and the body is not sent back."""
    api = open_api(key=order_number, required=True)
    refused = api.post(None, body=body)
    assert (refused.status, refused.code) == (400, "key-invalid")
    assert len(refused.body) < 1_000
    assert api.shop.effects == []


def test_a_header_that_is_not_there_is_no_natural_key(open_api: OpenApi):
    """K4: a header's value is bytes, and no bytes are not a key that all such requests share."""
    api = open_api(key=lambda request: request.header(b"x-event"))
    for _ in range(2):
        assert api.post(None).status == 201
    assert api.effects() == 2
    assert api.records() == []
    for _ in range(2):
        answer = api.post(None, headers=[("X-Event", "e-7")])
    assert answer.is_replay
    assert api.record(answer.reference).key == "e-7"


# --- references -----------------------------------------------------------------------------


@pytest.mark.persists
def test_the_reference_finds_the_operation(api: Api):
    """K5: what the response says is enough for support."""
    first = api.post("k-1")
    record = api.record(first.reference)
    assert (record.key, record.label) == ("k-1", "POST /orders")


def test_every_answer_about_an_operation_carries_its_reference(api: Api):
    """K5: the first, the replay, and a refusal that concerns it."""
    first = api.post()
    again = api.post()
    reused = api.post(body=b'{"item": 2}')
    assert again.reference == reused.reference == first.reference
    assert reused.problem["reference"] == first.reference


def test_the_handler_knows_its_operation(api: Api):
    """K5: for its own log, and for the keys it sends on."""
    first = api.post("k-1")
    (call,) = api.shop.effects
    assert call.operation.reference == first.reference
    assert (call.operation.key, call.operation.attempt) == ("k-1", 1)
    assert call.operation.derive("charge") != call.operation.derive("ship")


def test_the_log_names_the_operation_and_never_the_whole_key(api: Api, caplog):
    """K5: one line for each decision."""
    caplog.set_level("INFO", "coatcheck")
    key = "a-key-that-nobody-should-see-in-a-log"
    first = api.post(key)
    api.post(key)
    ours = [record for record in caplog.records if record.name == "coatcheck"]  # not the client's
    assert [record.outcome for record in ours] == ["executed", "replayed"]
    assert all(first.reference in record.getMessage() for record in ours)
    assert key not in caplog.text


def test_a_reference_is_of_one_operation_only(api: Api):
    """K5."""
    references = {api.post(f"k-{n}").reference for n in range(20)}
    assert len(references) == 20


def test_a_key_on_an_unguarded_method_changes_nothing(api: Api):
    """S3: GET with a key is a GET."""
    first = api.send("GET", "/orders", with_key("k-1"))
    second = api.send("GET", "/orders", with_key("k-1"))
    assert first.body != second.body
    assert second.all("idempotent-replayed") == []
    assert api.records() == []


def test_zero_is_a_natural_key(open_api: OpenApi):
    """K4, L1: the first event of a stream often has it."""
    api = open_api(key=lambda request: request.json()["event"])
    for _ in range(2):
        api.post(key=None, body=b'{"event": 0}')
    assert api.effects() == 1
