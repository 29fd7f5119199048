"""Is it the same request: JSON by value, forms by field, all else byte by byte."""

import json
import sys
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from operator import itemgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.core import fingerprint as fingerprint_module
from coatcheck.core.fingerprint import (
    FORM_FIELDS_MAX,
    PARSED_BYTES_MAX,
    fingerprint_of,
    parse_pointer,
)
from coatcheck.core.json_codec import DEPTH_MAX, DIGITS_MAX, canonical_json

JSON = b"application/json"
FORM = b"application/x-www-form-urlencoded"
MULTIPART = b"multipart/form-data; boundary=XyZ"
TEXT = b"text/plain"


def fingerprint(body=b"", content_type=JSON, *, ignore=(), **others):
    request = {"method": "POST", "path": "/orders", "query": b"", **others}
    pointers = tuple(map(parse_pointer, ignore))
    return fingerprint_of(body=body, content_type=content_type, ignore=pointers, **request)


def same(one, other, content_type=JSON, **others):
    one, other = (b.encode() if isinstance(b, str) else b for b in (one, other))
    return fingerprint(one, content_type, **others) == fingerprint(other, content_type, **others)


def is_compared_by_value(body):
    """White space around a JSON value means nothing, unless the body is compared as bytes."""
    return same(body, body + b" ")


# ------------------------------------------------------------------------------ JSON by value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2}', '{"b":2,"a":1}'),
        ('{"a":1}', ' {\n\t"a" : 1\r\n} '),
        ('"A"', r'"\u0041"'),
        ('"é/\\n"', r'"\u00E9\/\u000a"'),
        ('"😀"', r'"\ud83d\uDE00"'),
        ('{"\\u0061":1}', '{"a":1}'),
        ("1", "1.0"),
        ("1", "1e0"),
        ("1", "10e-1"),
        ("1", "0.1E+1"),
        ("100", "1e2"),
        ("-1.50", "-15E-1"),
        ("0.001", "1e-3"),
        ("0", "-0"),
        ("0", "-0.0"),
        ("0", "0e999999999"),
        ("1e99", "1" + "0" * 99),
        ("1e200", "10.0e199"),
        ('{"b":0,"a":1,"a":2}', '{"a":1,"b":0,"a":2}'),
    ],
)
def test_the_same_json_in_another_spelling_is_the_same_request(one, other):
    """F2, S-22: member order, white space, escapes and spellings of a number do not matter."""
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("9007199254740993", "9007199254740992"),
        ("100000000000000000.01", "100000000000000000.02"),
        ("0.1", "0.10000000000000001"),
        ("1e400", "1e401"),
        ("-1e400", "1e400"),
        ("1e-400", "0"),
        ("1e999999999999999999999", "1e999999999999999999998"),
        ("1.5", "-1.5"),
        ("1.5", "15"),
        ("1", '"1"'),
        ("1", "true"),
        ("0", "false"),
        ("true", '"true"'),
        ("null", '"null"'),
        ("null", "0"),
        ('{"a":null}', "{}"),
        ("[]", "{}"),
        ("[]", "[[]]"),
        ("[]", "[null]"),
        ('""', "null"),
        ("[1,2]", "[2,1]"),
        ("[12]", "[1,2]"),
        ('"\u00e9"', '"e\u0301"'),  # NFC and NFD
        ('"a"', '"A"'),
        ('"a"', '"a "'),
        ('{"a":1}', '{"A":1}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":1,"a":2}', '{"a":1}'),
        ('{"a":1,"a":2}', '{"a":2,"a":1}'),
        ('{"a":1,"a":1}', '{"a":1}'),
        ('{"a":1,"a":2}', '{"a":[1,2]}'),
        ('{"a":1,"a":2}', '{"a":["Infinity",1,2]}'),
        ("1.5", '["NaN",15,-1]'),
        ("1.5", "[15,-1]"),
        ('{"a":15,"a":-1}', '{"a":1.5}'),
    ],
)
def test_different_values_never_collide(one, other):
    """F1, F2, S-20, S-23: exact numbers, types, order, normal forms, repeated members."""
    assert is_compared_by_value(one.encode())
    assert is_compared_by_value(other.encode())
    assert not same(one, other)


