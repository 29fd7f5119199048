"""Keys in and out of the header, and the references of operations."""

import base64

import http_sf
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.core.key import (
    Malformed,
    format_key,
    parse_key,
    parse_reference,
    prefix_of,
    redacted,
    reference_of,
)

VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
PRINTABLE = " " + VISIBLE
BARE = "".join(sorted(set(VISIBLE) - set('",;')))

keys = st.text(PRINTABLE, min_size=1, max_size=255).filter(str.strip)
ids = st.binary(min_size=16, max_size=16)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"k-1", "k-1"),
        (b'"k-1"', "k-1"),
        (b"3f2a91c0-8d0e-4c7f-9a51-0d6c6a7a2f10", "3f2a91c0-8d0e-4c7f-9a51-0d6c6a7a2f10"),
        (b" \tk-1 \t", "k-1"),
        (b' "k-1" ', "k-1"),
        (b'"k "', "k "),
        (b'" k"', " k"),
        (b'"a, b; c"', "a, b; c"),
        (rb'"a\"b\\c"', r'a"b\c'),
        (rb"a\b", r"a\b"),
        (rb'"a\\b"', r"a\b"),
        (BARE.encode(), BARE),
        (b"k" * 255, "k" * 255),
        (b'"' + rb"\"" * 255 + b'"', '"' * 255),
        # S-06: opaque, whatever they look like
        (b"'_OR_1=1--", "'_OR_1=1--"),
        (b"*", "*"),
        (b"%00", "%00"),
        (b"../", "../"),
        (b"{{7*7}}", "{{7*7}}"),
        (b"%0d%0a", "%0d%0a"),
    ],
)
def test_a_key_is_read_bare_or_quoted(value, key):
    """K1, S-02, S-06: 1 to 255 characters, either spelling, no meaning read into them."""
    assert parse_key([value]) == key


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "the key is empty"),
        (b" \t ", "the key is empty"),
        (b'""', "the key is empty"),
        (b'"  "', "the quoted key is blank"),
        (b"k" * 300, "the key has 300 characters; 255 are allowed"),
        (b'"' + b"k" * 256 + b'"', "the key has 256 characters; 255 are allowed"),
        (b"abcdef\x07", "character 7 of the key is a control character (0x07)"),
        (b'"abcdef\x07"', "character 7 of the key is a control character (0x07)"),
        (b"a\x00", "character 2 of the key is a control character (0x00)"),
        (b"\x7f", "character 1 of the key is a control character (0x7F)"),
        (b"\x80", "character 1 of the key is not ASCII (0x80)"),
        (b"a\tb", "character 2 of the key is a control character (0x09)"),
        (b"caf\xe9", "character 4 of the key is not ASCII (0xE9)"),
        (b'"caf\xc3\xa9"', "character 4 of the key is not ASCII (0xC3)"),
        (b'"abc', "the quoted key has no closing quote"),
        (b'"', "the quoted key has no closing quote"),
        (rb'"abc\"', "the quoted key has no closing quote"),
        (rb'"a\x"', "character 2 of the key is a backslash that escapes no quote and no backslash"),
        (b'"a\\', "character 2 of the key is a backslash that escapes no quote and no backslash"),
        (b'"k";a=1', "the key is followed by parameters, which are not allowed"),
        (b'"k" ; a', "the key is followed by parameters, which are not allowed"),
        (b'"a","b"', "the quoted key is followed by a comma; send one key"),
        (b'"a" "b"', "the quoted key is followed by something else"),
        (b'"a"b', "the quoted key is followed by something else"),
        (b"a,b", "character 2 of the key is a comma: two keys, or one that needs quotes"),
        (
            b"k;a=1",
            (
                "character 2 of the key is a semicolon: parameters are not allowed, "
                "or the key needs quotes"
            ),
        ),
        (b"a b", "character 2 of the key is a space: the key needs quotes"),
        (
            b'a"b',
            (
                "character 2 of the key is a quote; a key that contains quotes is sent in quotes, "
                "with a backslash before each"
            ),
        ),
    ],
)
def test_an_invalid_key_is_refused_with_the_reason(value, reason):
    """K3, S-04: empty, too long, malformed; the sentence says what and where."""
    assert parse_key([value]) == Malformed(reason)


@pytest.mark.parametrize("values", [[], [b"a", b"b"], [b"a", b"a"], [b'"a"', b"a"]])
def test_a_key_must_be_sent_in_exactly_one_header_line(values):
    """K3, S-04: also if both lines are equal."""
    lines = f"the key was sent in {len(values)} header lines; send exactly one"
    assert parse_key(values) == Malformed(lines)


def test_a_policy_can_allow_fewer_characters():
    """K3, S-05: over the limit is refused, never cut off."""
    assert parse_key([b"x" * 36], chars_max=36) == "x" * 36
    assert parse_key([b"x" * 37], chars_max=36) == Malformed(
        "the key has 37 characters; 36 are allowed"
    )
    assert isinstance(parse_key([b"x" * 8192]), Malformed)


@given(st.text(BARE, min_size=1, max_size=255))
def test_both_spellings_of_one_value_are_one_key(key):
    """K1, S-03: otherwise one action would be executed twice."""
    assert parse_key([key.encode()]) == parse_key([format_key(key).encode()]) == key


@given(keys)
@example("k ")
@example('\\"')
def test_a_key_is_read_as_it_was_sent(key):
    """K1: every key survives the header, blanks and quotes in it too."""
    assert parse_key([format_key(key).encode()]) == key


