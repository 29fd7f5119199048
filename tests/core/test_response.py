"""Responses: what is stored of them, and what a replay is."""

import gzip
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.response import (
    COMPRESSED,
    KINDS,
    SEALED,
    Response,
    decode_response,
    decode_value,
    encode_response,
    encode_value,
    for_client,
    outline_of,
)
from coatcheck.errors import Unreadable

JSON = (b"content-type", b"application/json")
NOT_KEPT = b"""connection keep-alive proxy-connection te trailer transfer-encoding upgrade
    proxy-authenticate proxy-authorization proxy-authentication-info
    date age server via warning set-cookie set-cookie2 content-length alt-svc
    server-timing traceparent tracestate traceresponse x-request-id x-correlation-id""".split()

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30).map(
    lambda text: b"x-" + text.encode()
)
values = st.binary(max_size=300)
common = st.sampled_from(
    [JSON, (b"location", b"/orders/1"), (b"vary", b"Accept-Encoding"), (b"etag", b'"1"')]
)


# Names with a code of their own, names that are not kept, and any other bytes.
any_names = names | st.sampled_from(
    [b"content-type", b"location", b"etag", b"retry-after", b"set-cookie", b"connection", b""]
)
any_headers = st.lists(st.tuples(any_names | st.binary(), values) | common, max_size=20)


@given(st.integers(0, 65_535), any_headers, st.binary(max_size=200))
def test_all_kept_parts_of_any_response_are_read_as_they_were(status, headers, body):
    """L2."""
    lines = [value for name, value in headers if name == b"connection"]
    named = {token.strip().lower() for line in lines for token in line.split(b",")}
    expected = [h for h in headers if h[0] not in named and h[0] not in NOT_KEPT]
    kept = decode_response(encode_response(Response(status, headers, body)))
    assert kept == (status, expected, body)


def test_the_tables_of_the_first_release_only_grow_at_their_ends():
    """Old records refer to them by number: never change these, only add."""
    whole = [
        (b"content-type", b"application/json"),
        (b"content-type", b"application/problem+json"),
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"vary", b"Accept-Encoding"),
        (b"content-encoding", b"gzip"),
    ]
    stored = b"\x01\x00\xc8\x08" + bytes(0x80 | code for code in range(8))
    assert decode_response(stored) == (200, whole, b"")
    assert encode_response(Response(200, whole, b"")) == stored
    named = b"""content-type location etag last-modified cache-control content-language
    content-encoding link vary retry-after""".split()
    stored = b"\x01\x00\xc8\x0a" + b"".join(bytes((code, 1)) + b"v" for code in range(1, 11))
    assert decode_response(stored) == (200, [(name, b"v") for name in named], b"")
    assert encode_response(Response(200, [(name, b"v") for name in named], b"")) == stored


def test_stored_results_of_the_first_release_stay_readable():
    """Never change these."""
    assert decode_value(b'\x02{"a":[1,null]}') == {"a": [1, None]}
    assert encode_value({"a": [1, None]}) == b'\x02{"a":[1,null]}'
    assert decode_value(b"\x03\x00\xff") == b"\x00\xff"
    assert encode_value(b"\x00\xff") == b"\x03\x00\xff"


@pytest.mark.parametrize("blob", [b"", b"\x00", b"\x01\x00\xc8\x00", b"\x04"])
def test_other_stored_bytes_are_no_result(blob):
    with pytest.raises(Unreadable):
        decode_value(blob)


@pytest.mark.parametrize("blob", [b"\x02", b'\x02{"a":', b"\x02nul", b'\x02"\xff"', b"\x021 2"])
def test_a_damaged_result_is_unreadable(blob):
    """X1."""
    with pytest.raises(Unreadable, match="damaged"):
        decode_value(blob)


@pytest.mark.parametrize(
    "blob", [b"", b"\x02null", b"\x03", b"\x00", b"\x01\x00\xc8", b"\x01\x00\xc8\x01"]
)
def test_other_or_damaged_bytes_are_no_response(blob):
    with pytest.raises(Unreadable):
        decode_response(blob)


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


def kept_of(headers, **options):
    return decode_response(encode_response(Response(200, headers, b""), **options)).headers


@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_header_of_one_moment_is_not_kept(name):
    """L2."""
    assert kept_of([(name, b"v"), JSON]) == [JSON]


def test_cookies_are_kept_if_the_policy_says_so():
    """L2: all of them in their order, and no other header."""
    cookies = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2; HttpOnly")]
    others = [(name, b"v") for name in NOT_KEPT if name != b"set-cookie"]
    assert kept_of([cookies[0], *others, cookies[1]], with_cookies=True) == cookies


def test_headers_that_connection_lists_in_any_case_are_not_kept():
    """L2, RFC 9110 §7.6.1: in every line of it."""
    sent = [
        *((b"connection", b" X-One ,x-two"), (b"x-one", b"1"), (b"x-two", b"2")),
        *((b"connection", b"X-THREE"), (b"x-three", b"3"), (b"x-four", b"4")),
    ]
    assert kept_of(sent) == [(b"x-four", b"4")]