def exact(body):
    """An independent opinion of a JSON text: exact fractions, repeated members kept in order."""

    def number(token):
        mantissa, _, exponent = token.lower().partition("e")
        value, power = Fraction(mantissa), int(exponent or 0)  # an exponent may be astronomical
        while value.denominator > 1:
            value, power = value * 10, power - 1
        while value and value.numerator % 10 == 0:
            value, power = value / 10, power + 1
        return ("number", value, power if value else 0)

    def members(pairs):
        return ("object", sorted(pairs, key=itemgetter(0)))

    return json.loads(
        body,
        parse_int=number,
        parse_float=number,
        parse_constant=pytest.fail,
        object_pairs_hook=members,
    )


space = st.sampled_from(["", "", " ", "\n\t"])
tokens = st.from_regex(r"-?(0|[1-9][0-9]?)(\.[0-9]{1,2})?([eE][+-]?[0-9])?", fullmatch=True)
letters = st.sampled_from(["a", "b", r"\u0061", r"\u00e9", "é", r"\n", "1"])
strings = st.lists(letters, max_size=2).map(lambda found: '"' + "".join(found) + '"')


def spaced(brackets, items):
    opening, closing = brackets
    return st.builds(
        lambda found, s: f"{opening}{s}{f'{s},'.join(found)}{closing}{s}", items, space
    )


documents = st.recursive(
    st.one_of(tokens, strings, st.sampled_from(["null", "true", "false"])),
    lambda inner: st.one_of(
        spaced("[]", st.lists(inner, max_size=3)),
        spaced("{}", st.lists(st.builds("{}:{}".format, strings, inner), max_size=3)),
    ),
    max_leaves=6,
)


@given(documents, documents)
def test_documents_are_equal_exactly_when_their_values_are(one, other):
    """F2, S-22, S-23: against exact fractions, in both directions."""
    assert same(one, other) == (exact(one) == exact(other))


@given(tokens, tokens)
@example("1e9", "1000000000.0")
def test_numbers_are_equal_exactly_when_their_values_are(one, other):
    """F2, S-23."""
    assert same(one, other) == (Fraction(one) == Fraction(other))


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.tuples(st.integers(-(10**30), 10**30), st.integers(-40, 40)),  # digits, power of ten
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text("abé\x00", max_size=2), inner)
    ),
    max_leaves=10,
)


def spelled(value, draw):
    """*value* as JSON in one of its many spellings."""
    gap = draw(space)
    if isinstance(value, tuple):
        digits, power = value
        shift = draw(st.integers(0, 5)) if digits else 0
        letter = draw(st.sampled_from(["e", "E", "e+" if power >= shift else "e"]))
        return f"{digits}{'0' * shift}{draw(st.sampled_from(['', '.0']))}{letter}{power - shift}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    if isinstance(value, list):
        return f"[{gap}{f'{gap},'.join(spelled(item, draw) for item in value)}]{gap}"
    if isinstance(value, dict):
        members = draw(st.permutations(list(value.items())))
        pairs = [f"{spelled(n, draw)}{gap}:{spelled(v, draw)}" for n, v in members]
        return f"{{{gap}{f',{gap}'.join(pairs)}}}"
    return json.dumps(value)


@given(st.data(), values)
def test_one_value_has_one_fingerprint_in_all_its_spellings(data, value):
    """F2, S-22: a client that serialises its retry anew is understood."""
    one, other = (spelled(value, data.draw) for _ in range(2))
    assert is_compared_by_value(one.encode())
    assert same(one, other)


# ---------------------------------------------------------------------------- JSON as a weapon


def nested(depth):
    return b"[" * depth + b"]" * depth


