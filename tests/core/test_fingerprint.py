"""Is it the same request: JSON by value, multipart without its boundary, all else byte by byte."""

import copy
import dataclasses
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.core.fingerprint import (
    PARSED_BYTES_MAX,
    difference,
    fingerprint_of,
    fingerprint_of_call,
    with_session,
)
from coatcheck.core.identity import digest_key
from coatcheck.core.json_codec import canonical_json, parse_pointer

JSON = b"application/json"
FORM = b"application/x-www-form-urlencoded"
MULTIPART = b"multipart/form-data; boundary=XyZ"
TEXT = b"text/plain"


def fingerprint(body=b"", content_type=JSON, *, ignore=(), **others):
    request = {"method": "POST", "path": "/orders", "query": b"", **others}
    pointers = tuple(map(parse_pointer, ignore))
    return fingerprint_of(body=body, content_type=content_type, ignore=pointers, **request)


def same(one, other, content_type=JSON):
    return fingerprint(one, content_type) == fingerprint(other, content_type)


def test_json_is_compared_by_value():
    """F2, S-22: see test_json_codec.py."""
    assert same(b'{"a":1,"b":[2]}', b' {"b":[2.0], "a":1}')
    assert not same(b'{"a":1}', b'{"a":2}')


def test_ignored_members_of_json_are_not_compared():
    """F3."""
    assert fingerprint(b'{"a":1,"t":2}', ignore=["/t"]) == fingerprint(b'{"a":1}')


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b"1" * 5_000, b'"\\ud800"', b"NaN", b"[1,]", b"   "]
)
def test_what_cannot_be_read_as_json_is_compared_byte_by_byte(body):
    """F2: never an error, and never equal to another body."""
    assert same(body, body)
    assert not same(body, body + b" ")
    assert not same(body, body[:-1] + b"x")


@pytest.mark.parametrize(
    ("one", "other"), [("a=x+y", "a=x%20y"), ("a=%c3%a9", "a=%C3%A9"), ("a=1&b=2", "b=2&a=1")]
)
def test_another_percent_encoding_of_a_form_is_another_request(one, other):
    """F1: forms are compared byte by byte, and a retry sends the same bytes."""
    assert same(one.encode(), one.encode(), FORM)
    assert not same(one.encode(), other.encode(), FORM)


SHARDS = [b"[", b"]", b"{", b"}", b'"', b"\\", b":", b",", b"1", b"e", b".", b"-", b"\\u", b"d800",
          b"\xff", b"\x00", b" ", b"NaN", b"\r\n", b"--XyZ", b"\x01",
          b"\x02", b"a" * 50, b"1" * 99, b"[" * 63]  # fmt: skip
anything = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(SHARDS)).map(b"".join))
content_types = st.one_of(
    st.sampled_from([JSON, FORM, MULTIPART, TEXT, b"", b"application/problem+json; a=b"]),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda rest: b"multipart/form-data;" + rest),
)


@given(anything, content_types, st.sampled_from([(), ("/a",), ("/0", "/a/1")]))
def test_no_bytes_raise_an_error(body, content_type, ignore):
    """F2: the fingerprint is made before anything else looks at a body."""
    assert len(fingerprint(body, content_type, ignore=ignore)) == 16


@given(anything, anything, st.sampled_from([JSON, FORM, MULTIPART, TEXT]))
def test_bodies_with_one_fingerprint_are_equal(one, other, content_type):
    """F1: as bytes, or as JSON if both can be read."""
    if same(one, other, content_type) and one != other:
        assert content_type == JSON
        assert canonical_json(one) == canonical_json(other) is not None


