"""Replays: what is kept, and that it comes back as it was."""

import gzip
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.replay import (
    Fate,
    Response,
    decode_response,
    decode_value,
    encode_response,
    encode_value,
    fate_of,
    for_client,
    kept_headers,
)

JSON = (b"content-type", b"application/json")

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30).map(
    lambda text: b"x-" + text.encode()
)
values = st.binary(max_size=300)
common = st.sampled_from(
    [JSON, (b"location", b"/orders/1"), (b"vary", b"Accept-Encoding"), (b"etag", b'"1"')]
)
headers = st.lists(common | st.tuples(names, values), max_size=200)


@given(st.integers(100, 999), headers, st.binary(max_size=2_000))
def test_a_response_comes_back_as_it_was(status, headers, body):
    """L2."""
    kept = decode_response(encode_response(Response(status, headers, body)))
    assert kept == (status, headers, body)


def test_stored_bytes_of_the_first_release_stay_readable():
    """A record that one release wrote must be read by every later one: never change these."""
    stored = b"\x01\x00\xc9\x04\x80\x02\x09/orders/1\x00\x06x-coat\x03red\x86body"
    expected = [
        JSON,
        (b"location", b"/orders/1"),
        (b"x-coat", b"red"),
        (b"vary", b"Accept-Encoding"),
    ]
    assert decode_response(stored) == (201, expected, b"body")
    assert encode_response(Response(201, expected, b"body")) == stored


def test_headers_of_one_message_or_connection_are_not_kept():
    """L2: neither hop-by-hop headers nor Date nor Set-Cookie."""
    sent = [
        JSON,
        (b"date", b"now"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"connection", b"close, X-Private"),
        (b"x-private", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"4"),
        (b"location", b"/orders/1"),
    ]
    assert kept_headers(sent) == [JSON, (b"location", b"/orders/1")]


@pytest.mark.parametrize(
    ("status", "keep", "reruns", "fate"),
    [
        (200, "final", True, Fate.KEEP),
        (204, "final", True, Fate.KEEP),
        (303, "final", True, Fate.KEEP),
        (402, "final", True, Fate.KEEP),
        (404, "final", True, Fate.KEEP),
        (422, "final", False, Fate.KEEP),
        (500, "final", True, Fate.RELEASE),
        (500, "final", False, Fate.DOUBT),
        (503, "all", True, Fate.KEEP),
        (408, "all", True, Fate.RELEASE),
        (425, "final", False, Fate.RELEASE),
        (429, "final", False, Fate.RELEASE),
        (401, "final", True, Fate.FORGET),
        (403, "all", False, Fate.FORGET),
        (413, "final", True, Fate.FORGET),
        (415, "final", True, Fate.FORGET),
        (200, lambda response: response.status == 201, True, Fate.RELEASE),
        (500, lambda response: True, False, Fate.KEEP),
    ],
)
def test_what_becomes_of_a_claim_depends_on_what_is_known(status, keep, reruns, fate):
    """L4."""
    assert fate_of(Response(status, [], b""), keep, reruns=reruns) is fate


@pytest.mark.parametrize(
    "value", [None, 0, False, "", {}, [], 1.5, "é\ud800", {"a": [1, {"b": None}]}, b"", b"\xff"]
)
def test_every_result_is_a_result_also_the_empty_ones(value):
    assert decode_value(encode_value(value)) == value
    assert type(decode_value(encode_value(value))) is type(value)


def circle():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value", [object(), math.nan, {1, 2}, circle()], ids=["object", "nan", "set", "circle"]
)
def test_what_json_cannot_say_is_not_kept(value):
    assert encode_value(value) is None


def test_other_bytes_are_kept_as_bytes():
    assert decode_value(encode_value(memoryview(b"coat"))) == b"coat"


BODY = b"coat " * 100


def zipped(body):
    return gzip.compress(body, mtime=0)  # the same bytes in every run


def coded(coding, body, *more):
    return Response(200, [JSON, (b"content-encoding", coding), *more], body)


@pytest.mark.parametrize(
    ("accepts", "is_given_coded"),
    [
        (b"gzip", True),
        (b"deflate, gzip;q=0.5", True),
        (b"*", True),
        (b"x-gzip", True),
        (b"", False),
        (b"identity", False),
        (b"gzip;q=0", False),
        (b"gzip; q=0.000", False),
        (b"*, gzip;q=0", False),
        (b"br", False),
    ],
)
def test_a_coded_body_is_decoded_for_who_does_not_accept_it(accepts, is_given_coded):
    """L12."""
    response = coded(b"gzip", zipped(BODY), (b"etag", b'"1"'))
    given_back = for_client(response, accepts)
    if is_given_coded:
        assert given_back is response
    else:
        assert given_back == (200, [JSON, (b"etag", b'W/"1"')], BODY)


def bare_deflate(body):
    machine = zlib.compressobj(wbits=-15)
    return machine.compress(body) + machine.flush()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"deflate", zlib.compress(BODY)),
        (b"deflate", bare_deflate(BODY)),
        (b"GZIP", zipped(BODY)),
        (b"gzip", zipped(BODY[:100]) + zipped(BODY[100:])),  # RFC 1952 §2.2: several members
        (b"x-gzip", zipped(BODY) + bytes(8)),  # padded with zeros, as some tools do
    ],
    ids=["deflate", "bare deflate", "capitals", "members", "padded"],
)
def test_every_spelling_of_a_known_coding_is_decoded(coding, body):
    """L12."""
    assert for_client(coded(coding, body), b"").body == BODY


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"br", b"?"),
        (b"gzip", b"no gzip"),
        (b"gzip", zipped(BODY)[:-1]),
        (b"gzip", zipped(BODY) + b"and more"),
        (b"deflate", zlib.compress(BODY)[:-5]),
    ],
    ids=["unknown", "not coded", "cut short", "too long", "deflate cut short"],
)
def test_what_cannot_be_decoded_is_not_given_to_who_does_not_accept_it(coding, body):
    """L12."""
    assert for_client(coded(coding, body), b"identity") is None
    assert for_client(coded(coding, body), coding).body == body


def test_an_answer_without_a_body_needs_no_decoding():
    """L12: HEAD and 304 name the coding of a body that is not there."""
    assert for_client(coded(b"gzip", b""), b"identity") == (200, [JSON], b"")


def test_a_weak_entity_tag_stays_as_it_is():
    response = coded(b"gzip", zipped(BODY), (b"etag", b'W/"1"'))
    assert (b"etag", b'W/"1"') in for_client(response, b"").headers


@pytest.mark.parametrize("plain", [[JSON], [(b"content-encoding", b"identity")]])
def test_an_uncoded_body_is_given_to_everybody(plain):
    response = Response(200, plain, BODY)
    assert for_client(response, b"") is response


def test_long_headers_and_many_of_them_come_back_too():
    """L2."""
    many = [(b"x-%d" % number, b"v" * 20_000) for number in range(200)]
    assert decode_response(encode_response(Response(200, many, b""))).headers == many