HOSTILE = [
    nested(200_000),
    b"[" * 200_000,
    b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    nested(DEPTH_MAX + 1),
    b"[" * 70 + b'"' + b"]" * 70 + b'"',  # the closing brackets are only a string
    b"1" * 5_000,
    b"1" * (DIGITS_MAX + 1),
    b"1." + b"1" * 5_000,
    b"1e" + b"1" * 5_000,
    b'"\\ud800"',
    b'{"\\udc00":1}',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b"\xef\xbb\xbf{}",
    '{"a":1}'.encode("utf-16"),
    '{"a":1}'.encode("utf-32-le"),
    b"NaN",
    b"[Infinity]",
    b"-Infinity",
    b"01",
    b"1.",
    b".5",
    b"+1",
    b"{} {}",
    b"[1,]",
    b"{'a':1}",
    b'"a\nb"',
    b'"',
    b'"' + b'\\"' * 100_000,
    b"\\" * 100_000,
    b'"' * 100_001,
    b"\x00",
    b"   ",
    b"}" * 100 + b"{" * 100,
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_json_is_compared_byte_by_byte(body):
    """F2: deep, huge, broken or not Unicode: never an error, never taken for something else."""
    assert canonical_json(body) is None
    assert fingerprint(body) == fingerprint(body)
    assert fingerprint(body) != fingerprint(body + b" ")
    assert fingerprint(body) != fingerprint(body[:-1] + b"x")


@pytest.mark.parametrize(
    "body",
    [
        nested(DEPTH_MAX),
        b"[" + b",".join([nested(DEPTH_MAX - 1)] * 50) + b"]",
        b"[" + b",".join([b'{"a":[1]}'] * 500) + b"]",
        b'["' + b"[" * 500 + b'"]',
        rb'["\\\"' + b"{" * 500 + rb'\\"]',
        b'"' + b"1" * 5_000 + b'"',
        b"9" * DIGITS_MAX,
        b"[" + b",".join([b"9" * DIGITS_MAX] * 50) + b"]",
        b"9" * DIGITS_MAX + b"." + b"9" * DIGITS_MAX + b"e-" + b"9" * DIGITS_MAX,
        b'"' + b"12345678901234567890-" * 50 + b'"',
    ],
    ids=range(10),
)
def test_large_but_honest_json_is_compared_by_value(body):
    """F2: brackets and digits count where they nest and where they are one number."""
    assert is_compared_by_value(body)


def test_the_limits_are_where_they_were_in_the_last_release():
    """F2: moving one would make a retry across the upgrade another request."""
    assert is_compared_by_value(nested(64))
    assert not is_compared_by_value(nested(65))
    assert is_compared_by_value(b"1" * 100)
    assert not is_compared_by_value(b"1" * 101)
    assert same(b"1e99", b"1" + b"0" * 99)
    assert not same(b"1e100", b"1" + b"0" * 100)
    assert is_compared_by_value(b'"' + b"a" * (2**18 - 3) + b'"')
    assert not is_compared_by_value(b'"' + b"a" * (2**18 - 2) + b'"')
    for part in (b"{}", b"0.5", b"1e1", b"1E1"):
        assert is_compared_by_value(b"[%b]" % b",".join([part] * 10_000))
        assert not is_compared_by_value(b"[%b]" % b",".join([part] * 10_001))
    assert is_compared_by_value(b'"%b"' % (b"e.{" * 10_001))
    assert same(b"%41&" * 999, b"A&" * 999, FORM)
    assert not same(b"%41&" * 1_000, b"A&" * 1_000, FORM)
    assert fingerprint(b"", b"X" * 1_024) == fingerprint(b"", b"x" * 1_024)
    assert fingerprint(b"", b"X" * 1_025) != fingerprint(b"", b"x" * 1_025)


@contextmanager
def interpreter_limits(*, recursion, digits):
    before = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(recursion)
    sys.set_int_max_str_digits(digits)
    try:
        yield
    finally:
        sys.setrecursionlimit(before[0])
        sys.set_int_max_str_digits(before[1])


def deep_in_the_stack(frames, call):
    return call() if frames == 0 else deep_in_the_stack(frames - 1, call)


@pytest.mark.parametrize("digits", [640, 4_300, 0])
@pytest.mark.parametrize("recursion", [1_000, 100_000])
@pytest.mark.parametrize("frames", [0, 500])
def test_how_a_body_is_read_depends_on_its_bytes_alone(digits, recursion, frames):
    """F2: a retry may meet another stack, another server or other interpreter settings."""
    bodies = [*HOSTILE, nested(DEPTH_MAX), b'{"a":' * 64 + b"1.5" + b"}" * 64, b"9" * DIGITS_MAX]
    expected = [fingerprint(body) for body in bodies]
    with interpreter_limits(recursion=recursion, digits=digits):
        found = deep_in_the_stack(frames, lambda: [fingerprint(body) for body in bodies])
    assert found == expected


SHARDS = [b"[", b"]", b"{", b"}", b'"', b"\\", b":", b",", b"1", b"e", b".", b"-", b"\\u", b"d800",
          b"\xff", b"\x00", b" ", b"NaN", b"&", b"=", b"%", b"+", b"%4", b"\r\n", b"--XyZ", b"\x01",
          b"\x02", b"a" * 50, b"1" * 99, b"[" * 63]  # fmt: skip
anything = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(SHARDS)).map(b"".join))
content_types = st.one_of(
    st.sampled_from([JSON, FORM, MULTIPART, TEXT, b"", b"application/problem+json; a=b"]),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda rest: b"multipart/form-data;" + rest),
)