# --- the other parts of a request -----------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PATCH"},
        {"path": "/orders/1"},
        {"query": b"dry_run=1"},
        {"content_type": TEXT},
        {"content_type": b"application/vnd.api+json"},
        {"headers": [(b"x-tenant", b"a")]},
        {"headers": [(b"x-tenant", b"")]},
        {"body": b'{"a":2}'},
        {"secret": b"s"},
    ],
)
def test_every_part_of_the_request_is_compared(change):
    """F1, S-20, S-21, S-28."""
    request = {"body": b'{"a":1}', "content_type": JSON}
    assert fingerprint(**request | change) != fingerprint(**request)


parts = st.tuples(
    st.text("aé\ud800;,1", max_size=3),
    st.text("aé\ud800;,1", max_size=3),
    st.binary(max_size=3),
    st.sampled_from([b"", b"a", b"1;", TEXT]),
    st.lists(st.tuples(st.sampled_from([b"a", b"b,"]), st.binary(max_size=2)), max_size=2),
    st.binary(max_size=3),
)


@given(parts, parts)
@example(("POST", "/a", b"", b"", [], b""), ("POST/", "a", b"", b"", [], b""))
@example(("P", "/", b"a", b"", [], b""), ("P", "/", b"", b"", [], b"a"))
@example(("P", "/", b"", b"", [(b"a", b"b")], b""), ("P", "/", b"", b"", [], b"1,1;ab"))
def test_two_requests_are_equal_only_part_by_part(one, other):
    """F1: the end of one part is never read as the beginning of the next."""

    def whole(request):
        method, path, query, content_type, headers, body = request
        return fingerprint(
            body, content_type, method=method, path=path, query=query, headers=headers
        )

    assert (whole(one) == whole(other)) == (one == other)


def test_names_of_included_headers_are_compared_in_any_case():
    """F3, S-01: and their values exactly, in the order of the policy."""
    lower = fingerprint(headers=[(b"x-tenant", b"A"), (b"x-site", b"b")])
    assert fingerprint(headers=[(b"X-Tenant", b"A"), (b"X-Site", b"b")]) == lower
    assert fingerprint(headers=[(b"x-tenant", b"a"), (b"x-site", b"b")]) != lower
    assert fingerprint(headers=[(b"x-site", b"b"), (b"x-tenant", b"A")]) != lower


def test_bodies_that_are_read_in_two_ways_are_never_equal():
    """F1, S-28: a JSON text is not the bytes that happen to be its canonical spelling."""
    bodies = [b'{"a":1}', b"1,1;ab", b"", b"\x01\x02"]
    types = [JSON, FORM, MULTIPART, TEXT, b"", b"application/octet-stream"]
    found = {fingerprint(body, content_type) for body in bodies for content_type in types}
    assert len(found) == len(bodies) * len(types)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"application/json", b"application/json; charset=utf-8"),
        (b"application/json", b" Application/JSON ;charset=UTF-8;"),
        (b"application/json", b"application/json; garbled"),
        (b"application/vnd.api+json", b'application/vnd.API+json; ext="x"'),
        (b"text/plain; charset=utf-8", b"TEXT/plain;Charset=UTF-8"),
        (b"text/plain; charset=utf-8", b'text/plain ; charset="utf-8" ;'),
        (rb'text/plain; a="b"', rb'text/plain; A="\b"'),
        (b"text/plain", b"text/plain;"),
        (b"text/plain; a=b", b"text/plain; ; a=b;"),
    ],
)
def test_another_spelling_of_the_content_type_is_the_same_request(one, other):
    """F2, S-28."""
    assert fingerprint(b'{"a":1}', one) == fingerprint(b'{"a":1}', other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"text/plain; charset=utf-8", b"text/plain; charset=latin-1"),
        (b"text/plain; charset=utf-8", b"text/plain"),
        (b"text/plain; a=b", b"text/plain; a=B"),
        (b"text/plain; a=b", b"text/plain; a=b; c=d"),
        (b"text/plain; charset=utf-8", b"text/plain; charset=5:utf-8"),
        (b"text/plain; a", b"text/plain; b"),
        (b"text/plain; a=b", b"text/plain; a=b; a"),
        (b"text/html", b"text/plain"),
        (b"", b"text/plain"),
        (b"application/x-json", b"application/json"),
        (b"x/" + b"y" * 2_000, b"x/" + b"y" * 2_001),
        (b"x/" + b"y" * 2_000, b"X/" + b"y" * 2_000),
    ],
)
def test_another_content_type_is_another_request(one, other):
    """F1, S-28."""
    assert fingerprint(b'{"a":1}', one) != fingerprint(b'{"a":1}', other)


