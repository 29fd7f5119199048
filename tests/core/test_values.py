"""Results of functions come back equal and of the same type, or are refused."""

import collections
import dataclasses
import enum
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.response import decode_value, encode_value
from coatcheck.core.values import NotStorable, codec_for, codec_of
from coatcheck.errors import Misconfigured, Unreadable

T = TypeVar("T")
BERLIN = ZoneInfo("Europe/Berlin")
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 - it is a result, too


class Size(enum.Enum):
    SMALL = object()  # not JSON
    LARGE = 2


class Colour(enum.StrEnum):
    RED = "red"


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Item:
    name: str
    price: Decimal = Decimal(0)
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    id: UUID
    placed: datetime
    items: list[Item]
    by_size: dict[Size, Item]
    note: str | None = None
    parent: Optional["Order"] = None
    raw: bytes = b""


@dataclasses.dataclass
class Total:
    """Changes what it is given, and computes the rest."""

    cents: int
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.cents += 1
        self.doubled = self.cents * 2
        self.cache = {}


@dataclasses.dataclass
class Page(Generic[T]):
    members: list[T]
    following: T | None = None


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


class Point(NamedTuple):
    x: int
    at: date = date(2026, 1, 1)


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - as old code has them


class Receipt(TypedDict):
    number: int
    total: Decimal
    paid: NotRequired[datetime]


class Plain(TypedDict):
    number: int


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    when: datetime = pydantic.Field(alias="at")
    price: Decimal
    parts: tuple[int, ...] = ()

    @pydantic.computed_field
    @property
    def twice(self) -> Decimal:
        return self.price * 2


class Secretive(pydantic.BaseModel):
    shown: int
    hidden: int = pydantic.Field(default=0, exclude=True)


Number = NewType("Number", UUID)
ID = UUID(int=7)
MODEL = Model(at=datetime(2026, 1, 2, tzinfo=UTC), price=Decimal("1.10"), parts=(1, 2))
ORDER = Order(
    id=ID,
    placed=datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    items=[Item("coat", Decimal("9.90"), {"warm", "dry"}), Item("hat")],
    by_size={Size.SMALL: Item("cap")},
    parent=Order(id=ID, placed=NAIVE, items=[], by_size={}, raw=b"\xff"),
)
TOTAL = Total(1)
TOTAL.cents = 70


def stored(codec, value):
    """*value* as it comes back from a record."""
    return codec.decode(decode_value(encode_value(codec.encode(value))))


def is_same(one, other):
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other) or one != other:
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(is_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict):
        return all(is_same(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return all(is_same(a, b) for a, b in zip(one, other, strict=True))
    return not isinstance(one, datetime) or one.tzinfo == other.tzinfo


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Order, ORDER),
        (list[Item], [Item("a"), Item("b")]),
        (dict[str, Item], {"a": Item("a")}),
        (dict[int, str], {1: "a", 2: "b"}),
        (dict[tuple[int, str], Item | None], {(1, "a"): None, (2, "b"): Item("b")}),
        (Optional[Item], Item("a")),  # noqa: UP045 - the older spelling
        (Item | None, None),
        (Total, TOTAL),
        (Page[Item], Page([Item("a")], Item("b"))),
        (Page, Page([1, "a"])),
        (Box[Item], Box(Item("a"))),
        (Box[Item] | Box[UUID], Box(ID)),
        (Point, Point(1)),
        (Pair, Pair(1, [2])),
        (list[Pair], [Pair(1, "a")]),
        (Receipt, {"number": 1, "total": Decimal("1.50")}),
        (Receipt, {"number": 1, "total": Decimal(1), "paid": NAIVE}),
        (Model, MODEL),
        (list[Model | None], [MODEL, None]),
        (datetime, NAIVE.replace(hour=12, microsecond=7)),
        (datetime, datetime(2026, 1, 1, tzinfo=UTC)),
        (datetime, datetime(2026, 1, 1, tzinfo=timezone(timedelta(minutes=-90)))),
        (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=0)),
        (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)),
        (date, date(2026, 1, 1)),
        (time, time(12, 30, tzinfo=UTC)),
        (time, time(12, 30, tzinfo=BERLIN)),
        (timedelta, timedelta(days=-3, microseconds=1)),
        (Decimal, Decimal("1.10")),
        (UUID, ID),
        (Number, ID),
        (Annotated[UUID, "of an order"], ID),
        (Size, Size.SMALL),
        (Colour, Colour.RED),
        (Rights, Rights.READ | Rights.WRITE),
        (Literal[Colour.RED, "red"], Colour.RED),
        (Literal[Colour.RED, "red"], "red"),
        (str | Colour, Colour.RED),
        (bytearray, bytearray(b"a")),
        (list[bytes], [b"\xff", b""]),
        (tuple, (1, "a")),
        (tuple[()], ()),
        (tuple[int, Decimal], (1, Decimal(2))),
        (tuple[str, ...], ("a", "b")),
        (set[int], {1, 2}),
        (frozenset[date], frozenset({date(2026, 1, 1)})),
        (set, {1, "a"}),
        (AbstractSet[int], {1}),
        (Sequence[UUID], [ID]),
        (Mapping[str, UUID], {"a": ID}),
        (dict[str, list[tuple[int, ...]]], {"a": [(1,)]}),
        (date | datetime, NAIVE),
        (date | datetime, date(2026, 1, 1)),
        (Union[int, str, Decimal], "1"),  # noqa: UP007 - the older spelling
        (int | Decimal, 1),
        (list[int] | tuple[int, ...] | None, (1,)),
        (Item | Receipt, Item("a")),
        (Item | Receipt, {"number": 1, "total": Decimal(1)}),
        (list[int | Item | None], [1, None, Item("a")]),
        (UUID | Any, ID),
        (UUID | Any, [1, None]),
        (list[float | UUID], [1, 2.5, ID]),
        (list[Plain | UUID], [{"number": 1}, ID]),
    ],
)
def test_a_result_comes_back_equal_and_of_the_same_type(hint, value):
    """R4."""
    assert is_same(stored(codec_for(hint), value), value)