@given(anything, content_types, st.sampled_from([(), ("/a",), ("/0", "/a/1")]))
def test_no_bytes_whatsoever_raise(body, content_type, ignore):
    """F2: a body is judged before anything else looks at it."""
    assert len(fingerprint(body, content_type, ignore=ignore)) == 16


@given(anything, anything, st.sampled_from([JSON, FORM, MULTIPART, TEXT]))
def test_bodies_with_one_fingerprint_mean_the_same(one, other, content_type):
    """F1: equal only as bytes or, where both can be read, as JSON or as a form."""
    if same(one, other, content_type) and one != other:
        assert content_type in (JSON, FORM)
        if content_type == JSON:
            assert exact(one) == exact(other)


# --------------------------------------------------------------------------- the other parts


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
def test_no_part_lends_characters_to_the_next(one, other):
    """F1: two requests are equal only part by part."""

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


def test_what_is_read_in_two_ways_is_never_equal():
    """F1, S-28: a JSON text is not the bytes that happen to spell it canonically."""
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
def test_the_same_content_type_in_another_spelling_is_the_same(one, other):
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


def test_json_that_cannot_be_read_keeps_all_of_its_content_type():
    """F2: what another decoder would make of the bytes may hang on the charset."""
    utf_16, utf_32 = (b"application/json; charset=utf-%d" % bits for bits in (16, 32))
    assert fingerprint(b"\xff\xfe", utf_16) != fingerprint(b"\xff\xfe", utf_32)
    assert fingerprint(b"1", utf_16) == fingerprint(b"1", utf_32)


# ------------------------------------------------------------------------------ what is ignored


@pytest.mark.parametrize(
    ("ignore", "one", "other"),
    [
        (["/t"], '{"a":1,"t":5}', '{"a":1,"t":6}'),
        (["/t"], '{"a":1,"t":5}', '{"a":1}'),
        (["/t"], '{"a":1,"t":{"x":[]}}', '{"a":1,"t":null}'),
        (["/m/t"], '{"m":{"t":5,"a":1}}', '{"m":{"a":1}}'),
        (["/m/t"], '{"m":[1]}', '{ "m":[1]}'),
        (["/t"], '{"t":1,"t":2,"a":1}', '{"a":1}'),
        (["/t"], '{"t":1,"t":2,"a":1}', '{"a":1,"t":7}'),
        (["/m/t"], '{"m":{"t":1},"m":{"t":2,"a":1}}', '{"m":{},"m":{"a":1}}'),
        (["/0"], "[1,2]", "[9,2]"),
        (["/1"], "[1]", "[1,2]"),
        (["/0", "/1"], "[1,2,3]", "[8,9,3]"),
        (["/1", "/0"], "[1,2,3]", "[8,9,3]"),
        (["/0", "/0"], "[1,2,3]", "[8,2,3]"),
        (["/2", "/10"], "[0,1,2,3,4,5,6,7,8,9,10]", "[0,1,7,3,4,5,6,7,8,9,7]"),
        (["/0", "/1/t"], '[1,{"t":1}]', '[2,{"t":2}]'),
        (["/1", "/1/t"], '[1,{"t":1},{"t":3}]', '[1,2,{"t":3}]'),
        (["/1/t", "/0"], '[1,{"t":1},{"t":3}]', '[2,{"t":2},{"t":3}]'),
        (["/a~1b", "/c~0d"], '{"a/b":1,"c~d":1,"e":1}', '{"e":1}'),
        (["/~01"], '{"~1":1}', "{}"),
        (["/"], '{"":1,"a":1}', '{"a":1}'),
        (["/0"], '{"0":1,"a":1}', '{"a":1}'),
        (["/é"], '{"é":1}', r'{"\u00e9":2}'),
    ],
)
def test_ignored_members_may_differ_between_retries(ignore, one, other):
    """F3: a timestamp, a signature; each pointer means the place in the body as it was sent."""
    assert same(one, other, ignore=ignore)
    assert exact(one) == exact(other) or not same(one, other)


