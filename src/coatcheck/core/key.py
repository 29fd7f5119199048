"""Keys: the `Idempotency-Key` header, and the short references of operations.

First step of the path. Clients send the key bare (`k-1`); the standard wants a structured-field
string (`"k-1"`, RFC 9651 §3.3.3). Both are accepted: refusing one would break honest clients, and
treating them as two keys would execute twice.

Invariant: a key has 1 to 255 printable ASCII characters, is compared exactly, and is never blank.
Both spellings of one value are one key. Anything else is refused with the reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple, NewType

# 255: what Stripe documents and most SDKs assume; longer keys are a client bug, not a need.
KEY_CHARS_MAX = 255

# 8: enough to find a line in a log, too little to use another caller's key.
REDACTED_CHARS = 8

Key = NewType("Key", str)
Reference = NewType("Reference", str)


class Malformed(NamedTuple):
    """A header that holds no valid key; *reason* is a part of the problem's detail."""

    reason: str


# Bare: all visible ASCII except for the three characters with a meaning in headers: " , ;
_bare = re.compile(rb"[!#-+\--:<-~]+").fullmatch
# Quoted: RFC 9651 §3.3.3. The possessive repeats keep it linear for any input.
_quoted = re.compile(rb'"([ !#-\[\]-~]*+(?:\\["\\][ !#-\[\]-~]*+)*+)"').fullmatch
_ESCAPE = re.compile(r"\\(.)")


def parse_key(values: Sequence[bytes], chars_max: int = KEY_CHARS_MAX) -> Key | Malformed:
    """
    The key in the header's field *values*, one for each header line, as on the wire.

    Two lines are refused even if they are equal: proxies join and split lines, so the server would
    have to guess which key was meant. White space around the value is dropped.
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
    """Why *value* is neither a bare nor a quoted key."""
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
    *key* as the structured-field string to send; raises ValueError if it is not a valid key.

    A line break in a key would otherwise begin a new header.
    """
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    parsed = parse_key([quoted.encode("utf-8", "surrogatepass")])
    if isinstance(parsed, Malformed):
        raise ValueError(f"cannot be sent as a key: {parsed.reason}")
    return quoted


def redacted(key: str) -> str:
    """The beginning of *key*, for messages and logs."""
    return key if len(key) <= REDACTED_CHARS else key[:REDACTED_CHARS] + "…"


# Crockford's alphabet has no I, L, O and U, so that a reference can be read out over a telephone.
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# All pairs of digits: every response has a reference, and six lookups are faster than twelve.
_PAIRS = tuple(first + second for first in _CROCKFORD for second in _CROCKFORD)
_TO_PYTHON_BASE32 = str.maketrans(_CROCKFORD, "0123456789ABCDEFGHIJKLMNOPQRSTUV", "-")
_AS_TYPED = str.maketrans("ILO", "110", "- ")
_reference_digits = re.compile("[0-9A-HJKMNP-TV-Z]{12}").fullmatch


# The response, the log, two events and a decision of one request have the same reference. 1 024: as
# many as may run at a time in one process, and more.
@functools.lru_cache(maxsize=1_024)
def reference_of(id: bytes) -> Reference:
    """The first 60 bits of *id* as text, like `7D3F-92AB-1C4E`."""
    bits = int.from_bytes(id[:8], "big") >> 4
    pairs = _PAIRS
    return Reference(
        f"{pairs[bits >> 50]}{pairs[bits >> 40 & 1023]}"
        f"-{pairs[bits >> 30 & 1023]}{pairs[bits >> 20 & 1023]}"
        f"-{pairs[bits >> 10 & 1023]}{pairs[bits & 1023]}"
    )


def parse_reference(text: str) -> Reference | None:
    """
    The reference that a person typed as *text*; None if it is not a reference.

    In either case, with or without dashes and spaces; I, L and O count as 1, 1 and 0.
    """
    if not text.isascii():
        return None
    digits = text.strip().upper().translate(_AS_TYPED)
    if _reference_digits(digits) is None:
        return None
    return Reference(f"{digits[:4]}-{digits[4:8]}-{digits[8:]}")


def prefix_of(reference: Reference) -> bytes:
    """
    The first 7 bytes of every id with this *reference*: 56 of its 60 bits.

    For the range scan of `Query.id_prefix`. Compare `reference_of(record.id)` of each result.
    """
    return (int(reference.translate(_TO_PYTHON_BASE32), 32) >> 4).to_bytes(7, "big")
