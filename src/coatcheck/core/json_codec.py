"""JSON by value: one spelling for every JSON value, so that equal bodies are equal bytes.

Part of the third step; see `fingerprint.py`. Member order, white space and escapes do not matter.
Numbers are compared exactly and never become floats: 1, 1.0 and 10e-1 are one number,
9007199254740993 and 9007199254740992 are two. All members of a repeated name are kept, in order.

Invariant: whether a body is read as JSON depends on its bytes alone. Depth and digits are checked
before parsing, far below the limits of any interpreter. A RecursionError after that could only mean
that the caller's own stack is full. It is not caught: a fingerprint that depends on the stack would
make an honest retry a different request.
"""

from __future__ import annotations

import json
import re
from array import array
from itertools import accumulate
from typing import NewType, NoReturn

# 64: no honest request is deeper, and parsing it needs a tenth of the default stack.
DEPTH_MAX = 64

# 100: a 256-bit integer has 78. It is far below 640, the least that `sys.set_int_max_str_digits`
# accepts, and it limits how long a short spelling (1e99) can become.
DIGITS_MAX = 100

# 10 000 objects, fractions and exponents: each costs a call of a Python function. The check counts
# the characters that they are written with, so the "e" of "true" counts as an exponent.
PARTS_MAX = 10_000

# A parsed JSON pointer (RFC 6901): the names on the way down. See `parse_pointer`.
Pointer = NewType("Pointer", tuple[str, ...])


def canonical_json(body: bytes, ignore: tuple[Pointer, ...] = ()) -> bytes | None:
    """
    The canonical spelling of the JSON value in *body*, without the members that *ignore* names.

    None if *body* is not JSON, is not UTF-8 or exceeds a limit.
    """
    # A body with few digits and brackets cannot exceed a limit; this is true of most.
    if len(body.translate(None, _NO_DIGITS_NO_BRACKETS)) > DEPTH_MAX and not _is_tame(body):
        return None
    try:
        value = _parse(body.decode("utf-8"))
        if ignore:
            for pointer in _in_removal_order(ignore):
                _remove(value, pointer)
        return _to_json(value).encode("utf-8")
    except ValueError:  # not JSON, not UTF-8, a lone surrogate
        return None


_EVERY_BYTE = set(range(256))
_NO_DIGITS_NO_BRACKETS = bytes(_EVERY_BYTE - set(b"0123456789[{"))
_NO_BRACKETS = bytes(_EVERY_BYTE - set(b"[{]}"))
_NO_PARTS = bytes(_EVERY_BYTE - set(b"{.eE"))
_BRACKETS_TO_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * (DIGITS_MAX + 1)


def _is_tame(body: bytes) -> bool:
    """*body* is within the limits of depth, digits and parts."""
    # Without escapes, every second piece is outside of strings. Where that is not true, the body
    # is not JSON, and the parser stops there.
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b'"'.join(pieces[::2])
    if len(outside.translate(None, _NO_PARTS)) > PARTS_MAX:
        return False
    if _TOO_MANY_DIGITS in outside.translate(_DIGITS_TO_ZERO):
        return False
    # An opening bracket is a step down (1), a closing one a step up (-1, which is 255).
    steps = array("b", outside.translate(_BRACKETS_TO_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0) <= DEPTH_MAX


# Two values that no JSON text contains: the parser refuses NaN and Infinity, and numbers never
# become floats. So no array in a body is equal to a list that begins with one of them.
_NUMBER_MARK = float("nan")
_REPEATED_MARK = float("inf")


class _Repeated(list[object]):
    """All values of one repeated member name, in order, after `_REPEATED_MARK`."""


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    values: dict[str, list[object]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {
        name: found[0] if len(found) == 1 else _Repeated([_REPEATED_MARK, *found])
        for name, found in values.items()
    }


def _number_of(token: str) -> int | tuple[float, int, int]:
    """The exact value of a number with a fraction or an exponent: digits times a power of ten."""
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("-0")
    significant = digits.rstrip("0")
    if not significant:
        return 0
    number = -int(significant) if token[0] == "-" else int(significant)
    power = int(exponent or "0") - len(fraction) + len(digits) - len(significant)
    if power >= 0 and len(significant) + power <= DIGITS_MAX:
        integer: int = number * 10**power  # the same as the integer spelled out
        return integer
    return (_NUMBER_MARK, number, power)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_parse = json.JSONDecoder(
    object_pairs_hook=_object_of, parse_float=_number_of, parse_constant=_refuse_constant
).decode
_to_json = json.JSONEncoder(separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode


def parse_pointer(text: str) -> Pointer:
    """The pointer that *text* spells; raises ValueError with what to write instead."""
    if not text:
        raise ValueError('the pointer "" is the whole body; point to a member, like "/sent_at"')
    if not text.startswith("/"):
        meant = "/" + text.lstrip("#/")
        raise ValueError(f'the pointer {text!r} does not begin with "/"; write {meant!r}')
    if re.search("~(?![01])", text):
        raise ValueError(f'the pointer {text!r} has a lone "~"; write "~0" for it')
    names = text[1:].split("/")
    return Pointer(tuple(name.replace("~1", "/").replace("~0", "~") for name in names))


def _in_removal_order(ignore: tuple[Pointer, ...]) -> tuple[Pointer, ...]:
    """
    *ignore* without repeats, from the end of every array to its beginning.

    A pointer names a place in the body as it was sent. Removing an element moves only the elements
    after it, and those are removed first.
    """
    return tuple(
        sorted(set(ignore), key=lambda names: [(len(name), name) for name in names], reverse=True)
    )


def _remove(value: object, pointer: Pointer) -> None:
    """Remove from *value* what *pointer* points to, if it is there."""
    *parents, last = pointer
    nodes = [value]
    for name in parents:
        nodes = [child for node in nodes for child in _children(node, name)]
    for node in nodes:
        if isinstance(node, dict):
            node.pop(last, None)
        elif isinstance(node, list) and _is_index(last, node):
            del node[int(last)]


def _children(node: object, name: str) -> list[object]:
    """The value called *name* in *node*; several if that name is repeated."""
    if isinstance(node, dict) and name in node:
        member = node[name]
        return member[1:] if isinstance(member, _Repeated) else [member]
    if isinstance(node, list) and _is_index(name, node):
        return [node[int(name)]]
    return []


_index = re.compile("0|[1-9][0-9]{0,8}").fullmatch


def _is_index(name: str, elements: list[object]) -> bool:
    return _index(name) is not None and int(name) < len(elements)
