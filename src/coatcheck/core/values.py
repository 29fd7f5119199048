"""Values: how the results of guarded functions are stored, so that they come back as they were.

A record stores JSON or bytes. The return annotation of a function tells what else a result is:
`codec_of` reads the annotation once and returns the codec that turns such a result into JSON and
back, equal and of the same type. An annotation that cannot be stored is refused there, before the
function runs.

Invariant: a value that would come back as another one is refused when it is encoded.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Union
from uuid import UUID

from coatcheck.errors import Misconfigured, Unreadable

T = TypeVar("T")


class Codec(Protocol[T]):
    """Turns the results of a function into what a record stores, and back."""

    def encode(self, value: T, /) -> object:
        """*value* as a JSON value or bytes; raises an error if it cannot be stored."""
        ...

    def decode(self, stored: Any, /) -> T:  # noqa: ANN401 - what `encode` returned
        """The value that `encode` turned into *stored*."""
        ...


class NotStorable(Exception):
    """A value cannot be stored; the text names its type, and where it is."""


def codec_for(kind: type[T]) -> Codec[T]:
    """
    The codec for values of *kind*, as a return annotation would choose it.

    For `engine.attempt(…, codec=codec_for(Order))`, which has no function to read it from.
    """
    return codec_of(kind) or _PLAIN_CODEC


def check_codec(codec: object) -> None:
    """Refuse what cannot be a codec."""
    if isinstance(codec, type) or not (hasattr(codec, "encode") and hasattr(codec, "decode")):
        raise Misconfigured(
            f"codec= is {codec!r:.80}; it must be an object with encode and decode, such as "
            "codec_for(Order)"
        )


def codec_of(hint: Any) -> Codec[Any] | None:  # noqa: ANN401 - an annotation
    """
    The codec for results annotated with *hint*; None if JSON and bytes are enough.

    Raises `Misconfigured` if such results cannot be stored.
    """
    members = _members(hint)
    if all(member is bytes or _is_plain(member) for member in members):
        return None
    return _ShapeCodec(_Shapes().shape_of(hint))


class _PlainCodec:
    """For values that are JSON or bytes already."""

    def encode(self, value: object) -> object:
        return value

    def decode(self, stored: object) -> object:
        return stored


_PLAIN_CODEC: Any = _PlainCodec()


class _Shape(NamedTuple):
    """How values of one type are stored."""

    name: str  # as in an annotation: list[Order]
    kinds: frozenset[type]  # what JSON it is stored as: `_KINDS`
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _ShapeCodec:
    """The codec for one annotation."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape

    def encode(self, value: object) -> object:
        try:
            return self._shape.encode(value)
        except NotStorable:
            raise
        except Exception as error:  # its text may hold the value, and messages reach logs
            raise NotStorable(f"{self._shape.name}: {type(error).__name__}") from error

    def decode(self, stored: object) -> object:
        try:
            return self._shape.decode(stored)
        except Exception as error:
            raise Unreadable(
                f"the stored result is no {self._shape.name}: {type(error).__name__}"
            ) from error


# --- annotations ------------------------------------------------------------------------------

_NULL, _TEXT, _NUMBER, _ARRAY, _OBJECT = types.NoneType, str, float, list, dict
_ALL_KINDS = frozenset((_NULL, _TEXT, _NUMBER, _ARRAY, _OBJECT))
_KINDS: Mapping[Any, Any] = {
    _NULL: _NULL,
    str: _TEXT,
    bool: _NUMBER,
    int: _NUMBER,
    float: _NUMBER,
    list: _ARRAY,
    dict: _OBJECT,
}

# The concrete type that stands for an abstract one.
_CONCRETE: Mapping[Any, type] = {
    **dict.fromkeys((abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable), list),
    **dict.fromkeys((abc.Mapping, abc.MutableMapping), dict),
    **dict.fromkeys((abc.Set, abc.MutableSet), set),
}


def _unwrapped(hint: Any) -> Any:  # noqa: ANN401 - an annotation
    """*hint* without the names that others gave it: `NewType`, `type X = …`, `Annotated`."""
    while True:
        if hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif hasattr(hint, "__metadata__"):
            hint = hint.__origin__
        else:
            return hint


