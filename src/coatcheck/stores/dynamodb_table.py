"""The DynamoDB table: how it is made, what it must look like, what the doctor says about it.

Any number of nodes may make it at once: one succeeds, the others wait with it until it is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.contract import Finding
from coatcheck.stores.dynamodb_faults import MISSING, code_of
from coatcheck.stores.dynamodb_items import EXPIRY_ATTRIBUTE
from coatcheck.stores.dynamodb_line import Line
from coatcheck.stores.migration import HOW

logger = logging.getLogger("coatcheck")

# 60 s: AWS makes a table in five to twenty.
_MADE_S_MAX = 60.0
_LOOK_EVERY_S = 0.5

_KEYS = [{"AttributeName": "id", "KeyType": "HASH"}]
_ATTRIBUTES = [{"AttributeName": "id", "AttributeType": "B"}]
# A table that is changed (its billing, say) serves on.
_SERVING = ("ACTIVE", "UPDATING")


def prepare(line: Line, *, create: bool) -> None:
    """Make the table where it is missing and may be made, and refuse one that is not ours."""
    table = line.place.table
    description = _describe(line)
    is_new = description is None or description["TableStatus"] == "CREATING"
    if description is None:
        if not create:
            raise Misconfigured(
                f"dynamodb: there is no table {table}; check its name, region and account, or {HOW}"
            )
        _create(line)
    if is_new:
        description = _awaited(line)
    assert description is not None
    _refuse_foreign(table, description)
    if is_new and create:
        _enable_expiry(line)
    finding = _about_expiry(line)
    if finding.level != "ok":
        logger.warning(finding.message)


def version_of(line: Line) -> int:
    """1 where our table is there, 0 where none is; there is no other so far."""
    description = _describe(line)
    if description is None:
        return 0
    _refuse_foreign(line.place.table, description)
    return 1


def _describe(line: Line) -> dict[str, Any] | None:
    try:
        description = line.call("describe_table")["Table"]
    except StoreUnavailable as error:
        if code_of(error) == MISSING:
            return None
        raise
    return dict(description)


def _create(line: Line) -> None:
    try:
        line.call(
            "create_table",
            KeySchema=_KEYS,
            AttributeDefinitions=_ATTRIBUTES,
            BillingMode="PAY_PER_REQUEST",
        )
    except StoreUnavailable as error:
        if code_of(error) != "ResourceInUseException":  # somebody else has just made it
            raise


def _awaited(line: Line) -> dict[str, Any]:
    """What the table is like when it serves."""
    deadline_s = time.monotonic() + _MADE_S_MAX
    while True:
        description = _describe(line)
        if description is not None and description["TableStatus"] in _SERVING:
            return description
        if time.monotonic() > deadline_s:
            status = "missing" if description is None else description["TableStatus"]
            message = f"dynamodb table {line.place.table}: still {status} after {_MADE_S_MAX:.0f} s"
            raise StoreUnavailable(message)
        time.sleep(_LOOK_EVERY_S)


def _refuse_foreign(table: str, description: Mapping[str, Any]) -> None:
    if reason := _why_foreign(description):
        raise Misconfigured(f"dynamodb: table {table} is not one of coatcheck's: {reason}")


def _why_foreign(description: Mapping[str, Any]) -> str:
    """What is wrong with the key of the table; empty where nothing is."""
    keys = [(key["AttributeName"], key["KeyType"]) for key in description["KeySchema"]]
    types = {a["AttributeName"]: a["AttributeType"] for a in description["AttributeDefinitions"]}
    if keys == [("id", "HASH")] and types["id"] == "B":
        return ""
    found = ", ".join(f"{name} ({types.get(name)}, {kind})" for name, kind in keys)
    return f"its key is {found}, and ours is id (B, HASH) alone"


def _enable_expiry(line: Line) -> None:
    wanted = {"Enabled": True, "AttributeName": EXPIRY_ATTRIBUTE}
    try:
        line.call("update_time_to_live", TimeToLiveSpecification=wanted)
    except StoreUnavailable as error:
        # Another node was faster. Where something else is wrong, what follows says so.
        if code_of(error) != "ValidationException":
            raise


def findings_about(line: Line) -> Iterator[Finding]:
    """What the doctor sees."""
    description = _describe(line)
    table = line.place.table
    if description is None:
        yield Finding("error", f"table {table} does not exist")
        return
    status = description["TableStatus"]
    yield Finding("ok" if status in _SERVING else "error", f"table {table} is {status}")
    if reason := _why_foreign(description):
        yield Finding("error", f"table {table} is not one of coatcheck's: {reason}")
    yield _about_expiry(line)
    yield _about_billing(description)
    yield from _about_replicas(description)
    yield _about_backups(line)


def _about_expiry(line: Line) -> Finding:
    table = line.place.table
    try:
        answer = line.call("describe_time_to_live")
    except StoreUnavailable as error:
        return Finding("warning", f"whether records expire by themselves is not known: {error}")
    expiry = answer["TimeToLiveDescription"]
    is_on = expiry.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
    if is_on and expiry.get("AttributeName") == EXPIRY_ATTRIBUTE:
        return Finding("ok", f"DynamoDB deletes expired records by itself ({EXPIRY_ATTRIBUTE})")
    message = f"table {table} has no time to live on {EXPIRY_ATTRIBUTE}: it grows for ever, unless"
    return Finding("warning", f"{message} all of it is read again and again to sweep; enable it")


def _about_billing(description: Mapping[str, Any]) -> Finding:
    mode = description.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if mode == "PAY_PER_REQUEST":
        return Finding("ok", "billed on demand")
    units = description.get("ProvisionedThroughput", {}).get("WriteCapacityUnits", 0)
    message = f"provisioned for {units} write units a second: about {units // 2} new keys a second"
    return Finding("warning", f"{message}, and beyond that requests are refused as throttled")


def _about_replicas(description: Mapping[str, Any]) -> Iterator[Finding]:
    is_strong = description.get("MultiRegionConsistency") == "STRONG"
    if description.get("Replicas") and not is_strong:
        yield Finding(
            "warning",
            "a global table that is consistent only in the end: two regions can claim one key at "
            "the same time, and both run; send a caller's retries to one region",
        )


def _about_backups(line: Line) -> Finding:
    """A hint and no warning: what is lost with the table would have expired in a day or so."""
    try:
        answer = line.call("describe_continuous_backups")
    except StoreUnavailable as error:
        return Finding("ok", f"whether there are backups is not known: {error}")
    backups = answer["ContinuousBackupsDescription"].get("PointInTimeRecoveryDescription", {})
    if backups.get("PointInTimeRecoveryStatus") == "ENABLED":
        return Finding("ok", "point-in-time recovery is on")
    return Finding("ok", "point-in-time recovery is off: a table that is deleted is gone")


def clock_ms(asked_ms: int, answered_ms: int, headers: Mapping[str, str]) -> int:
    """
    The server's clock, as well as it can be known.

    The `Date` of an answer has whole seconds. So it is this machine's clock where the two agree,
    as they do where both are set by NTP, and else the nearest moment that the header allows.
    """
    if "date" not in headers:
        return answered_ms
    second_ms = round(parsedate_to_datetime(headers["date"]).timestamp()) * 1_000
    latest_ms = second_ms + 999 + max(0, answered_ms - asked_ms)
    return min(max(answered_ms, second_ms), latest_ms)
