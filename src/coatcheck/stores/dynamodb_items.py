"""Items of the DynamoDB store: how a record becomes one and comes back, and the expressions for it.

Between `dynamodb.py`, which says when, and the table. An attribute has the name of its field, so
that the AWS console shows what a record holds; what is None or empty is left out. Blobs that gain
by it are deflated under a name that says so, because DynamoDB bills writes by the kilobyte and
refuses items over 400 kB.

Invariant: `record_of` of what `item_of` made is the same record, whatever it holds; only a response
that does not fit is left out, and a retry is then told that it was not kept.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from coatcheck.core.key import reference_of
from coatcheck.core.record import RUNNING, Record, State, Swap
from coatcheck.stores.contract import Query
from coatcheck.stores.declared import ITEM_BYTES_MAX

Item: TypeAlias = dict[str, dict[str, Any]]

# What DynamoDB itself looks at, to delete the item some time after this second.
EXPIRY_ATTRIBUTE = "expires_s"

# Below a kilobyte a write costs one unit anyhow.
_DEFLATED_BYTES_MIN = 1_024
# 1: a third of the time of the usual 6, and nearly the same size for JSON and HTML.
_DEFLATE_LEVEL = 1
_DEFLATED = "_zlib"
# A number takes at most 21 bytes: 38 digits in pairs, an exponent and a sign.
_NUMBER_BYTES_MAX = 21

_NUMBERS = (
    *("version", "state", "attempt", "created_ms", "lease_until_ms"),
    *("window_until_ms", "expires_ms", "nonce"),
)
_TEXTS = ("label", "scope", "key")
_BLOBS = ("progress", "response")
# All names are written so, because some are reserved words, and those that are become more.
_NAMES = re.compile(r"#(\w+)")


def item_of(record: Record, *, compact: bool) -> Item:
    """The item that keeps *record*, without its response if that does not fit."""
    item: Item = {name: {"N": str(getattr(record, name))} for name in _NUMBERS}
    item["id"] = {"B": record.id}
    item[EXPIRY_ATTRIBUTE] = {"N": str(_expires_s(record))}
    if record.fingerprint:
        item["fingerprint"] = {"B": record.fingerprint}
    if not compact:
        item.update({name: _packed(text) for name in _TEXTS if (text := getattr(record, name))})
    for name in _BLOBS:
        _put_blob(item, name, getattr(record, name))
    if size_of(item) <= ITEM_BYTES_MAX:
        return item
    return without_response(item)


def without_response(item: Item) -> Item:
    """*item* without its response; where it is too large even so, nothing can be done."""
    small = {name: value for name, value in item.items() if name.partition("_")[0] != "response"}
    if small == item or (size := size_of(small)) > ITEM_BYTES_MAX:
        reference = reference_of(item["id"]["B"])
        message = f"{reference} takes {size_of(item):,} bytes without a response"
        raise ValueError(f"{message}, and DynamoDB keeps 400 kB: note less in its steps")
    assert size <= ITEM_BYTES_MAX
    return small


def keeps_response(item: Item) -> bool:
    """*item* has a response."""
    return "response" in item or "response" + _DEFLATED in item


def size_of(item: Item) -> int:
    """At most how many bytes DynamoDB counts: names, and values as they are stored."""
    return sum(len(name) + _value_bytes(value) for name, value in item.items())


def _value_bytes(value: dict[str, Any]) -> int:
    if "N" in value:
        return _NUMBER_BYTES_MAX
    return len(value["B"]) if "B" in value else len(value["S"].encode())


def _expires_s(record: Record) -> int:
    """The first whole second in which `is_retention_over`: no live lease, no version in use."""
    return -(-max(record.expires_ms, record.lease_until_ms, record.version + 1) // 1_000)


def _packed(text: str) -> dict[str, Any]:
    """A text, or where it is not proper Unicode (a path may hold any bytes) its bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"B": text.encode("utf-8", "surrogatepass")}
    return {"S": text}


def _put_blob(item: Item, name: str, blob: bytes | None) -> None:
    if blob is None:
        return
    if len(blob) >= _DEFLATED_BYTES_MIN:
        deflated = zlib.compress(blob, _DEFLATE_LEVEL)
        if len(deflated) < len(blob):
            item[name + _DEFLATED] = {"B": deflated}
            return
    item[name] = {"B": blob}


class UnreadableItem(ValueError):
    """What this release has not written, and cannot read."""


def record_of(item: Item) -> Record:
    """The record that *item* keeps."""
    try:
        return _record_of(item)
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        id = item["id"]["B"].hex()
        raise UnreadableItem(f"{id} is not a record that this release can read") from error


def version_of(item: Item) -> int:
    """The version of what *item* keeps; 0 where it is no record."""
    try:
        return int(item["version"]["N"])
    except (KeyError, ValueError):
        return 0


def _record_of(item: Item) -> Record:
    numbers = {name: int(item[name]["N"]) for name in _NUMBERS}
    return Record(
        id=item["id"]["B"],
        version=numbers["version"],
        state=State(numbers["state"]),
        attempt=numbers["attempt"],
        fingerprint=item["fingerprint"]["B"] if "fingerprint" in item else b"",
        created_ms=numbers["created_ms"],
        lease_until_ms=numbers["lease_until_ms"],
        window_until_ms=numbers["window_until_ms"],
        expires_ms=numbers["expires_ms"],
        nonce=numbers["nonce"],
        label=_text(item, "label"),
        scope=_text(item, "scope"),
        key=_text(item, "key"),
        progress=_blob(item, "progress"),
        response=_blob(item, "response"),
    )


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
    deflated = item.get(name + _DEFLATED)
    return None if deflated is None else zlib.decompress(deflated["B"])


def condition_of(swap: Swap) -> dict[str, Any]:
    """The parameters that make a write depend on the version that *swap* expects."""
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
    The parameters of a scan that gives the id and version of what *query* asks for.

    Only its conditions about ids are left to the caller; the others spare the network.
    """
    filters = list(_filters(query))
    scan: dict[str, Any] = {"ProjectionExpression": "#id, #version"}
    if filters:
        scan["FilterExpression"] = " and ".join(text for text, _ in filters)
    values = {name: value for _, used in filters for name, value in used.items()}
    if values:
        scan["ExpressionAttributeValues"] = values
    names = _NAMES.findall(" ".join(scan[part] for part in scan if part.endswith("Expression")))
    scan["ExpressionAttributeNames"] = {f"#{name}": name for name in names}
    return scan


def _filters(query: Query) -> Iterator[tuple[str, Item]]:
    for name, text in (("key", query.key), ("label", query.label)):
        if text:
            yield f"#{name} = :{name}", {f":{name}": _packed(text)}
        elif text is not None:
            yield f"attribute_not_exists(#{name})", {}
    if query.state is not None:
        yield "#state = :state", {":state": {"N": str(query.state)}}
    if query.created_before_ms is not None:
        yield "#created_ms < :before", {":before": {"N": str(query.created_before_ms)}}
    if query.expired_at_ms is not None:
        values = {":now": {"N": str(query.expired_at_ms)}, ":running": {"N": str(RUNNING)}}
        yield "#expires_ms <= :now and #version < :now", values
        yield "(#state <> :running or #lease_until_ms <= :now)", values
