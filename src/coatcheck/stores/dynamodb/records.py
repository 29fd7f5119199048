"""How a record becomes a DynamoDB item, and the expressions for conditions and scans.

An attribute has the name of its field, so the AWS console shows what a record holds. Fields that
are None or empty are left out. Large blobs are compressed if that makes them smaller, under another
name, because DynamoDB bills writes by the kilobyte and refuses items over 400 kB.

Invariant: `record_of(item_of(record)) == record`, whatever it holds. Only a response that does not
fit is left out; a retry then gets 409 result-unavailable.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.key import reference_of
from coatcheck.core.record import RUNNING, Record, State, Swap
from coatcheck.stores.contract import Query, conditions_of
from coatcheck.stores.registry import ITEM_BYTES_MAX

Item: TypeAlias = dict[str, dict[str, Any]]

# The time to live: DynamoDB deletes the item some time after this second.
EXPIRY_ATTRIBUTE = "expires_s"

# Up to a kilobyte a write costs one unit in any case.
_COMPRESSED_BYTES_MIN = 1_024
# 1: takes a third of the time of the default 6, and nearly the same size for JSON and HTML.
_COMPRESSION_LEVEL = 1
_COMPRESSED = "_zlib"
# A number takes at most 21 bytes: 38 digits in pairs, an exponent and a sign.
_NUMBER_BYTES_MAX = 21

_NUMBERS = (
    *("version", "state", "attempt", "created_ms", "lease_until_ms"),
    *("window_until_ms", "expires_ms", "nonce"),
)
_TEXTS = ("label", "scope", "key")
_BLOBS = ("progress", "response")
# Expressions name attributes by placeholders, because AWS adds reserved words now and then.
_NAMES = re.compile(r"#(\w+)")


def item_of(record: Record) -> Item:
    """
    Return the item for *record*, without its response if that does not fit.

    Raises `ValueError` if it is too large even then.
    """
    item: Item = {name: {"N": str(getattr(record, name))} for name in _NUMBERS}
    item["id"] = {"B": record.id}
    item[EXPIRY_ATTRIBUTE] = {"N": str(_expires_s(record))}
    if record.fingerprint:
        item["fingerprint"] = {"B": record.fingerprint}
    item.update({name: _encode_text(text) for name in _TEXTS if (text := getattr(record, name))})
    for name in _BLOBS:
        _put_blob(item, name, getattr(record, name))
    if size_of(item) > ITEM_BYTES_MAX:
        for name in ("response", "response" + _COMPRESSED):
            item.pop(name, None)
        if (size := size_of(item)) > ITEM_BYTES_MAX:
            raise ValueError(
                f"operation {reference_of(record.id)} takes {size:,} bytes without a response, and "
                "DynamoDB's limit is 400 kB; note less in its steps"
            )
    return item


def has_response(item: Item) -> bool:
    """Return whether *item* has a response."""
    return "response" in item or "response" + _COMPRESSED in item


def size_of(item: Item) -> int:
    """Return an upper bound of the bytes that DynamoDB counts: names and stored values."""
    return sum(len(name) + _value_bytes(value) for name, value in item.items())


def _value_bytes(value: dict[str, Any]) -> int:
    if "N" in value:
        return _NUMBER_BYTES_MAX
    return len(value["B"]) if "B" in value else len(value["S"].encode())


def _expires_s(record: Record) -> int:
    """Return the first whole second in which `is_retention_over` is true."""
    return -(-max(record.expires_ms, record.lease_until_ms, record.version + 1) // 1_000)


def _encode_text(text: str) -> dict[str, Any]:
    """Return a string value, or bytes if *text* is not valid Unicode (a path may hold any)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"B": text.encode("utf-8", "surrogatepass")}
    return {"S": text}