@pytest.mark.parametrize(
    "hint",
    [
        *(Any, None, object, str, int, float, bool, list, dict, bytes, bytes | None, T),
        *(list[dict[str, Any]], dict[str, int | None], Sequence[str], Mapping[str, float]),
        *(Literal["a", 1] | None, str | bytes, Plain, NewType("Name", str), dict[Any, int]),
        *(typing.NoReturn, typing.List["Self"], Annotated[int, "cents"]),  # noqa: UP006, F821
    ],
)
def test_what_is_json_or_bytes_needs_no_codec(hint):
    """R4: and is stored as it always was."""
    assert codec_of(hint) is None
    assert stored(codec_for(hint), {"a": [1]}) == {"a": [1]}


class Alias:
    """`type Json = …` of later Python versions; looks like that to us."""

    def __init__(self):
        self.__value__ = list[self] | str


TypeAliasType = type("TypeAliasType", (Alias,), {"__init__": Alias.__init__})


def test_a_named_annotation_may_hold_itself():
    assert codec_of(TypeAliasType()) is None


class Opaque:
    """Nothing is known of it."""


@dataclasses.dataclass
class Signed:
    """Needs what it does not keep."""

    number: int
    secret: dataclasses.InitVar[str]


@dataclasses.dataclass
class Unfinished:
    other: "NotDefinedAnywhere"  # noqa: F821 - the point


@pytest.mark.parametrize(
    ("hint", "sentence"),
    [
        (Opaque, "^Opaque cannot be stored as the result of a function: .* give codec="),
        (list[Opaque], "^Opaque cannot be stored"),
        (Page[Opaque], "^Opaque cannot be stored"),
        (Iterator[int], "^Iterator cannot be stored"),
        (memoryview, "^memoryview cannot be stored"),
        (typing.Self, "^typing.Self cannot be stored"),
        (Signed, "^Signed is made with 'secret', which is no field of it"),
        (Unfinished, "^the annotations of Unfinished cannot be read: .*'NotDefinedAnywhere'"),
        (
            Item | dataclasses.make_dataclass("Item", [("a", int)]),
            "whose members have the same name",
        ),
    ],
)
def test_an_annotation_that_cannot_be_stored_is_refused(hint, sentence):
    """R4: before anything runs."""
    with pytest.raises(Misconfigured, match=sentence):
        codec_of(hint)


class Special(Item):
    """A subclass, which would come back as its base."""


