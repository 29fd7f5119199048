"""One call that is written in two ways is one call, and its annotation tells its result."""

import asyncio
import functools
import gc
import weakref
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from coatcheck.core.signatures import check_result, codec_of_call, read_call
from coatcheck.core.values import codec_for
from coatcheck.errors import Misconfigured


def place(order, count=1, *rest, gift=False, note=None, **more): ...


def place_only(order=1, /, **more): ...


def compared(function, *args, **kwargs):
    return read_call(functools.partial(function, *args, **kwargs))[:2]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((7,), {}, ((7,), {})),
        ((), {"order": 7}, ((7,), {})),
        ((7, 1), {}, ((7,), {})),
        ((7,), {"count": 1, "gift": False}, ((7,), {})),
        ((7, 2), {}, ((7, 2), {})),
        ((7,), {"count": 2}, ((7, 2), {})),
        ((), {"count": 2, "order": 7}, ((7, 2), {})),
        ((7,), {"count": True}, ((7, True), {})),
        ((7, 1, 5), {}, ((7, 1, 5), {})),
        ((7,), {"note": "x"}, ((7,), {"note": "x"})),
        ((7, None), {"note": None}, ((7, None), {})),
        ((7,), {"gift": 0, "other": 5}, ((7,), {"gift": 0, "other": 5})),
    ],
)
def test_arguments_are_compared_as_the_function_gets_them(args, kwargs, expected):
    """F1: by position where that is possible, and without defaults."""
    assert compared(place, *args, **kwargs) == expected


def test_a_name_that_is_no_parameter_is_compared_even_if_it_looks_like_one():
    """F1: its default is that of another argument."""
    assert compared(place_only, order=1) == ((), {"order": 1})


def test_arguments_that_a_function_does_not_take_are_refused():
    """F1: before anything is claimed."""
    with pytest.raises(TypeError, match="missing a required argument: 'order'"):
        compared(place)
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'gift'"):
        compared(place_named, 7)


def place_named(order, *, gift): ...


class Shop:
    """Is equal only to itself."""

    def place(self, order, count=1): ...

    def __call__(self, order): ...


@dataclass
class Branch(Shop):
    name: str


def unfolded(inner, **kwargs):
    """A partial of a partial, which Python does not fold into one because it has attributes."""
    inner.note = "has attributes"
    return functools.partial(inner, **kwargs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Shop().place, ((7,), {})),
        (Shop(), ((7,), {})),
        (Branch("x").place, ((Branch("x"), 7), {})),
        (Branch("x"), ((7,), {})),
        (functools.partial(place, count=1), ((7,), {})),
        (
            unfolded(functools.partial(place, note="x"), gift=True),
            ((7,), {"gift": True, "note": "x"}),
        ),
        (functools.wraps(place)(lambda *args: None), ((7,), {})),
        (str, ((7,), {})),
        (dict, ((7,), {})),
        (print, ((7,), {})),
        ([].append, ((7,), {})),
    ],
)
def test_everything_that_can_be_called_is_compared_by_its_arguments(function, expected):
    """F1."""
    assert compared(function, 7) == expected


def test_a_decorated_function_is_compared_as_it_is_called_and_not_as_it_was_written():
    """F1: the decorator may give the function an argument of its own."""
    wrapped = functools.wraps(place)(lambda *args, **kwargs: place("a session", *args, **kwargs))
    assert compared(wrapped, 7, 1) == ((7, 1), {})
    assert compared(wrapped, 7, gift=False) == ((7,), {"gift": False})


@dataclass
class Item:
    name: str


class Vague:
    """Cannot be stored."""


def codec(function):
    return codec_of_call(functools.partial(function))


def later() -> "Later": ...  # noqa: F821 - defined in a test
def vague() -> Vague: ...
def plain() -> dict[str, int]: ...
def silent(): ...
def one() -> Item: ...
async def one_async() -> "Item": ...
def promised() -> Awaitable[Item]: ...
def to_come() -> Coroutine[Any, Any, Item]: ...
def started() -> asyncio.Task[Item]: ...
def untold() -> asyncio.Future: ...
def typed_only(session: "OnlyForTypeCheckers") -> "Item": ...  # noqa: F821 - as it says


class Maker:
    def make(self) -> Item: ...

    def __call__(self) -> Item: ...


@pytest.mark.parametrize(
    "function",
    [
        *(one, one_async, promised, to_come, started, typed_only, Item, Maker().make, Maker()),
        *(functools.partial(one), functools.wraps(one)(lambda: None)),
    ],
)
def test_the_annotation_of_a_function_tells_what_it_returns(function):
    """R4."""
    assert codec(function).decode({"name": "coat"}) == Item("coat")


@pytest.mark.parametrize("function", [plain, silent, untold, print, dict, functools.partial(plain)])
def test_a_function_that_returns_json_or_does_not_say_needs_no_codec(function):
    """R4."""
    assert codec(function) is None


def test_a_result_that_cannot_be_stored_is_refused_by_the_annotation():
    """R4."""
    for refuse in (codec, lambda function: check_result(function, None)):
        with pytest.raises(Misconfigured, match=r"^the result of vague: Vague cannot be stor"):
            refuse(vague)
    with pytest.raises(Misconfigured, match=r"^codec= is <class .*; it must be an object with enc"):
        check_result(vague, Item)
    given = codec_for(Item)
    check_result(vague, given)
    assert read_call(functools.partial(vague), given)[2] is given


def test_an_annotation_that_is_defined_later_is_read_at_the_first_call(monkeypatch):
    """R4."""
    check_result(later, None)
    with pytest.raises(Misconfigured, match=r"^the result of later: its annotation cannot be r"):
        codec(later)
    monkeypatch.setitem(globals(), "Later", Item)
    assert codec(later).decode({"name": "coat"}) == Item("coat")


def wordy() -> "what was placed": ...  # noqa: F722 - a comment, as older code has it


def test_an_annotation_that_is_no_python_is_refused_at_the_first_call():
    """R4."""
    check_result(wordy, None)
    with pytest.raises(Misconfigured, match=r"its annotation cannot be read: .* or give codec="):
        codec(wordy)


def test_a_function_that_was_made_for_one_call_is_forgotten():
    def made() -> Item: ...

    assert codec(made) is not None
    known = weakref.ref(made)
    del made
    gc.collect()
    assert known() is None
