"""The DynamoDB table: creating it, and checking its key, time to live, capacity and regions.

Any number of nodes may create it at the same time: one succeeds, all wait until it is active.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.contract import Finding
from coatcheck.stores.dynamodb.client import DynamoClient
from coatcheck.stores.dynamodb.errors import TABLE_NOT_FOUND, code_of
from coatcheck.stores.dynamodb.records import EXPIRY_ATTRIBUTE
from coatcheck.stores.migration import HOW

logger = logging.getLogger("coatcheck")

# 60 s: AWS takes five to twenty.
_CREATION_S_MAX = 60.0
_POLL_S = 0.5

_KEYS = [{"AttributeName": "id", "KeyType": "HASH"}]
_ATTRIBUTES = [{"AttributeName": "id", "AttributeType": "B"}]
# A table whose settings are being changed stays usable.
USABLE = ("ACTIVE", "UPDATING")


def prepare(client: DynamoClient, *, create: bool) -> None:
    """Create the table if it is missing and *create* allows it; refuse one with another key."""
    table = client.config.table
    description = describe(client)
    is_new = description is None or description["TableStatus"] == "CREATING"
    if description is None:
        if not create:
            raise Misconfigured(
                f"dynamodb: there is no table {table}; check its name, region and account, or {HOW}"
            )
        _create(client)
    if is_new:
        description = _wait_until_usable(client)
    assert description is not None
    _refuse_foreign(table, description)
    if is_new and create:
        _enable_expiry(client)
    finding = expiry_finding(client)
    if finding.level != "ok":
        logger.warning("coatcheck: %s", finding.message)


def version_of(client: DynamoClient) -> int:
    """Return 1 if the table exists, 0 if not; there is only one schema so far."""
    description = describe(client)
    if description is None:
        return 0
    _refuse_foreign(client.config.table, description)
    return 1


def describe(client: DynamoClient) -> dict[str, Any] | None:
    """Return DynamoDB's description of the table; None if there is no such table."""
    try:
        description = client.call("describe_table")["Table"]
    except StoreUnavailable as error:
        if code_of(error) == TABLE_NOT_FOUND:
            return None
        raise
    return dict(description)


def _create(client: DynamoClient) -> None:
    try:
        client.call(
            "create_table",
            KeySchema=_KEYS,
            AttributeDefinitions=_ATTRIBUTES,
            BillingMode="PAY_PER_REQUEST",
        )
    except StoreUnavailable as error:
        if code_of(error) != "ResourceInUseException":  # another node has just created it
            raise


def _wait_until_usable(client: DynamoClient) -> dict[str, Any]:
    deadline_s = time.monotonic() + _CREATION_S_MAX
    while True:
        description = describe(client)
        if description is not None and description["TableStatus"] in USABLE:
            return description
        if time.monotonic() > deadline_s:
            status = "missing" if description is None else description["TableStatus"]
            waited = f"after {_CREATION_S_MAX:.0f} s"
            raise StoreUnavailable(f"{client.config}: the table is still {status} {waited}")
        time.sleep(_POLL_S)


def _refuse_foreign(table: str, description: Mapping[str, Any]) -> None:
    if reason := why_foreign(description):
        raise Misconfigured(
            f"dynamodb: table {table} was not created by coatcheck: {reason}; use another table"
        )


def why_foreign(description: Mapping[str, Any]) -> str:
    """Return what is wrong with the table's key; "" if nothing is."""
    keys = [(key["AttributeName"], key["KeyType"]) for key in description["KeySchema"]]
    types = {a["AttributeName"]: a["AttributeType"] for a in description["AttributeDefinitions"]}
    if keys == [("id", "HASH")] and types["id"] == "B":
        return ""
    found = ", ".join(f"{name} ({types.get(name)}, {kind})" for name, kind in keys)
    return f"its key is {found}, and ours is id (B, HASH) alone"


def _enable_expiry(client: DynamoClient) -> None:
    wanted = {"Enabled": True, "AttributeName": EXPIRY_ATTRIBUTE}
    try:
        client.call("update_time_to_live", TimeToLiveSpecification=wanted)
    except StoreUnavailable as error:
        # Another node was faster. Any other problem is reported by `expiry_finding`.
        if code_of(error) != "ValidationException":
            raise


def expiry_finding(client: DynamoClient) -> Finding:
    """Check whether DynamoDB deletes expired records by itself."""
    table = client.config.table
    try:
        answer = client.call("describe_time_to_live")
    except StoreUnavailable as error:
        return Finding("warning", f"cannot tell whether DynamoDB deletes expired records: {error}")
    expiry = answer["TimeToLiveDescription"]
    is_on = expiry.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
    if is_on and expiry.get("AttributeName") == EXPIRY_ATTRIBUTE:
        return Finding(
            "ok", f"DynamoDB deletes expired records (time to live on {EXPIRY_ATTRIBUTE})"
        )
    message = f"table {table} has no time to live on {EXPIRY_ATTRIBUTE}: enable it, otherwise"
    return Finding("warning", f"{message} no expired record is ever deleted")


def table_findings(client: DynamoClient) -> Iterator[Finding]:
    """Check the table, its time to live, its capacity and its regions."""
    description = describe(client)
    table = client.config.table
    if description is None:
        yield Finding("error", f"table {table} does not exist")
        return
    status = description["TableStatus"]
    yield Finding("ok" if status in USABLE else "error", f"table {table} is {status}")
    if reason := why_foreign(description):
        yield Finding("error", f"table {table} was not created by coatcheck: {reason}")
    yield expiry_finding(client)
    yield _check_billing(description)
    yield from _check_replicas(description)


def _check_billing(description: Mapping[str, Any]) -> Finding:
    mode = description.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if mode == "PAY_PER_REQUEST":
        return Finding("ok", "billed on demand")
    units = description.get("ProvisionedThroughput", {}).get("WriteCapacityUnits", 0)
    message = f"provisioned for {units} write units a second: about {units // 2} new keys a second"
    return Finding("warning", f"{message}; beyond that DynamoDB throttles, and requests get 503")


def _check_replicas(description: Mapping[str, Any]) -> Iterator[Finding]:
    is_strong = description.get("MultiRegionConsistency") == "STRONG"
    if description.get("Replicas") and not is_strong:
        yield Finding(
            "warning",
            "a global table with eventual consistency: two regions can claim one key at the same "
            "time, and both execute; send all retries of a caller to one region",
        )