@pytest.mark.parametrize(
    ("ignore", "one", "other"),
    [
        (["/t"], '{"a":1,"t":5}', '{"a":2,"t":5}'),
        (["/t"], '{"m":{"t":1}}', '{"m":{"t":2}}'),
        (["/m/t"], '{"m":{"t":1},"t":1}', '{"m":{"t":1},"t":2}'),
        (["/m/t/x"], '{"m":{"t":1}}', '{"m":{"t":2}}'),
        (["/x/t"], '{"m":{"t":1}}', '{"m":{"t":2}}'),
        (["/1/t"], '[{"t":1}]', '[{"t":2}]'),
        (["/0"], "[1,2]", "[1,3]"),
        (["/0"], "[1,2]", "[1,2,3]"),
        (["/0", "/0"], "[1,2,3]", "[1,9,3]"),
        (["/1", "/1/t"], '[1,{"t":1},{"t":3}]', '[1,{"t":1},{"t":4}]'),
        (["/00"], "[1]", "[2]"),
        (["/-"], "[1]", "[2]"),
        (["/-1"], "[1]", "[2]"),
        (["/9999999999999"], "[1]", "[2]"),
        (["/a"], "[1]", "[2]"),
        (["/a"], "1", "2"),
        (["/0"], "1.5", "2.5"),
        (["/1"], "1.5", "2.5"),
        (["/a/1"], '{"a":1.5}', '{"a":2.5}'),
        (["/a/1"], '{"a":1,"a":2}', '{"a":3,"a":2}'),
        (["/t"], '"t"', '"u"'),
    ],
)
def test_only_what_is_pointed_at_is_ignored(ignore, one, other):
    """F3, F1: everything else is compared as before."""
    assert not same(one, other, ignore=ignore)


def test_ignoring_changes_nothing_where_there_is_nothing_to_ignore():
    """F3: a policy can gain a pointer while records of yesterday still stand."""
    assert fingerprint(b'{"a":1}', ignore=["/t"]) == fingerprint(b'{"a":1}')


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", 'the pointer "" is the whole body; point to a member, like "/sent_at"'),
        ("sent_at", """the pointer 'sent_at' does not begin with "/"; write '/sent_at'"""),
        ("#/a", """the pointer '#/a' does not begin with "/"; write '/a'"""),
        ("/a~", """the pointer '/a~' has a lone "~"; write "~0" for it"""),
        ("/a~2b", """the pointer '/a~2b' has a lone "~"; write "~0" for it"""),
    ],
)
def test_a_pointer_that_points_nowhere_is_refused_when_the_policy_is_made(text, complaint):
    """F3."""
    with pytest.raises(ValueError, match="the pointer") as caught:
        parse_pointer(text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/", ("",)),
        ("/a", ("a",)),
        ("/a/0", ("a", "0")),
        ("/a~1b/m~0n", ("a/b", "m~n")),
        ("/~01", ("~1",)),
        ("//", ("", "")),
    ],
)
def test_a_pointer_is_read_as_rfc_6901_says(text, names):
    """F3."""
    assert parse_pointer(text) == names