def test_only_a_content_type_of_sensible_length_is_parsed():
    """X2: 1 024 bytes, as in the last release."""
    assert fingerprint(b"", b"X" * 1_024) == fingerprint(b"", b"x" * 1_024)
    assert fingerprint(b"", b"X" * 1_025) != fingerprint(b"", b"x" * 1_025)


def test_all_parameters_count_if_json_cannot_be_read():
    """F2: another decoder may read the bytes as the charset says."""
    utf_16, utf_32 = (b"application/json; charset=utf-%d" % bits for bits in (16, 32))
    assert fingerprint(b"\xff\xfe", utf_16) != fingerprint(b"\xff\xfe", utf_32)
    assert fingerprint(b"1", utf_16) == fingerprint(b"1", utf_32)


# --- multipart ------------------------------------------------------------------------------


def multipart(boundary, parts):
    """The body and the content type a client would send."""
    lines = b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts)
    content_type = b'multipart/form-data; boundary="%b"' % boundary
    return lines + b"--%b--\r\n" % boundary, content_type


file_parts = st.lists(
    st.lists(
        st.sampled_from([b"\r\n", b"--", b"-", b"\x01", b"\x02", b"x", b"On", b"--One", b"--Two"])
    ).map(lambda content: b'Content-Disposition: form-data; name="a"\r\n\r\n' + b"".join(content)),
    max_size=3,
)


@given(file_parts, file_parts)
@example([b"\x01\x02"], [b"\x01", b"\x02"])
@example([b"\x01\x01"], [b"\x01"])
def test_the_same_parts_with_another_boundary_are_the_same_request(one, other):
    """F2: and other parts are another request, also if a part contains a boundary."""
    first, second = multipart(b"=_7d1f;92", one), multipart(b"104e", other)
    assert (fingerprint(*first) == fingerprint(*second)) == (one == other)
    # If a part contains the other boundary, equal parts may differ; different ones are never equal.
    third, fourth = multipart(b"One", one), multipart(b"Two", other)
    assert fingerprint(*third) != fingerprint(*fourth) or one == other


@pytest.mark.parametrize("length", [1, 70])
def test_a_boundary_may_be_as_short_and_as_long_as_rfc_2046_says(length):
    """F2."""
    one, other = (multipart(letter * length, [b"a"]) for letter in (b"x", b"y"))
    assert fingerprint(*one) == fingerprint(*other)


def test_the_boundary_may_not_move_within_the_body():
    """F1, F2: a delimiter that is missing, doubled or elsewhere makes another request."""
    bodies = [
        b"--XyZ\r\na\r\n--XyZ--\r\n",
        b"--XyZ\r\na\r\n--XyZ--",
        b"--XyZ\r\na\r\n--XyZ\r\n",
        b"--XyZ\r\na\r\n--XYZ--\r\n",
        b"--XyZ\r\n--XyZ\r\na--\r\n",
        b"\r\na\r\n--XyZ--XyZ--\r\n",
        b"\r\na\r\n--\r\n",
        b"\x01\x02\r\na\r\n\x01\x02--\r\n",
        b"",
    ]
    assert len({fingerprint(body, MULTIPART) for body in bodies}) == len(bodies)


