"""F1: a guarded function's arguments are compared by value."""

import copy
import dataclasses
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from uuid import UUID

import pytest

from coatcheck.core.call_fingerprint import fingerprint_of_call


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
    """Something without a value of its own."""


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


def test_different_arguments_have_different_fingerprints():
    assert len({fingerprint_of_call(args, {}) for args in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("args", DIFFERENT, ids=range(len(DIFFERENT)))
def test_equal_arguments_have_equal_fingerprints(args):
    assert fingerprint_of_call(args, {}) == fingerprint_of_call(args, {})


def test_named_arguments_count_and_their_order_does_not():
    one = fingerprint_of_call((), {"a": 1, "b": 2})
    assert one == fingerprint_of_call((), {"b": 2, "a": 1})
    assert one != fingerprint_of_call((), {"a": 2, "b": 1})


def test_an_object_without_a_value_is_left_out():
    assert fingerprint_of_call((Session(), 1), {}) == fingerprint_of_call((Session(), 1), {})
    assert fingerprint_of_call((Session(), 1), {}) != fingerprint_of_call((Session(), 2), {})


def test_the_members_of_a_set_have_no_order():
    assert fingerprint_of_call(({"a", "b", "c"},), {}) == fingerprint_of_call(
        ({"c", "b", "a"},), {}
    )


def test_a_class_is_no_instance_of_itself():
    assert fingerprint_of_call((Order,), {}) != fingerprint_of_call((Order(1, []),), {})


def test_arguments_that_cannot_be_compared_do_not_raise():
    circle = []
    circle.append(circle)
    assert len(fingerprint_of_call((circle,), {})) == 16
    assert len(fingerprint_of_call(({1: 1, "a": 2},), {})) == 16
    assert len(fingerprint_of_call(("\ud800",), {})) == 16


class Basket:
    """Has a value, and is neither JSON nor a dataclass."""

    __slots__ = ("item", "note")

    def __init__(self, item):
        self.item = item

    def __eq__(self, other):
        return self.item == other.item

    __hash__ = None


def test_an_object_that_can_be_equal_to_another_is_compared():
    assert fingerprint_of_call((Basket("a"),), {}) == fingerprint_of_call((Basket("a"),), {})
    assert fingerprint_of_call((Basket("a"),), {}) != fingerprint_of_call((Basket("b"),), {})


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


def test_what_json_alone_cannot_say_is_compared_as_well():
    assert len({fingerprint_of_call((odd, 1), {}) for odd in ODD}) == len(ODD)
    assert all(
        fingerprint_of_call((odd,), {}) == fingerprint_of_call((copy.deepcopy(odd),), {})
        for odd in ODD
    )


def test_the_order_of_members_does_not_matter_where_they_do_not_sort():
    assert fingerprint_of_call(({1: 1, "a": 2},), {}) == fingerprint_of_call(({"a": 2, 1: 1},), {})


def test_a_circle_is_compared_but_for_what_it_repeats():
    one, other = [1], [2]
    for circle in (one, other):
        circle.extend((circle, circle))
    assert fingerprint_of_call((one,), {}) != fingerprint_of_call((other,), {})


def test_what_is_too_deep_ends_somewhere():
    def deep(number):
        nested = [number]
        for _ in range(100_000):
            nested = [nested]
        return nested

    assert fingerprint_of_call((deep(1), 1), {}) != fingerprint_of_call((deep(1), 2), {})