def _members(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - an annotation
    """The members of a union; *hint* alone if it is none."""
    hint = _unwrapped(hint)
    if typing.get_origin(hint) is Literal:
        hint = Union[tuple(type(value) for value in typing.get_args(hint))]  # noqa: UP007 - made here
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _origin(hint: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401 - an annotation
    """The class of *hint*, and what it holds: (list, (int,)) for list[int]."""
    origin = typing.get_origin(hint) or hint
    return _CONCRETE.get(origin, origin), typing.get_args(hint)


def _is_plain(hint: Any, above: tuple[Any, ...] = ()) -> bool:  # noqa: ANN401 - an annotation
    """Values of *hint* are JSON as they are; an alias may hold itself, so *above* are known."""
    if hint in above:
        return True
    above = (*above, hint)
    first, *others = members = _members(hint)
    if others or first is not hint:
        return all(_is_plain(member, above) for member in members)
    origin, held = _origin(hint)
    if origin in (list, dict) or typing.is_typeddict(origin):
        if origin is dict and held and not _is_text(held[0]):
            return False
        inner = _hints_of(origin).values() if typing.is_typeddict(origin) else held
        return all(_is_plain(member, above) for member in inner)
    return origin in (None, types.NoneType, str, int, float, bool) or _is_open(origin)


def _is_text(hint: Any) -> bool:  # noqa: ANN401 - an annotation
    hint = _unwrapped(hint)
    return hint is str or _is_open(hint)


def _is_open(hint: Any) -> bool:  # noqa: ANN401 - an annotation
    """*hint* says nothing about the value."""
    is_named = hint in (Any, object, typing.NoReturn, typing.Never)
    return is_named or isinstance(hint, (TypeVar, typing.ForwardRef))


def _hints_of(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception as error:
        raise Misconfigured(
            f"the annotations of {kind.__name__} cannot be read: {error}; import that name where "
            "Python finds it when the program runs, or give codec="
        ) from error


# --- shapes -----------------------------------------------------------------------------------


class _Shapes:
    """Makes the shape of an annotation, and of all that it holds."""

    def __init__(self) -> None:
        self._known: dict[Any, _Shape] = {}  # classes may hold themselves

    def shape_of(self, hint: Any) -> _Shape:  # noqa: ANN401 - an annotation
        hint, *others = members = _members(hint)
        if others:
            return self._union(members)
        if _is_plain(hint):
            return _plain(hint)
        origin, held = _origin(hint)
        scalar = _SCALARS.get(origin)
        if scalar is not None:
            return scalar
        if origin in (list, set, frozenset):
            return _items(origin, self.shape_of(held[0] if held else Any))
        if origin is tuple:
            return self._tuple(held)
        if origin is dict:
            return _mapping(*(self.shape_of(inner) for inner in held))
        if not isinstance(origin, type):
            raise _refused(str(hint))
        return self._of_class(hint, origin, held)

    def _of_class(self, hint: Any, kind: type, held: tuple[Any, ...]) -> _Shape:  # noqa: ANN401 - an annotation
        if issubclass(kind, Enum):
            return _enum(kind)
        if hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump"):
            return _pydantic(kind)
        if hint in self._known:
            return self._known[hint]
        fields: dict[str, _Shape] = {}  # filled below, because they may lead back here
        if typing.is_typeddict(kind):
            shape = _typed_dict(kind, fields)
        elif dataclasses.is_dataclass(kind):
            shape = _dataclass(kind, fields)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            shape = _named_tuple(kind, fields)
        else:
            raise _refused(kind.__name__)
        if held:  # Page[Item] and Page[Order] may be members of one union
            shape = shape._replace(name=f"{shape.name}[{', '.join(map(_name_of, held))}]")
        self._known[hint] = shape
        variables = dict(zip(getattr(kind, "__parameters__", ()), held, strict=False))
        hints = _hints_of(kind)
        for name in _field_names(kind, hints):
            fields[name] = self.shape_of(_filled(hints.get(name, Any), variables))
        return shape

    def _tuple(self, held: tuple[Any, ...]) -> _Shape:
        if not held or held[-1] is Ellipsis:
            return _items(tuple, self.shape_of(held[0] if held else Any))
        shapes = [self.shape_of(inner) for inner in held if inner != ()]

        def encode(value: Any) -> list[Any]:  # noqa: ANN401 - a result
            _check(value, tuple)
            if len(value) != len(shapes):
                raise NotStorable(f"a tuple of {len(value)}, not of {len(shapes)}")
            return [shape.encode(item) for shape, item in zip(shapes, value, strict=True)]

        def decode(stored: Any) -> tuple[Any, ...]:  # noqa: ANN401 - what is stored
            return tuple(shape.decode(item) for shape, item in zip(shapes, stored, strict=True))

        names = ", ".join(shape.name for shape in shapes)
        return _Shape(f"tuple[{names}]", frozenset((_ARRAY,)), encode, decode)

    def _union(self, members: tuple[Any, ...]) -> _Shape:
        """Stored as its member is; with the member's name beside it if JSON does not tell which."""
        # JSON last, and `Any` at the very end: an enum of texts is a text, too.
        shapes = sorted(
            map(self.shape_of, members),
            key=lambda shape: (shape.decode is _same) + (shape.encode is _same),
        )
        name = " | ".join(shape.name for shape in shapes)
        by_name = {shape.name: shape for shape in shapes}
        if len(by_name) < len(shapes):
            raise _refused(f"{name}, whose members have the same name,")
        is_tagged = sum(len(shape.kinds) for shape in shapes) > len(
            frozenset().union(*(shape.kinds for shape in shapes))
        )

        def encode(value: Any) -> Any:  # noqa: ANN401 - a result
            reasons = []
            for shape in shapes:
                try:
                    stored = shape.encode(value)
                except NotStorable as error:
                    reasons.append(str(error))
                else:
                    return [shape.name, stored] if is_tagged else stored
            raise NotStorable("; ".join(reasons))

        def decode(stored: Any) -> Any:  # noqa: ANN401 - what is stored
            if is_tagged:
                member, content = stored
                return by_name[member].decode(content)
            kind = _KINDS[type(stored)]
            return next(shape for shape in shapes if kind in shape.kinds).decode(stored)

        kinds = frozenset((_ARRAY,)) if is_tagged else frozenset().union(*(s.kinds for s in shapes))
        return _Shape(name, kinds, encode, decode)


def _refused(name: str) -> Misconfigured:
    return Misconfigured(
        f"{name} cannot be stored as the result of a function: return JSON, bytes, a dataclass, a "
        "pydantic model or another type of docs/howto/functions.md, or give codec="
    )


def _name_of(hint: Any) -> str:  # noqa: ANN401 - an annotation
    return str(hint) if typing.get_args(hint) else getattr(hint, "__name__", str(hint))


def _filled(hint: Any, variables: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - an annotation
    """*hint* with the type variables of a generic class filled in."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, Any)
    parameters = getattr(hint, "__parameters__", ())
    if not parameters or isinstance(hint, type):
        return hint
    return hint[tuple(variables.get(parameter, Any) for parameter in parameters)]


def _check(value: object, kind: type) -> None:
    """Refuse a *value* of another type: also a subclass would not come back as it was."""
    if type(value) is not kind:
        raise NotStorable(f"a {type(value).__name__}, where {kind.__name__} is declared")


# --- JSON and the types of the standard library -----------------------------------------------


def _same(stored: T) -> T:
    return stored


def _plain(hint: Any) -> _Shape:  # noqa: ANN401 - an annotation
    """The shape of what is JSON already; JSON itself checks what it holds."""
    origin, _ = _origin(hint)
    if _is_open(origin):
        return _Shape("Any", _ALL_KINDS, _same, _same)
    name = _name_of(hint)
    accepted: Any = (int, float) if origin is float else origin or _NULL
    if typing.is_typeddict(origin):
        accepted = dict

    def encode(value: Any) -> Any:  # noqa: ANN401 - a result
        if not isinstance(value, accepted):
            raise NotStorable(f"a {type(value).__name__}, where {name} is declared")
        return value

    stored_as = _KINDS[dict if typing.is_typeddict(origin) else origin or _NULL]
    return _Shape(name, frozenset((stored_as,)), encode, _same)


def _scalar(
    kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any], stored_as: type = _TEXT
) -> _Shape:
    def encode_checked(value: Any) -> Any:  # noqa: ANN401 - a result
        _check(value, kind)
        return encode(value)

    return _Shape(kind.__name__, frozenset((stored_as,)), encode_checked, decode)


def _moment_text(value: Any) -> str:  # noqa: ANN401 - a datetime or a time
    """ISO 8601, with the name of the time zone as in RFC 9557: …+01:00[Europe/Berlin]."""
    zone = getattr(value.tzinfo, "key", None)  # of zoneinfo
    text = f"{value.isoformat()}[{zone}]" if zone else value.isoformat()
    # The zones of other libraries are stored as their offset, which is not always equal to them.
    if _moment_of(type(value))(text) != value:
        raise NotStorable(
            f"a {type(value).__name__} in the time zone {value.tzinfo!r}: use zoneinfo"
        )
    return str(text)


def _moment_of(kind: Any) -> Callable[[str], Any]:  # noqa: ANN401 - datetime or time
    def decode(text: str) -> Any:  # noqa: ANN401 - a datetime or a time
        iso, _, zone = text.partition("[")
        moment = kind.fromisoformat(iso)
        if not zone:
            return moment
        from zoneinfo import ZoneInfo  # noqa: PLC0415 - it reads files when it is imported

        local = moment.replace(tzinfo=ZoneInfo(zone[:-1]))
        # The hour that comes twice a year: the offset tells which of the two it is.
        return local if local.utcoffset() == moment.utcoffset() else local.replace(fold=1)

    return decode


def _bytes_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


_MICROSECOND = timedelta(microseconds=1)
_SCALARS: Mapping[Any, _Shape] = {
    shape[0]: _scalar(*shape)
    for shape in (
        (datetime, _moment_text, _moment_of(datetime)),
        (time, _moment_text, _moment_of(time)),
        (date, date.isoformat, date.fromisoformat),
        (Decimal, str, Decimal),
        (UUID, str, UUID),
        (bytes, _bytes_text, base64.b64decode),
        (bytearray, _bytes_text, lambda text: bytearray(base64.b64decode(text))),
    )
} | {
    timedelta: _scalar(
        timedelta,
        lambda value: value // _MICROSECOND,
        lambda count: timedelta(microseconds=count),
        _NUMBER,
    )
}


def _enum(kind: Any) -> _Shape:  # noqa: ANN401 - a class
    """By the name of the member; flags, which may be combined, by their value."""
    if issubclass(kind, Flag):
        return _scalar(kind, lambda value: value.value, kind, _NUMBER)
    return _scalar(kind, lambda value: value.name, lambda name: kind[name])


# --- containers -------------------------------------------------------------------------------


def _items(kind: Any, item: _Shape) -> _Shape:  # noqa: ANN401 - list, tuple, set or frozenset
    def encode(value: Any) -> list[Any]:  # noqa: ANN401 - a result
        _check(value, kind)
        return [item.encode(each) for each in value]

    def decode(stored: Any) -> Any:  # noqa: ANN401 - what is stored
        return kind(item.decode(each) for each in stored)

    dots = ", ..." if kind is tuple else ""
    return _Shape(f"{kind.__name__}[{item.name}{dots}]", frozenset((_ARRAY,)), encode, decode)


def _mapping(key: _Shape, value: _Shape) -> _Shape:
    """An object if the keys are text, else a list of pairs."""
    name = f"dict[{key.name}, {value.name}]"

    def encode_pairs(given: Any) -> list[Any]:  # noqa: ANN401 - a result
        _check(given, dict)
        return [[key.encode(each), value.encode(held)] for each, held in given.items()]

    def decode_pairs(stored: Any) -> dict[Any, Any]:  # noqa: ANN401 - what is stored
        return {key.decode(each): value.decode(held) for each, held in stored}

    def decode_object(stored: Any) -> dict[Any, Any]:  # noqa: ANN401 - what is stored
        return {each: value.decode(held) for each, held in stored.items()}

    if key.name != "str":
        return _Shape(name, frozenset((_ARRAY,)), encode_pairs, decode_pairs)
    return _Shape(
        name, frozenset((_OBJECT,)), lambda given: dict(encode_pairs(given)), decode_object
    )


# --- classes with fields ----------------------------------------------------------------------


def _field_names(kind: Any, hints: Mapping[str, Any]) -> list[str]:  # noqa: ANN401 - a class
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", hints))


def _encoded_fields(
    kind: type, fields: Mapping[str, _Shape], held: Mapping[str, Any]
) -> dict[str, Any]:
    encoded = {}
    for name, value in held.items():
        if name not in fields:
            raise NotStorable(f"{kind.__name__} has no {name!r}")
        try:
            encoded[name] = fields[name].encode(value)
        except NotStorable as error:
            raise NotStorable(f"{kind.__name__}.{name}: {error}") from error
    return encoded


def _decoded_fields(fields: Mapping[str, _Shape], stored: Mapping[str, Any]) -> dict[str, Any]:
    """A field that was removed since is left out; one that was added has its default."""
    return {name: shape.decode(stored[name]) for name, shape in fields.items() if name in stored}


def _typed_dict(kind: Any, fields: dict[str, _Shape]) -> _Shape:  # noqa: ANN401 - a class
    def encode(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a result
        _check(value, dict)
        return _encoded_fields(kind, fields, value)

    def decode(stored: Any) -> dict[str, Any]:  # noqa: ANN401 - what is stored
        return _decoded_fields(fields, stored)

    return _Shape(kind.__name__, frozenset((_OBJECT,)), encode, decode)


def _named_tuple(kind: Any, fields: dict[str, _Shape]) -> _Shape:  # noqa: ANN401 - a class
    def encode(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a result
        _check(value, kind)
        return _encoded_fields(kind, fields, value._asdict())

    def decode(stored: Any) -> Any:  # noqa: ANN401 - what is stored
        return kind(**_decoded_fields(fields, stored))

    return _Shape(kind.__name__, frozenset((_OBJECT,)), encode, decode)


def _dataclass(kind: Any, fields: dict[str, _Shape]) -> _Shape:  # noqa: ANN401 - a class
    parameters = inspect.signature(kind).parameters
    names = {field.name for field in dataclasses.fields(kind)}
    for name, parameter in parameters.items():
        if name not in names and parameter.default is parameter.empty:
            raise Misconfigured(
                f"{kind.__name__} is made with {name!r}, which is no field of it, so that it "
                "cannot be made again from what is stored: give codec="
            )

    def encode(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a result
        _check(value, kind)
        return _encoded_fields(kind, fields, {name: getattr(value, name) for name in fields})

    def decode(stored: Any) -> Any:  # noqa: ANN401 - what is stored
        held = _decoded_fields(fields, stored)
        made = kind(**{name: value for name, value in held.items() if name in parameters})
        for name, value in held.items():  # as they were, whatever `__post_init__` does
            object.__setattr__(made, name, value)
        return made

    return _Shape(kind.__name__, frozenset((_OBJECT,)), encode, decode)


def _pydantic(kind: Any) -> _Shape:  # noqa: ANN401 - a class
    """A pydantic model, through its own methods: the package is not imported here."""

    def encode(value: Any) -> Any:  # noqa: ANN401 - a result
        _check(value, kind)
        stored = value.model_dump(mode="json", by_alias=True, round_trip=True)
        if decode(stored) != value:
            raise NotStorable(
                f"a {kind.__name__} that does not come back equal from its own JSON: see its "
                "excluded fields, private attributes and serializers"
            )
        return stored

    def decode(stored: Any) -> Any:  # noqa: ANN401 - what is stored
        return kind.model_validate_json(json.dumps(stored))

    return _Shape(kind.__name__, _ALL_KINDS, encode, decode)