@given(keys, keys)
def test_different_keys_stay_different_on_the_wire(one, other):
    """K1, S-06: compared exactly, upper and lower case and blanks included."""
    assert (format_key(one) == format_key(other)) == (one == other)


@pytest.mark.parametrize("key", ["", "   ", "a\r\nX-Admin: 1", "é", "\ud800", "k" * 256])
def test_a_key_that_every_server_would_refuse_is_not_sent(key):
    """K1: above all, a line break must not begin a new header."""
    with pytest.raises(ValueError, match="cannot be sent as a key: "):
        format_key(key)


def opinion_of_http_sf(value):
    """The string that `http-sf` reads in *value*; None if it reads anything else."""
    try:
        item, parameters = http_sf.parse(value.strip(b" \t"), tltype="item")
    except ValueError:
        return None
    return item if type(item) is str and not parameters else None


# Pieces that make strings which are nearly right, and random bytes for all others.
quoted_values = st.one_of(
    st.lists(
        st.sampled_from([b'"', b"\\", b'\\"', b"\\\\", b"a", b" ", b"\t", b";", b",", b"\xe9"])
    ).map(lambda pieces: b'"' + b"".join(pieces) + b'"'),
    st.binary(max_size=20).map(lambda inner: b'"' + inner + b'"'),
    st.binary(max_size=20).map(lambda inner: b'"' + inner),
    keys.map(lambda key: format_key(key).encode()),
)


@given(quoted_values)
@example(b'"k";a=1')
@example(b'"k";a')
@example(b'"k" ')
@example(b'"a\\\\"')
def test_a_quoted_key_is_read_as_the_standard_says(value):
    """K1, S-02: the same result as an independent RFC 9651 parser."""
    ours, theirs = parse_key([value]), opinion_of_http_sf(value)
    if theirs is None or not theirs.strip(" ") or len(theirs) > 255:
        assert isinstance(ours, Malformed)
    else:
        assert ours == theirs


@given(st.binary(max_size=300))
def test_every_header_is_a_key_or_has_a_reason(value):
    """K3."""
    parsed = parse_key([value])
    assert isinstance(parsed, (str, Malformed))
    if isinstance(parsed, str):
        assert 1 <= len(parsed) <= 255
        assert set(parsed) <= set(PRINTABLE)


@given(st.integers(0, 100_000))
def test_hostile_headers_are_read_in_linear_time(count):
    """X2: nested repeats in a pattern could take minutes."""
    assert isinstance(parse_key([b'"' + b"\\" * count]), Malformed)
    assert isinstance(parse_key([b'"' + b'\\"' * count]), Malformed)


@pytest.mark.parametrize(
    ("key", "shown"),
    [("3f2a91c0-8d0e-4c7f", "3f2a91c0…"), ("order-42", "order-42"), ("order-421", "order-42…")],
)
def test_messages_show_only_the_beginning_of_a_key(key, shown):
    """K3: enough to find it in a log, not enough to use it."""
    assert redacted(key) == shown


# ---------------------------------------------------------------------------------- references


RFC_4648_TO_CROCKFORD = str.maketrans(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
)


@given(ids)
@example(bytes(16))
@example(b"\xff" * 16)
def test_a_reference_is_the_base32_of_the_id(id):
    """K5: the standard library's base32, in Crockford's letters."""
    letters = base64.b32encode(id).decode()[:12].translate(RFC_4648_TO_CROCKFORD)
    assert reference_of(id) == f"{letters[:4]}-{letters[4:8]}-{letters[8:]}"


@given(ids)
def test_a_reference_finds_its_id_again(id):
    """K5: the prefix narrows the scan of the primary key, the reference decides."""
    reference = reference_of(id)
    assert parse_reference(reference) == reference
    assert id.startswith(prefix_of(reference))
    assert len(prefix_of(reference)) == 7


@given(ids, ids)
def test_ids_share_a_reference_only_with_their_first_sixty_bits(one, other):
    """K5."""
    same_bits = one[:7] == other[:7] and one[7] >> 4 == other[7] >> 4
    assert (reference_of(one) == reference_of(other)) == same_bits
    twin = one[:7] + bytes([one[7] ^ 0x0F]) + other[8:]
    assert reference_of(twin) == reference_of(one)
    stranger = one[:7] + bytes([one[7] ^ 0x10]) + one[8:]
    assert reference_of(stranger) != reference_of(one)


@pytest.mark.parametrize(
    "text",
    [
        "7D1F-92AB-104E",
        "7d1f-92ab-104e",
        "7d1f92ab104e",
        " 7D1F 92AB 104E ",
        "\t7D1F-92AB-104E\n",
        "7DIF-92AB-LO4E",
        "7dlf92abio4e",
    ],
)
def test_a_reference_is_read_as_people_type_it(text):
    """K5: lower case, no dashes, I and L for 1, O for 0."""
    assert parse_reference(text) == "7D1F-92AB-104E"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7D1F",
        "7D1F-92AB-104",
        "7D1F-92AB-104E0",
        "UUUU-UUUU-UUUU",
        "7D1F-92AB-104!",
        "7D1F-92AB-1\u01314E",
        "\uff17D1F-92AB-104E",
    ],
)
def test_any_other_text_is_no_reference(text):
    """K5: the command line then looks for a key of that name."""
    assert parse_reference(text) is None