def _put_blob(item: Item, name: str, blob: bytes | None) -> None:
    if blob is None:
        return
    if len(blob) >= _COMPRESSED_BYTES_MIN:
        compressed = zlib.compress(blob, _COMPRESSION_LEVEL)
        if len(compressed) < len(blob):
            item[name + _COMPRESSED] = {"B": compressed}
            return
    item[name] = {"B": blob}


class UnreadableItem(ValueError):
    """The item is not a record, or a newer release has written it."""


def record_of(item: Item) -> Record:
    """Return the record in *item*."""
    try:
        return _record_of(item)
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        id = item["id"]["B"].hex()
        raise UnreadableItem(f"item {id} is not a record that this release can read") from error


class Heading(NamedTuple):
    """What a scan reads of a record."""

    id: bytes
    created_ms: int


def heading_of(item: Item) -> Heading:
    """Return the heading of the record in *item*; raise `UnreadableItem` if it is not a record."""
    id = item["id"]["B"]
    try:
        return Heading(id, int(item["created_ms"]["N"]))
    except (KeyError, ValueError) as error:
        raise UnreadableItem(f"item {id.hex()} is not a record of coatcheck") from error


def _record_of(item: Item) -> Record:
    fields: dict[str, Any] = {name: int(item[name]["N"]) for name in _NUMBERS}
    fields["state"] = State(fields["state"])
    fields |= {name: _text(item, name) for name in _TEXTS}
    fields |= {name: _blob(item, name) for name in _BLOBS}
    fingerprint = item["fingerprint"]["B"] if "fingerprint" in item else b""
    return Record(id=item["id"]["B"], fingerprint=fingerprint, **fields)


def _text(item: Item, name: str) -> str:
    value = item.get(name)
    if value is None:
        return ""
    text: str = value["S"] if "S" in value else value["B"].decode("utf-8", "surrogatepass")
    return text


def _blob(item: Item, name: str) -> bytes | None:
    if name in item:
        blob: bytes = item[name]["B"]
        return blob
    compressed = item.get(name + _COMPRESSED)
    return None if compressed is None else zlib.decompress(compressed["B"])


def condition_of(swap: Swap) -> dict[str, Any]:
    """Return the parameters that make a write depend on the expected version."""
    if swap.expected == 0:
        return {
            "ConditionExpression": "attribute_not_exists(#id)",
            "ExpressionAttributeNames": {"#id": "id"},
        }
    return {
        "ConditionExpression": "#version = :expected",
        "ExpressionAttributeNames": {"#version": "version"},
        "ExpressionAttributeValues": {":expected": {"N": str(swap.expected)}},
    }


def scan_of(query: Query) -> dict[str, Any]:
    """
    Return the parameters of a scan for the headings of records that match *query*.

    DynamoDB checks all conditions but those about ids, which the caller checks.
    """
    filters = list(_filters(query))
    scan: dict[str, Any] = {"ProjectionExpression": "#id, #created_ms"}
    if filters:
        scan["FilterExpression"] = " and ".join(text for text, _ in filters)
    values = {name: value for _, used in filters for name, value in used.items()}
    if values:
        scan["ExpressionAttributeValues"] = values
    names = _NAMES.findall(" ".join(scan[part] for part in scan if part.endswith("Expression")))
    scan["ExpressionAttributeNames"] = {f"#{name}": name for name in names}
    return scan


def _filters(query: Query) -> Iterator[tuple[str, Item]]:
    for number, (field, operator, value) in enumerate(conditions_of(query)):
        if value == "":
            yield f"attribute_not_exists(#{field})", {}
        else:
            stored = _encode_text(value) if isinstance(value, str) else {"N": str(value)}
            yield f"#{field} {operator} :{number}", {f":{number}": stored}
    if query.expired_at_ms is not None:
        values = {":now": {"N": str(query.expired_at_ms)}, ":running": {"N": str(RUNNING)}}
        yield "#expires_ms <= :now and #version < :now", values
        yield "(#state <> :running or #lease_until_ms <= :now)", values
