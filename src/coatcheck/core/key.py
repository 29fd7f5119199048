"""Keys: the `Idempotency-Key` header, in and out, and the short references people read aloud.

First step of the path. Clients in the wild send the key bare (`k-1`); the standard wants a
structured-field string (`"k-1"`, RFC 9651 §3.3.3). We take both, because refusing either breaks
honest clients, and taking them for two keys would execute twice.
Invariant: a key is 1 to 255 printable ASCII characters, compared exactly, and never blank; both
spellings of one value are one key. What is not a key is refused with the reason, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, NewType

# 255: what Stripe documents and most SDKs assume; longer keys are a client bug, not a need.
KEY_CHARS_MAX = 255

# 8: enough to find a line in a log by eye, too little to use the key of somebody else.
REDACTED_CHARS = 8

Key = NewType("Key", str)
Reference = NewType("Reference", str)


class Malformed(NamedTuple):
    """What was sent is not a key; *reason* is half a sentence for the problem document."""

    reason: str


# Bare: all visible ASCII but the three characters that mean something in a header: " , ;
_bare = re.compile(rb"[!#-+\--:<-~]+").fullmatch
# Quoted: RFC 9651 §3.3.3. The possessive repeats keep it linear for any input.
_quoted = re.compile(rb'"([ !#-\[\]-~]*+(?:\\["\\][ !#-\[\]-~]*+)*+)"').fullmatch
_ESCAPE = re.compile(r"\\(.)")


def parse_key(values: Sequence[bytes], chars_max: int = KEY_CHARS_MAX) -> Key | Malformed:
    """
    The key in the header's field *values*, one for each line it was sent in, as on the wire.

    Two lines are refused even when they are equal: proxies join and split lines, so which of two
    keys was meant is a guess. White space around the value is the transport's and is dropped.
    """
    if len(values) != 1:
        return Malformed(f"the key was sent in {len(values)} header lines; send exactly one")
    value = values[0].strip(b" \t")
    if _bare(value) is not None:
        key = value.decode("ascii")
    elif (quoted := _quoted(value)) is not None:
        key = quoted[1].decode("ascii")
        if "\\" in key:
            key = _ESCAPE.sub(r"\1", key)
        if not key.strip(" "):
            return Malformed("the quoted key is blank" if key else "the key is empty")
    else:
        return Malformed(_fault_of(value))
    if len(key) > chars_max:
        return Malformed(f"the key has {len(key)} characters; {chars_max} are allowed")
    return Key(key)


_unprintable = re.compile(rb"[^ -~]").search
_quoted_part = re.compile(rb'"(?:[^"\\]|\\["\\])*+').match
_BARE_FAULTS = {
    b'"': "a quote; a key that contains quotes is sent in quotes, with a backslash before each",
    b",": "a comma: two keys, or one that needs quotes",
    b";": "a semicolon: parameters are not allowed, or the key needs quotes",
    b" ": "a space: the key needs quotes",
}


def _fault_of(value: bytes) -> str:
    """What is wrong with *value*, which is neither a bare nor a quoted key."""
    if not value:
        return "the key is empty"
    quotes = value.startswith(b'"')
    if (found := _unprintable(value)) is not None:
        byte = found[0][0]
        what = "a control character" if byte <= 0x7F else "not ASCII"
        return f"character {found.start() + 1 - quotes} of the key is {what} (0x{byte:02X})"
    return _fault_of_quoted(value) if quotes else _fault_of_bare(value)


def _fault_of_quoted(value: bytes) -> str:
    part = _quoted_part(value)
    assert part is not None  # it begins with a quote
    end = part.end()
    if end == len(value):
        return "the quoted key has no closing quote"
    if value.startswith(b"\\", end):
        return f"character {end} of the key is a backslash that escapes no quote and no backslash"
    match value[end + 1 :].lstrip(b" \t")[:1]:
        case b";":
            return "the key is followed by parameters, which are not allowed"
        case b",":
            return "the quoted key is followed by a comma; send one key"
        case _:
            return "the quoted key is followed by something else"


def _fault_of_bare(value: bytes) -> str:
    position = next(n for n in range(len(value)) if value[n : n + 1] in _BARE_FAULTS)
    fault = _BARE_FAULTS[value[position : position + 1]]
    return f"character {position + 1} of the key is {fault}"


def format_key(key: str) -> str:
    """
    *key* as the structured-field string to send; ValueError if no server could take it.

    Checked here, because a line break in a key would otherwise become a header of its own.
    """
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    parsed = parse_key([quoted.encode("utf-8", "surrogatepass")])
    if isinstance(parsed, Malformed):
        raise ValueError(f"cannot be sent as a key: {parsed.reason}")
    return quoted


def redacted(key: str) -> str:
    """*key* for messages and logs: its beginning only."""
    return key if len(key) <= REDACTED_CHARS else key[:REDACTED_CHARS] + "…"


# Crockford's alphabet: no I, L, O and U, so that a reference survives a telephone call.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# Two characters at a time: six look-ups make a reference, which every response carries.
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_HEARD = str.maketrans("ILO", "110", "- ")
_TO_PYTHON_BASE32 = str.maketrans(_ALPHABET, "0123456789ABCDEFGHIJKLMNOPQRSTUV", "-")
_reference_digits = re.compile("[0-9A-HJKMNP-TV-Z]{12}").fullmatch


def reference_of(id: bytes) -> Reference:
    """The first 60 bits of *id* for people, like `7D3F-92AB-1C4E`."""
    bits = int.from_bytes(id[:8], "big") >> 4
    pairs = _PAIRS
    return Reference(
        f"{pairs[bits >> 50]}{pairs[bits >> 40 & 1023]}"
        f"-{pairs[bits >> 30 & 1023]}{pairs[bits >> 20 & 1023]}"
        f"-{pairs[bits >> 10 & 1023]}{pairs[bits & 1023]}"
    )


def parse_reference(text: str) -> Reference | None:
    """
    The reference in *text* as a person typed it; None if it is none.

    Either case, with or without dashes and spaces, and I, L and O for the digits they look like.
    """
    if not text.isascii():
        return None
    digits = text.strip().upper().translate(_HEARD)
    if _reference_digits(digits) is None:
        return None
    return Reference(f"{digits[:4]}-{digits[4:8]}-{digits[8:]}")


def prefix_of(reference: Reference) -> bytes:
    """
    The whole bytes that every id with this *reference* begins with: 56 of its 60 bits.

    For the range scan of `Query.id_prefix`; of what it finds, compare `reference_of(record.id)`.
    """
    return (int(reference.translate(_TO_PYTHON_BASE32), 32) >> 4).to_bytes(7, "big")
