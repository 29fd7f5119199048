"""JSON by value: one spelling for every JSON value, so that equal bodies are equal bytes.

Part of the third step; `fingerprint.py` is its only user. Member order, white space and escapes do
not matter. Numbers are compared exactly and never become floats: 1, 1.0 and 10e-1 are one number,
9007199254740993 and 9007199254740992 are two. Members of the same name are all kept, in order.
Invariant: whether a body is read as JSON depends on its bytes alone. So depth and digits are
checked beforehand, well below what any interpreter limit could refuse; after that, a
RecursionError could only mean that the caller's own stack is full, and it is not caught, because
a fingerprint that depends on the stack would refuse an honest retry.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NewType, NoReturn

from coatcheck.core.json_spelling import speller

# 64: no honest request is deeper, and it needs a tenth of the interpreter's default stack.
DEPTH_MAX = 64

# 100: a 256-bit integer has 78. Far below 640, the least that `sys.set_int_max_str_digits` takes,
# and it bounds how much longer than its spelling (1e99) a number can become.
DIGITS_MAX = 100

# 10 000 objects, fractions and exponents: each is a call into Python, a microsecond or so. What is
# counted are the characters they are written with, so a "true" counts like an exponent.
PARTS_MAX = 10_000

# Where in a JSON body: the names on the way down (RFC 6901). Made by `parse_pointer`.
Pointer = NewType("Pointer", tuple[str, ...])


def canonical_json(body: bytes, ignore: tuple[Pointer, ...] = ()) -> bytes | None:
    """
    The one spelling of the JSON value in *body*, without the members that *ignore* points to.

    None where it has none: it is not JSON, is not Unicode text, or goes over a limit.
    """
    # Small bodies pass here, without a look at what is inside strings and what is not.
    if len(body.translate(None, _NO_DIGITS_NO_BRACKETS)) > DEPTH_MAX and not _is_tame(body):
        return None
    try:
        text = body.decode("utf-8").strip(" \t\n\r")
        value, end = _scan(text, 0)
        if end != len(text):
            return None
        if ignore:
            for pointer in _in_removal_order(ignore):
                _remove(value, pointer)
        return _spelled(value).encode("utf-8")
    except (ValueError, StopIteration):  # not JSON, not UTF-8, a lone surrogate
        return None


_EVERY_BYTE = set(range(256))
_NO_DIGITS_NO_BRACKETS = bytes(_EVERY_BYTE - set(b"0123456789[{"))
_NO_BRACKETS = bytes(_EVERY_BYTE - set(b"[{]}"))
_NO_PARTS = bytes(_EVERY_BYTE - set(b"{.eE"))
_BRACKETS_TO_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * (DIGITS_MAX + 1)


def _is_tame(body: bytes) -> bool:
    """Nothing in *body* is too long, too deep or too often for what may be spent on it."""
    # Without escapes every second piece is outside of strings. Where that is wrong the body is
    # no JSON, and the decoder stops at that place at the latest.
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b'"'.join(pieces[::2])
    if len(outside.translate(None, _NO_PARTS)) > PARTS_MAX:
        return False
    if _TOO_MANY_DIGITS in outside.translate(_DIGITS_TO_ZERO):
        return False
    # An opening bracket is a step down (1), a closing one a step up (-1, which is 255).
    steps = array("b", outside.translate(_BRACKETS_TO_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0) <= DEPTH_MAX


# Two marks that no JSON text can contain: the decoder refuses these words, and real numbers never
# become floats. So what stands behind a mark cannot be imitated by an array in a body.
_NUMBER_MARK = float("nan")
_REPEATED_MARK = float("inf")


class _Repeated(list[object]):
    """All values of one repeated member name, in order, behind their mark."""


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
    whole, _, fraction = token.partition(".")
    if fraction.isdigit() and fraction[-1] != "0":  # 19.99: nearly all that are sent
        return (_NUMBER_MARK, int(whole + fraction), -len(fraction))
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


# What stands behind `JSONDecoder.raw_decode`, which only rewords its errors.
_scan: Callable[[str, int], tuple[object, int]] = json.JSONDecoder(
    object_pairs_hook=_object_of, parse_float=_number_of, parse_constant=_refuse_constant
).scan_once  # type: ignore[attr-defined]  # public, but unknown to typeshed
_spelled = speller(sort_keys=True, ensure_ascii=False)


def parse_pointer(text: str) -> Pointer:
    """The pointer that *text* spells; ValueError with a sentence for whoever wrote the policy."""
    if not text:
        raise ValueError('the pointer "" is the whole body; point to a member, like "/sent_at"')
    if not text.startswith("/"):
        meant = "/" + text.lstrip("#/")
        raise ValueError(f'the pointer {text!r} does not begin with "/"; write {meant!r}')
    if re.search("~(?![01])", text):
        raise ValueError(f'the pointer {text!r} has a lone "~"; write "~0" for it')
    names = text[1:].split("/")
    return Pointer(tuple(name.replace("~1", "/").replace("~0", "~") for name in names))


@lru_cache(maxsize=256)  # 256: one for each policy in use, and then some
def _in_removal_order(ignore: tuple[Pointer, ...]) -> tuple[Pointer, ...]:
    """
    *ignore* without repeats, from the back of every array to its front.

    A pointer means the place in the body as it was sent; taking out an element moves only what
    is behind it, and that has been dealt with by then.
    """
    return tuple(
        sorted(set(ignore), key=lambda names: [(len(name), name) for name in names], reverse=True)
    )


def _remove(value: object, pointer: Pointer) -> None:
    """Take out of *value* what *pointer* points to, if it is there."""
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
    """The value called *name* in *node*; several where that name is repeated."""
    if isinstance(node, dict) and name in node:
        member = node[name]
        return member[1:] if isinstance(member, _Repeated) else [member]
    if isinstance(node, list) and _is_index(name, node):
        return [node[int(name)]]
    return []


_index = re.compile("0|[1-9][0-9]{0,8}").fullmatch


def _is_index(name: str, elements: list[object]) -> bool:
    return _index(name) is not None and int(name) < len(elements)