@pytest.mark.parametrize(
    ("content_type", "one", "other"),
    [
        (b"multipart/form-data", b"One", b"Two"),
        (b"multipart/form-data; boundary=", b"", b"-"),
        (b'multipart/form-data; boundary=""', b"", b"-"),
        (b"multipart/form-data; boundary=BOUNDARY", b"x" * 71, b"y" * 71),
        (b"multipart/form-data; boundary=BOUNDARY; boundary=c", b"One", b"Two"),
        (b"multipart/form-data; boundary=BOUNDARY; garbled", b"One", b"Two"),
        (b'multipart/form-data; boundary="BOUNDARY"', b"\xe9", b"\xe8"),
        (b'multipart/form-data; boundary="BOUNDARY"', b"\x01", b"\x02"),
        (b"text/plain; boundary=BOUNDARY", b"One", b"Two"),
    ],
)
def test_multipart_without_a_proper_boundary_is_compared_as_bytes(content_type, one, other):
    """F2: only a boundary that RFC 2046 allows is replaced."""
    first, second = (
        fingerprint(b"--%b--\r\n" % boundary, content_type.replace(b"BOUNDARY", boundary))
        for boundary in (one, other)
    )
    assert first != second


def test_other_parameters_of_a_multipart_type_are_compared():
    """F1: a client may only choose another boundary."""
    body = b"--XyZ--\r\n"
    assert fingerprint(body, MULTIPART) != fingerprint(body, MULTIPART + b"; type=a")


# --- bodies in chunks -----------------------------------------------------------------------


def chunks_of(body, cuts):
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


@given(anything, st.lists(st.integers(0, 300)), content_types)
@example(b"--XyZ--XyZ--", [3, 7, 8], MULTIPART)
@example(b"", [], FORM)
@example(b"-" * 9, [2, 4], b"multipart/x; boundary=-")
@example(b'{"a":1}', [3], JSON)
def test_a_body_in_chunks_is_the_same_body(body, cuts, content_type):
    """F2: spooled or in memory, however it came over the wire, and read only once."""
    assert fingerprint(iter(chunks_of(body, cuts)), content_type) == fingerprint(body, content_type)


def test_a_body_too_large_to_parse_is_compared_byte_by_byte():
    """F2, X2: from one byte over the limit on, in memory as well as in chunks."""
    assert PARSED_BYTES_MAX == 2**18
    for size, is_parsed in ((PARSED_BYTES_MAX, True), (PARSED_BYTES_MAX + 1, False)):
        text = b'"%b"' % (b"x" * (size - 3))
        assert same(text + b" ", b" " + text) == is_parsed
        cut = chunks_of(text + b" ", range(0, size, 65_536))
        assert fingerprint(iter(cut)) == fingerprint(text + b" ")


@pytest.mark.parametrize("secret", [b"", b"s" * 64, b"s" * 65])
def test_a_secret_of_any_length_counts_however_a_body_is_cut(secret):
    """F1, S1."""
    whole = fingerprint(b"one two", TEXT, secret=digest_key(secret))
    assert fingerprint(iter([b"one", b" two"]), TEXT, secret=digest_key(secret)) == whole
    other = digest_key(secret + b"s")
    assert fingerprint(iter([b"one", b" two"]), TEXT, secret=other) != whole


# --- what differs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"path": "/orders/2"}, "the path differs"),
        ({"query": b"b=2&a=1"}, "the query differs"),
        ({"query": b""}, "the query differs"),
        ({"headers": [(b"if-match", b"2")]}, "one of the headers differs"),
        ({"body": b"b=2&a=1"}, "the body or its content type differs"),
        ({"content_type": TEXT}, "the body or its content type differs"),
        ({"query": b"", "body": b""}, "the query and the body or its content type differ"),
        (
            {"path": "/", "query": b"", "headers": [], "body": b""},
            "the path, the query, one of the headers and the body or its content type differ",
        ),
    ],
)
def test_a_difference_is_named_by_its_parts(change, sentence):
    """F1: so that the author of a client finds the mistake."""
    request = {
        "path": "/orders/1",
        "query": b"a=1&b=2",
        "headers": [(b"if-match", b"1")],
        "body": b"a=1&b=2",
        "content_type": FORM,
    }
    assert difference(fingerprint(**request), fingerprint(**request | change)) == sentence


