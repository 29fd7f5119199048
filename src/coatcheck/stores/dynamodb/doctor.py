"""What `coatcheck doctor` checks of a DynamoDB table and of our permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Finding, Store
from coatcheck.stores.dynamodb.client import DynamoClient
from coatcheck.stores.dynamodb.schema import USABLE, describe, expiry_finding, why_foreign

# No record has this id, so a conditional write for it fails its condition and changes nothing.
_ABSENT = Record(bytes(ID_BYTES), 2, RUNNING, 1, b"", 1, 1, 1, 1, 1, "", "", "", None, None)


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


def permission_findings(store: Store, client: DynamoClient) -> Iterator[Finding]:
    """Try each operation that needs its own permission, without changing anything."""
    attempts: dict[str, Callable[[], object]] = {
        "PutItem": lambda: store.swap((Swap(_ABSENT.id, 1, _ABSENT),)),
        "DeleteItem": lambda: store.swap((Swap(_ABSENT.id, 1, None),)),
        "BatchGetItem": lambda: store.get((_ABSENT.id,)),
        "Scan": lambda: client.call("scan", Limit=1),
    }
    for operation, attempt in attempts.items():
        try:
            attempt()
        except StoreUnavailable as error:
            yield Finding("error", f"{operation} does not work: {error}")
