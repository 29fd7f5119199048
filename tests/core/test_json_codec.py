"""JSON by value: one spelling for each value, exact numbers, hostile bodies, ignored members."""

import json
import sys
from contextlib import contextmanager
from fractions import Fraction
from operator import itemgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.core.json_codec import DEPTH_MAX, DIGITS_MAX, canonical_json, parse_pointer


def canonical(text, ignore=()):
    body = text.encode() if isinstance(text, str) else text
    return canonical_json(body, tuple(map(parse_pointer, ignore)))


def same(one, other, ignore=()):
    """Both are read as JSON, and their values are equal."""
    first, second = canonical(one, ignore), canonical(other, ignore)
    assert first is not None
    assert second is not None
    return first == second


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
def test_spellings_of_one_value_are_equal(one, other):
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
    assert not same(one, other)


def exact(body):
    """The value of a JSON text by another parser: exact fractions, repeated members in order."""

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
def test_all_spellings_of_one_value_are_equal(data, value):
    """F2, S-22: a client may serialise its retry again."""
    one, other = (spelled(value, data.draw) for _ in range(2))
    assert same(one, other)


# --- hostile JSON ---------------------------------------------------------------------------


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
def test_hostile_json_is_not_read(body):
    """F2: deep, huge, broken or not Unicode: never an error."""
    assert canonical_json(body) is None


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
def test_large_but_honest_json_is_read(body):
    """F2: brackets count only where they nest, digits only within one number."""
    assert canonical_json(body) is not None


def test_the_limits_are_those_of_the_last_release():
    """F2: another limit would make a retry across the upgrade another request."""
    within = [nested(64), b"1" * 100, b'"%b"' % (b"e.{" * 10_001)]
    beyond = [nested(65), b"1" * 101]
    for part in (b"{}", b"0.5", b"1e1", b"1E1"):
        within.append(b"[%b]" % b",".join([part] * 10_000))
        beyond.append(b"[%b]" % b",".join([part] * 10_001))
    assert None not in map(canonical_json, within)
    assert set(map(canonical_json, beyond)) == {None}
    assert same(b"1e99", b"1" + b"0" * 99)
    assert canonical(b"1e100") != canonical(b"1" + b"0" * 100)


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


@pytest.mark.parametrize("digits", [640, 0])
@pytest.mark.parametrize(("recursion", "frames"), [(1_000, 500), (100_000, 0)])
def test_how_a_body_is_read_depends_on_its_bytes_alone(digits, recursion, frames):
    """F2: a retry may meet another stack, another server or other interpreter settings."""
    bodies = [*HOSTILE, nested(DEPTH_MAX), b'{"a":' * 64 + b"1.5" + b"}" * 64, b"9" * DIGITS_MAX]
    expected = list(map(canonical_json, bodies))
    with interpreter_limits(recursion=recursion, digits=digits):
        found = deep_in_the_stack(frames, lambda: list(map(canonical_json, bodies)))
    assert found == expected


# --- ignored members ------------------------------------------------------------------------


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
    """F3: a timestamp, a signature; each pointer names a place in the body as it was sent."""
    assert same(one, other, ignore)
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
    """F3, F1."""
    assert not same(one, other, ignore)


def test_a_pointer_to_nothing_changes_nothing():
    """F3: a policy can gain a pointer while records of yesterday are still stored."""
    assert canonical('{"a":1}', ["/t"]) == canonical('{"a":1}')


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
def test_an_invalid_pointer_is_refused_with_what_to_write(text, complaint):
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