class Zone(tzinfo):
    """A zone of another library, which knows the hour that comes twice."""

    def utcoffset(self, moment):
        return timedelta(hours=2 - moment.fold)

    def dst(self, moment):
        return None

    def tzname(self, moment):
        return "Zone"


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (Item, Special("a"), "a Special, where Item is declared"),
        (Item, {"name": "a"}, "a dict, where Item is declared"),
        (list[Item], (Item("a"),), "a tuple, where list is declared"),
        (list[Item], [1], "a int, where Item is declared"),
        (Item, Item(5), "Item.name: a int, where str is declared"),
        (Order, dataclasses.replace(ORDER, items=[Item("a", 5)]), "Order.items: Item.price: a int"),
        (date, NAIVE, "a datetime, where date is declared"),
        (Receipt, {"number": 1, "more": 2}, "Receipt has no 'more'"),
        (tuple[int, Decimal], (1,), "a tuple of 1, not of 2"),
        (Item | UUID, 5, "a int, where Item is declared; a int, where UUID is declared"),
        (dict[str, Item], {1: Item("a")}, "a int, where str is declared"),
        (Secretive, Secretive(shown=1, hidden=2), "does not come back equal"),
        (datetime, datetime(2026, 1, 1, tzinfo=Zone()), "in the time zone .*: use zoneinfo"),
        (Item | None, Item(typing.cast("Any", None)), "Item.name: a NoneType, where str"),
        (list[Item | Plain], [Plain], "a _TypedDictMeta, where"),
    ],
)
def test_a_result_that_is_not_what_its_annotation_says_is_refused(hint, value, sentence):
    """R4: it would come back as something else."""
    with pytest.raises(NotStorable, match=sentence):
        codec_for(hint).encode(value)


def test_the_text_of_a_users_own_error_is_not_repeated():
    class Broken(Model):
        def model_dump(self, **_):
            raise ZeroDivisionError("no JSON")

    with pytest.raises(NotStorable, match=r"^Broken: ZeroDivisionError$"):
        codec_for(Broken).encode(Broken(at=MODEL.when, price=Decimal(1)))


@pytest.mark.parametrize("stored", [None, 5, "x", [], {"name": "a", "price": "x"}, {}])
def test_what_an_annotation_cannot_read_is_unreadable(stored):
    """R4: for example after the annotation was changed."""
    with pytest.raises(Unreadable, match=r"^the stored result is no Item: "):
        codec_for(Item).decode(stored)


def test_fields_may_be_added_with_a_default_and_removed():
    """R4: by a deployment between the first call and its retry."""
    assert codec_for(Item).decode({"name": "a", "gone": 1}) == Item("a")


def test_what_a_class_makes_beside_its_fields_is_there_again():
    assert stored(codec_for(Total), TOTAL).cache == {}


def test_a_dataclass_is_stored_as_the_json_of_its_fields():
    """R4: operators and other languages can read it."""
    assert json.dumps(codec_for(Item).encode(Item("coat", Decimal("9.90"), {"warm"}))) == (
        '{"name": "coat", "price": "9.90", "tags": ["warm"]}'
    )


# --- any type in any other --------------------------------------------------------------------

KEYS = {
    str: st.text(),
    int: st.integers(),
    bool: st.booleans(),
    date: st.dates(),
    time: st.times(),
    timedelta: st.timedeltas(),
    UUID: st.uuids(),
    Decimal: st.decimals(allow_nan=False),
    bytes: st.binary(),
    Size: st.sampled_from(Size),
    Rights: st.sampled_from([Rights(number) for number in range(4)]),
    datetime: st.datetimes(timezones=st.sampled_from([None, UTC, BERLIN])),
}
LEAVES = KEYS | {
    type(None): st.none(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    Item: st.builds(Item, st.text(), st.decimals(allow_nan=False), st.sets(st.text())),
}


@st.composite
def annotated(draw, depth=3):
    """An annotation, and a strategy for its values."""
    kind = draw(st.sampled_from(["leaf"] * 2 + ["list", "set", "dict", "tuple", "page", "union"]))
    if kind == "leaf" or depth == 0:
        leaf = draw(st.sampled_from(list(LEAVES)))
        return leaf, LEAVES[leaf]
    if kind == "set":
        key = draw(st.sampled_from(list(KEYS)))
        return frozenset[key], st.frozensets(KEYS[key], max_size=3)
    inner, values = draw(annotated(depth - 1))
    if kind == "list":
        return list[inner], st.lists(values, max_size=3)
    if kind == "dict":
        key = draw(st.sampled_from(list(KEYS)))
        return dict[key, inner], st.dictionaries(KEYS[key], values, max_size=3)
    if kind == "page":
        return Page[inner], st.builds(Page, st.lists(values, max_size=3), st.none() | values)
    other, others = draw(annotated(depth - 1))
    if kind == "tuple":
        return tuple[inner, other], st.tuples(values, others)
    return inner | other, values | others


@given(data=st.data())
def test_every_annotated_value_comes_back_as_it_was(data):
    """R4."""
    hint, values = data.draw(annotated())
    value = data.draw(values)
    assert is_same(stored(codec_for(hint), value), value)
