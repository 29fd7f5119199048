"""F: same key, same request? The values themselves are laws of `core`; here is what they do."""

import pytest

from coatcheck.core.record import Swap
from tests.support.http import with_key
from tests.support.times import eventually

from .api import Api, OpenApi
from .shop import Gate


def test_another_request_with_the_same_key_is_refused(api: Api):
    """F1: nothing runs, the first answer is not shown, and it stays what it was."""
    first = api.post(body=b'{"card": "4242"}')
    refused = api.post(body=b'{"card": "4000"}')
    assert (refused.status, refused.code) == (422, "key-reused")
    assert refused.problem["retry"] == "never"
    assert refused.all("idempotent-replayed") == []
    assert first.body not in refused.body
    assert b"4242" not in refused.body
    assert api.post(body=b'{"card": "4242"}').body == first.body
    assert api.effects() == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"body": b"b=2&a=1"}, "the body or its content type differs"),
        ({"headers": [("Content-Type", "text/plain")]}, "the body or its content type differs"),
        ({"path": "/orders?b=2&a=1"}, "the query differs"),
        (
            {"headers": [("Content-Type", "text/csv"), ("If-Match", "2")]},
            "one of the headers differs",
        ),
    ],
)
def test_a_refusal_names_the_part_that_differs(open_api: OpenApi, change, sentence: str):
    """F1: also if only the order of fields or parameters is another."""
    api = open_api(include_headers=("If-Match",))
    request = {
        "path": "/orders?a=1&b=2",
        "body": b"a=1&b=2",
        "headers": [("Content-Type", "text/csv")],
    }
    api.post(**request)
    assert f"({sentence})" in api.post(**request | change).problem["detail"]


@pytest.mark.parametrize("status", [400, 409, 422])
def test_the_status_of_a_mismatch_can_be_chosen(open_api: OpenApi, status: int):
    """F1."""
    api = open_api(mismatch=status)
    api.post()
    refused = api.post(body=b'{"item": 2}')
    assert (refused.status, refused.code) == (status, "key-reused")
    assert refused.problem["status"] == status


def test_another_request_is_refused_while_the_first_still_runs(api: Api):
    """F1: it neither waits nor runs, and can be told from a conflict."""
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    refused = api.post(body=b'{"item": 2}')
    assert (refused.status, refused.code) == (422, "key-reused")
    gate.open()
    assert first.result(20).status == 201
    assert api.effects() == 1


def test_a_waiter_is_checked_again_when_it_wakes(open_api: OpenApi):
    """F1: the record may have begun a new life with another request meanwhile."""
    api = open_api(wait="10s", lease="60s")
    claim = api.claim("k-1", "/orders")
    waiting = api.start_post("k-1")
    eventually(lambda: api.waiters() == 1)
    other = claim._replace(version=claim.version + 1, fingerprint=b"?" * 16, nonce=7)
    api.store.swap([Swap(claim.id, claim.version, other)])
    assert waiting.result(20).code == "key-reused"
    assert api.effects() == 0


def test_a_claim_whose_lease_ran_out_still_has_its_fingerprint(api: Api, clock):
    """F1, L5: another request does not inherit the key of a dead one."""
    api.claim("k-1", "/orders")
    clock.advance(61)
    refused = api.post("k-1", body=b'{"item": 2}')
    assert (refused.status, refused.code) == (422, "key-reused")
    assert api.effects() == 0
    assert api.post("k-1").status == 201


@pytest.mark.parametrize(
    "body",
    [
        b'{"b": [1, 2], "a": "A"}',
        b'{ "a" : "A" ,\n "b":[1,2] }',
        b'{"a": "\\u0041", "b": [1, 2]}',
    ],
)
def test_json_is_compared_by_value(api: Api, body: bytes):
    """F2."""
    api.post(body=b'{"a":"A","b":[1,2]}')
    assert api.post(body=body).is_replay
    assert api.effects() == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [(b"9007199254740993", b"9007199254740992"), (b"1", b'"1"'), (b'{"x": null}', b"{}")],
)
def test_different_values_are_never_one_request(api: Api, one: bytes, other: bytes):
    """F2: exact numbers, kinds and members all count; `tests/core` has more of them."""
    api.post(body=b'{"v": %b}' % one)
    assert api.post(body=b'{"v": %b}' % other).code == "key-reused"
    assert api.effects() == 1


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"a": "\\ud800"}', b'{"a": "\xff"}', b"1e999999999", b'{"a":', b"\x00"],
    ids=["deep", "surrogate", "not utf-8", "huge", "cut off", "nul"],
)
def test_hostile_json_is_served_like_any_other_body(api: Api, body: bytes):
    """F2: compared byte by byte, and never a 500."""
    assert api.post(body=body).status == 201
    assert api.post(body=body).is_replay
    assert api.post(body=body + b" ").status in (201, 422)
    assert api.effects() == 1