# --------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a=1&b=2", "%61=%31&b=%32"),
        ("a=x+y", "a=x%20y"),
        ("a=%c3%a9", "a=%C3%A9"),
        ("a=%C3%A9", "a=é"),
        ("a", "a="),
        ("a=1&&b=2&", "a=1&b=2"),
        ("a=b=c", "a=b%3dc"),
    ],
)
def test_a_form_is_compared_by_its_decoded_fields(one, other):
    """F2: how a character is percent-encoded does not matter."""
    assert same(one, other, FORM)
    assert not same(one, other, TEXT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a=1&b=2", "b=2&a=1"),
        ("a=1&a=2", "a=2&a=1"),
        ("a=1&a=1", "a=1"),
        ("a=1", "a=2"),
        ("a=1%26b=2", "a=1&b=2"),
        ("a%3D1", "a=1"),
        ("a=%2B", "a=+"),
        ("a=%", "a=%25"),
        ("a=%4", "a=%254"),
        ("a=%zz&b=%41", "a=%zz&b=A"),  # garbled: compared as bytes
        ("", "a"),
    ],
)
def test_different_forms_are_different_requests(one, other):
    """F1, F2: order and repetition count; a stray percent sign is compared as it is."""
    assert not same(one, other, FORM)


def test_a_form_with_too_many_fields_is_compared_as_bytes():
    """F2, X2."""
    fields = [b"a=%41"] * FORM_FIELDS_MAX
    assert same(b"&".join(fields), b"&".join([*fields[1:], b"a=A"]), FORM)
    fields.append(b"a=%41")
    assert not same(b"&".join(fields), b"&".join([*fields[1:], b"a=A"]), FORM)


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
def test_the_same_parts_with_a_fresh_boundary_are_the_same_form(one, other):
    """F2: and other parts are another form, whatever looks like a boundary inside of them."""
    first, second = multipart(b"=_7d1f;92", one), multipart(b"104e", other)
    assert (fingerprint(*first) == fingerprint(*second)) == (one == other)
    # Where a part contains another form's boundary, equal forms may differ, never the reverse.
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
    """F2: what is not a boundary by RFC 2046 may not be put in the place of another."""
    first, second = (
        fingerprint(b"--%b--\r\n" % boundary, content_type.replace(b"BOUNDARY", boundary))
        for boundary in (one, other)
    )
    assert first != second


def test_other_parameters_of_a_multipart_type_are_compared():
    """F1: only the boundary is the client's to choose afresh."""
    body = b"--XyZ--\r\n"
    assert fingerprint(body, MULTIPART) != fingerprint(body, MULTIPART + b"; type=a")


# ------------------------------------------------------------------------ bodies in pieces


def pieces(body, cuts):
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


@given(anything, st.lists(st.integers(0, 300)), content_types)
@example(b"--XyZ--XyZ--", [3, 7, 8], MULTIPART)
@example(b"", [], FORM)
@example(b"-" * 9, [2, 4], b"multipart/x; boundary=-")
@example(b'{"a":1}', [3], JSON)
def test_a_body_in_pieces_is_the_same_body(body, cuts, content_type):
    """F2: spooled or in memory, however it came over the wire, and read only once."""
    assert fingerprint(iter(pieces(body, cuts)), content_type) == fingerprint(body, content_type)


@pytest.mark.parametrize(
    ("one", "other", "content_type"),
    [(b' "%b"', b'"%b" ', JSON), (b"a=%%41&x=%b", b"%%61=A&x=%b", FORM)],
)
def test_a_body_too_large_to_parse_is_compared_byte_by_byte(one, other, content_type):
    """F2, X2: from one byte over the limit on, in memory as well as spooled."""
    filling = b"x" * (PARSED_BYTES_MAX - len(one % b""))
    assert len(one % filling) == len(other % filling) == PARSED_BYTES_MAX
    for longer in (filling, filling + b"x"):
        assert same(one % longer, other % longer, content_type) == (longer is filling)
        body = one % longer
        chunks = (body[start : start + 65_536] for start in range(0, len(body), 65_536))
        assert fingerprint(chunks, content_type) == fingerprint(body, content_type)