@pytest.mark.parametrize(
    "value", [None, 0, False, "", {}, [], 1.5, "é\ud800", {"a": [1, {"b": None}]}, b"", b"\xff"]
)
def test_every_result_is_stored_also_an_empty_one(value):
    """L2."""
    assert decode_value(encode_value(value)) == value
    assert type(decode_value(encode_value(value))) is type(value)
    assert decode_value(encode_value(memoryview(b"coat"))) == b"coat"


def circle():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value", [object(), math.nan, {1, 2}, circle()], ids=["object", "nan", "set", "circle"]
)
def test_a_value_that_is_not_json_is_not_stored(value):
    assert encode_value(value) is None


BODY = b"coat " * 100


def zipped(body):
    return gzip.compress(body, mtime=0)  # the same bytes in every run


def coded(coding, body, *more):
    return Response(200, [JSON, (b"content-encoding", coding), *more], body)


@pytest.mark.parametrize(
    ("accepts", "is_sent_coded"),
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
def test_a_coded_body_is_decoded_for_a_client_that_does_not_accept_it(accepts, is_sent_coded):
    """L12."""
    response = coded(b"gzip", zipped(BODY), (b"etag", b'"1"'), (b"etag", b'W/"2"'))
    sent = for_client(response, accepts)
    if is_sent_coded:
        assert sent is response
    else:
        assert sent == (200, [JSON, (b"etag", b'W/"1"'), (b"etag", b'W/"2"')], BODY)


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
def test_an_unknown_or_damaged_coding_is_not_sent_to_a_client_that_does_not_accept_it(coding, body):
    """L12."""
    assert for_client(coded(coding, body), b"identity") is None
    assert for_client(coded(coding, body), coding).body == body


def test_an_answer_without_a_body_needs_no_decoding():
    """L12: HEAD and 304 name the coding of a body that is not there."""
    assert for_client(coded(b"gzip", b""), b"identity") == (200, [JSON], b"")


@pytest.mark.parametrize("coding", [b"gzip", b"br"])
def test_a_client_that_names_no_coding_gets_the_stored_bytes(coding):
    """L12: RFC 9110 section 12.5.3: without the header any coding is acceptable."""
    response = coded(coding, b"coded")
    assert for_client(response, None) is response


@pytest.mark.parametrize("plain", [[JSON], [(b"content-encoding", b"identity")]])
def test_a_body_without_a_coding_is_sent_to_every_client(plain):
    response = Response(200, plain, BODY)
    assert for_client(response, b"") is response


def test_long_headers_and_many_of_them_come_back_too():
    """L2."""
    many = [(b"x-%d" % number, b"v" * 20_000) for number in range(200)]
    assert decode_response(encode_response(Response(200, many, b""))).headers == many


def test_a_compressed_response_is_read():
    """X1: also by nodes that do not compress yet."""
    response = Response(200, [(b"content-type", b"text/plain")], b"again " * 500)
    blob = bytes([COMPRESSED]) + zlib.compress(encode_response(response))
    assert decode_response(blob) == response
    assert outline_of(blob) == (200, 3_000)
    assert outline_of(blob[:20]) == (None, 19)
    with pytest.raises(Unreadable, match="damaged"):
        decode_response(blob[:20])


def test_operators_see_only_the_status_and_the_size_of_a_response():
    """O1, X1."""
    response = Response(201, [(b"content-type", b"text/plain")], b"secret")
    assert outline_of(encode_response(response)) == (201, 6)
    assert outline_of(encode_value("secret") or b"") == (None, len('"secret"'))
    assert outline_of(encode_value(b"secret") or b"") == (None, 6)


@pytest.mark.parametrize(("blob", "size"), [(b"", 0), (b"\x01\x00", 1), (b"\x01\x00\xc8\x01", 3)])
def test_operators_see_the_size_of_damaged_bytes(blob, size):
    """O1."""
    assert outline_of(blob) == (None, size)


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_turns_encrypted_bytes_into_another_kind(bit):
    """X1: otherwise ciphertext would be read as a response."""
    assert SEALED ^ (1 << bit) not in KINDS


CODED = b"""content-digest repr-digest digest content-md5 signature signature-input
    unencoded-digest""".split()


def test_digests_of_the_coded_bytes_are_left_out_of_a_decoded_response():
    """L2, X1: they, and signatures over them, would be wrong (RFC 9530, RFC 9421)."""
    kept = [(b"content-encoding", b"gzip"), *((name, b"x") for name in CODED)]
    response = Response(200, kept, gzip.compress(b"plain"))
    decoded = for_client(response, b"identity")
    assert decoded == Response(200, [(b"unencoded-digest", b"x")], b"plain")
    assert for_client(response, b"gzip") is response