def test_if_no_part_differs_it_is_most_likely_the_session():
    """F1: the twelve bytes before decide; a part that differs has another byte in most cases."""
    sentence = "most likely the session cookie differs"
    assert difference(b"a" * 16, b"b" * 12 + b"a" * 4) == sentence


def test_the_digests_of_parts_tell_nothing_without_the_secret():
    """X1: one request that a reader of the store knows does not help with another one."""

    def parts(letter, secret):
        of = {"path": letter, "query": letter.encode(), "headers": [(b"x", letter.encode())]}
        return fingerprint(letter.encode(), TEXT, secret=secret, **of)[12:]

    secrets = [b"secret %d" % number for number in range(20)]
    for place in range(4):
        seen = {
            (parts("a", s)[place], parts("a", s)[place] ^ parts("b", s)[place]) for s in secrets
        }
        assert all(len(set(values)) > 10 for values in zip(*seen, strict=True))


# --- stored fingerprints --------------------------------------------------------------------


GOLDEN = {
    "empty": ({"body": b""}, "9336e08f4feffe87acc235f88b000050"),
    "json": (
        {"body": b'{"b":[1.50,-0,1e2,9007199254740993],"a":"\xc3\xa9\\n"}'},
        "a7f0c652092e99590ba976da8b000020",
    ),
    "repeated": ({"body": b'{"a":1,"a":2.5,"b":null}'}, "e5928a58b6024ddcc3907a8f8b0000d2"),
    "ignored": ({"body": b'{"a":1,"t":2}', "ignore": ["/t"]}, "262901ce34b7f470e7bc654a8b0000e0"),
    "hostile": (
        {"body": b'"\\ud800"', "content_type": b"application/json; charset=UTF-8"},
        "3f0b7c26df3cbb080c70be3b8b0000f5",
    ),
    "form": ({"body": b"a=1&b=x+y%21", "content_type": FORM}, "17fd333e97500dce6bd6c1268b0000af"),
    "empty form": ({"body": b"", "content_type": FORM}, "b46c2a59675a8064ca6ed1168b000081"),
    "multipart": (
        {"body": b"--XyZ\r\n\x01\r\n--XyZ--\r\n", "content_type": MULTIPART},
        "2cf76e407cec8bbb4b8619378b00001c",
    ),
    "text": (
        {"body": b"hello", "content_type": b"text/plain; Charset=UTF-8; a=b"},
        "3deaf1e2a3289cad4ac712a88b0000df",
    ),
    "rest": (
        {
            "body": b"{}",
            "method": "PATCH",
            "path": "/orders/é",
            "query": b"q=1",
            "headers": [(b"X-Tenant", b"a")],
            "secret": digest_key(b"s" * 65),
        },
        "a0a187fadadb6a81441d2cfece279c54",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_fingerprint_is_the_same_on_every_python_version(name):
    """F1: a record written before an upgrade is compared with a retry after it."""
    request, expected = GOLDEN[name]
    assert fingerprint(**request).hex() == expected


# --- the arguments of a guarded function ----------------------------------------------------


@dataclasses.dataclass
class Order:
    number: int
    lines: list[str]


class Colour(Enum):
    RED = 1
    BLUE = 2


class Model:
    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return self.fields


class Session:
    """Equal only to itself."""


DIFFERENT = [
    (1,),
    (1.5,),
    ("1",),
    (True,),
    (None,),
    ((1, 2),),
    ({"a": 1},),
    (Decimal("1.10"),),
    (Decimal("1.1"),),
    (UUID(int=1),),
    (UUID(int=2),),
    (timedelta(1),),
    (timedelta(2),),
    (date(2026, 1, 1),),
    (date(2026, 1, 2),),
    (datetime(2026, 1, 1, tzinfo=UTC),),
    (datetime(2026, 1, 1, 1, tzinfo=UTC),),
    (time(1, 2),),
    (time(1, 3),),
    (1j,),
    (2j,),
    (b"1",),
    (b"2",),
    (bytearray(b"1"),),
    (bytearray(b"2"),),
    ({1, 2},),
    ({1, 3},),
    (frozenset({1}),),
    (frozenset({2}),),
    (["1"],),
    (Colour.RED,),
    (Colour.BLUE,),
    (Order(1, ["coat"]),),
    (Order(2, ["coat"]),),
    (Model(a=1),),
    (Model(a=2),),
    (1, 2),
    (),
]


def of_call(*args, **kwargs):
    return fingerprint_of_call(args, kwargs)


def test_arguments_are_compared_by_value():
    """F1."""
    assert len({of_call(*args) for args in DIFFERENT}) == len(DIFFERENT)
    for args in DIFFERENT:
        assert of_call(*args) == of_call(*copy.deepcopy(args))


def test_the_order_of_names_and_of_members_of_a_set_does_not_matter():
    """F1."""
    assert of_call(a=1, b=2) == of_call(b=2, a=1) != of_call(a=2, b=1)
    assert of_call({"a", "b", "c"}) == of_call({"c", "b", "a"})
    assert of_call({1: 1, "a": 2}) == of_call({"a": 2, 1: 1})


def test_an_object_that_is_equal_only_to_itself_is_left_out():
    """F1: a session; the retry brings another one."""
    assert of_call(Session(), 1) == of_call(Session(), 1) != of_call(Session(), 2)


def test_a_class_is_not_an_instance_of_itself():
    """F1."""
    assert of_call(Order) != of_call(Order(1, []))


class Basket:
    """Can be equal to another, and is neither JSON nor a dataclass."""

    __slots__ = ("item", "note")

    def __init__(self, item):
        self.item = item

    def __eq__(self, other):
        return self.item == other.item

    __hash__ = None


def test_an_object_that_can_be_equal_to_another_is_compared():
    """F1."""
    assert of_call(Basket("a")) == of_call(Basket("a")) != of_call(Basket("b"))


ODD = [
    {1: "a", "b": [None, 1.5, True]},
    {1: "b", "b": [None, 1.5, True]},
    {1: "a", "b": [None, 2.5, True]},
    {(1, "x"): {b"k": 1}},
    {(1, "x"): {b"k": 2}},
    {(1, "y"): {b"k": 1}},
    {b"k": {Colour.RED, "a"}},
    {b"k": {Colour.BLUE, "a"}},
    {b"k": Order(1, ["coat"])},
    {b"k": Order(2, ["coat"])},
    10**5_000,
    10**5_000 + 1,
]


def test_arguments_beyond_json_are_compared_as_well():
    """F1."""
    assert len({of_call(odd, 1) for odd in ODD}) == len(ODD)
    for odd in ODD:
        assert of_call(odd) == of_call(copy.deepcopy(odd))
    assert len(of_call("\ud800")) == 16


def test_a_cycle_is_compared_except_for_what_it_repeats():
    """F1."""
    one, other = [1], [2]
    for cycle in (one, other):
        cycle.extend((cycle, cycle))
    assert of_call(one) != of_call(other)


def test_what_is_nested_too_deep_is_left_out():
    """F1."""

    def deep(number):
        nested = [number]
        for _ in range(100_000):
            nested = [nested]
        return nested

    assert of_call(deep(1), 1) != of_call(deep(1), 2)


def test_a_session_makes_another_request():
    """S4: another for each session, request and secret."""
    one, other = fingerprint(b"1"), fingerprint(b"2")
    made = {
        with_session(*parts)
        for parts in (
            (one, b"ada", b""),
            (one, b"eve", b""),
            (other, b"ada", b""),
            (one, b"ada", b"s"),
        )
    }
    assert len(made | {one, other}) == 6
    assert {len(one) for one in made} == {16}