@pytest.mark.parametrize("secret", [b"", b"s" * 64, b"s" * 65])
def test_a_secret_of_any_length_counts_however_a_body_is_cut(secret):
    """F1, S1."""
    whole = fingerprint(b"one two", TEXT, secret=secret)
    assert fingerprint(iter([b"one", b" two"]), TEXT, secret=secret) == whole
    assert fingerprint(iter([b"one", b" two"]), TEXT, secret=secret + b"s") != whole


# ------------------------------------------------------------------------------- what is remembered


def test_only_small_retries_without_included_headers_are_remembered():
    """X2, S1: what is kept in memory is bounded, and no cookie is part of it."""
    fingerprint_module._remembered.cache_clear()
    fingerprint(b'{"a":1}')
    fingerprint(b'{"a":1}', headers=[(b"cookie", b"session=secret")], is_retry=True)
    fingerprint(b"x" * 2_048, TEXT, is_retry=True)
    fingerprint(b"", path="/" + "x" * 2_048, is_retry=True)
    fingerprint(b"", query=b"x" * 2_048, is_retry=True)
    assert fingerprint_module._remembered.cache_info().currsize == 0
    first = fingerprint(b'{"a":1}')
    assert [fingerprint(b'{"a":1}', is_retry=True) for _ in range(2)] == [first, first]
    hits, misses, most, _ = fingerprint_module._remembered.cache_info()
    assert (hits, misses, most) == (1, 1, 1_024)


# ----------------------------------------------------------------------------------- for ever


GOLDEN = {
    "empty": ({"body": b""}, "3a7ac6b46bf1fc7010aca98a690b7c3f"),
    "json": (
        {"body": b'{"b":[1.50,-0,1e2,9007199254740993],"a":"\xc3\xa9\\n"}'},
        "2dcf4c4d416a526b708f9e3ae7f5f4f4",
    ),
    "repeated": ({"body": b'{"a":1,"a":2.5,"b":null}'}, "6fca8c1d6b0928450e667becafa08c91"),
    "ignored": ({"body": b'{"a":1,"t":2}', "ignore": ["/t"]}, "926b8dc27f45239be956bef7afd34df0"),
    "hostile": (
        {"body": b'"\\ud800"', "content_type": b"application/json; charset=UTF-8"},
        "8e15400b99981a5f4b0eb438b1f9176d",
    ),
    "form": ({"body": b"a=1&b=x+y%21", "content_type": FORM}, "c7f6a20317de127cdbbcf0d50450db91"),
    "empty form": ({"body": b"", "content_type": FORM}, "7e9eb94f16bab4e089617301a47276af"),
    "multipart": (
        {"body": b"--XyZ\r\n\x01\r\n--XyZ--\r\n", "content_type": MULTIPART},
        "09385e1effd0826a347153c49bfa417c",
    ),
    "text": (
        {"body": b"hello", "content_type": b"text/plain; Charset=UTF-8; a=b"},
        "7bc022bf4bb2bf5a79aff21e9d5c1ca9",
    ),
    "rest": (
        {
            "body": b"{}",
            "method": "PATCH",
            "path": "/orders/é",
            "query": b"q=1",
            "headers": [(b"X-Tenant", b"a")],
            "secret": b"s" * 65,
        },
        "178c855830194f85735cf98bb1496b70",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_fingerprint_is_the_same_on_every_python_version(name):
    """F1: a record written before an upgrade is compared with a retry after it."""
    request, expected = GOLDEN[name]
    assert fingerprint(**request).hex() == expected


@pytest.mark.parametrize("part", ["path", "query", "content_type", "body"])
def test_nothing_long_is_remembered(part: str):
    """X2: whichever part of the request is long."""
    sent = {"path": "/", "query": b"", "content_type": b"text/plain", "body": b""}
    long = {**sent, part: "x" * 3_000 if part == "path" else b"x" * 3_000}
    memories = (fingerprint_module._remembered, fingerprint_module._remembered_head)
    for memory in memories:
        memory.cache_clear()
    for _ in range(2):
        fingerprint_of(method="POST", is_retry=True, **long)
    keys = sum(memory.cache_info().currsize for memory in memories)
    assert keys == (1 if part in ("query", "body") else 0)  # the head, where that is short