def test_what_is_not_json_is_compared_byte_by_byte(api: Api):
    """F2."""
    plain = [("Content-Type", "text/plain")]
    api.post(body=b'{"a": 1}', headers=plain)
    assert api.post(body=b'{"a": 1}', headers=plain).is_replay
    assert api.post(body=b'{"a":1}', headers=plain).code == "key-reused"


def test_the_content_type_is_part_of_the_request(api: Api):
    """F2: the same bytes as text are another request."""
    api.post(body=b"{}")
    assert api.post(body=b"{}", headers=[("Content-Type", "text/plain")]).code == "key-reused"


def test_the_content_encoding_is_part_of_the_request(api: Api):
    """F2: it changes what the bytes mean."""
    api.post(body=b"x", headers=[("Content-Encoding", "gzip")])
    assert api.post(body=b"x", headers=[("Content-Encoding", "br")]).code == "key-reused"
    assert api.post(body=b"x").code == "key-reused"
    assert api.post(body=b"x", headers=[("Content-Encoding", "gzip")]).is_replay


def test_a_refusal_mentions_the_cookie_where_that_is_compared(api: Api):
    """F1, X3: the body may well be the same, and a client would look for the difference there."""
    session, bearer = ("Cookie", "session=a"), ("Authorization", "Bearer a")
    api.post(headers=[session])
    assert "Cookie" in api.post(headers=[("Cookie", "session=b")]).problem["detail"]
    api.post("k-2", headers=[session, bearer])
    other = api.post("k-2", body=b"another", headers=[session, bearer])
    assert other.code == "key-reused"
    assert "Cookie" not in other.problem["detail"]


def test_a_fresh_multipart_boundary_is_the_same_form(api: Api):
    """F2: clients draw one for each attempt."""

    def form(boundary: str, value: str):
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{value}\r\n'
        headers = [("Content-Type", f"multipart/form-data; boundary={boundary}")]
        return {"body": f"{body}--{boundary}--\r\n".encode(), "headers": headers}

    api.post(**form("aaaa", "1"))
    assert api.post(**form("bbbb", "1")).is_replay
    assert api.post(**form("cccc", "2")).code == "key-reused"


@pytest.mark.served
def test_the_query_is_part_of_the_request(api: Api):
    """F1, F3."""
    api.post(path="/orders?dry=0")
    assert api.post(path="/orders?dry=0").is_replay
    assert api.post(path="/orders?dry=1").code == "key-reused"
    assert api.post(path="/orders").code == "key-reused"


def test_what_changes_with_each_transport_is_no_difference(api: Api):
    """F1: another agent, trace, proxy and coding."""
    api.post(headers=[("User-Agent", "a/1"), ("Traceparent", "00-1-1-00")])
    noise = [("User-Agent", "b/2"), ("Traceparent", "00-2-2-00"), ("X-Forwarded-For", "192.0.2.9")]
    assert api.post(headers=[*noise, ("Accept-Encoding", "br")]).is_replay


def test_members_that_change_legitimately_can_be_left_out(open_api: OpenApi):
    """F3: by JSON pointer."""
    api = open_api(ignore=("/sent_at", "/meta/signature"))
    api.post(body=b'{"item": 1, "sent_at": 1, "meta": {"signature": "a", "x": 1}}')
    again = api.post(body=b'{"item": 1, "sent_at": 2, "meta": {"x": 1}}')
    assert again.is_replay
    assert api.post(body=b'{"item": 2, "sent_at": 1}').code == "key-reused"


def test_headers_can_be_put_in(open_api: OpenApi):
    """F3."""
    api = open_api(include_headers=("API-Version",))
    api.post(headers=[("API-Version", "1")])
    assert api.post(headers=[("API-Version", "1"), ("X-Other", "2")]).is_replay
    assert api.post(headers=[("API-Version", "2")]).code == "key-reused"
    assert api.post().code == "key-reused"


@pytest.mark.served
def test_a_body_over_a_megabyte_is_compared_too(api: Api):
    """F1: it is spooled, and the handler gets every byte of it."""
    body = bytes(range(256)) * 8_192
    headers = with_key("k-1", [("Content-Type", "application/octet-stream")])
    api.send("POST", "/orders", headers, body)
    assert api.shop.effects[0].body == body
    assert api.send("POST", "/orders", headers, body).is_replay
    assert api.send("POST", "/orders", headers, body[:-1] + b"!").code == "key-reused"
    assert api.effects() == 1
