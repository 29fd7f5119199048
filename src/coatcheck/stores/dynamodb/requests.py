"""The requests that write and read records, and what their answers mean.

A swap is one conditional write. If its condition fails, the answer has the current item, so a
conflict costs no second request. A retry of a write that had already been applied conflicts with
itself: the caller gets its own record and recognises it, as after any lost acknowledgement.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from coatcheck.core.key import reference_of
from coatcheck.core.record import GONE, Record, Swap, is_same_write_cut
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import Outcome, UndecodableRecord
from coatcheck.stores.dynamodb import records
from coatcheck.stores.dynamodb.client import DynamoClient, pause
from coatcheck.stores.dynamodb.errors import (
    CONDITION_FAILED,
    code_of,
    conflicting_item,
)
from coatcheck.stores.dynamodb.url import DynamoConfig

logger = logging.getLogger("coatcheck")

# The limit of BatchGetItem.
READ_MAX = 100
# Between reads of a throttled table: up to 20 ms, then twice as long each time, up to 1 s.
_PAUSE_S = 0.02
_PAUSE_S_MAX = 1.0
# How often to retry a claim whose conflicting record disappeared; even twice is unlikely.
_CLAIM_ATTEMPTS_MAX = 8


def swap(client: DynamoClient, swap: Swap) -> Record | None:
    """Write a record if its version is still the expected one; return None, or the current one."""
    for _ in range(_CLAIM_ATTEMPTS_MAX):
        if swap.record is None:
            current = _write(client, "delete_item", swap, Key={"id": {"B": swap.id}})
        else:
            current = _put(client, swap, swap.record)
        if current is None or current.version or swap.expected:
            return current
        # A claim conflicted with a record that has disappeared since: try again.
    raise StoreUnavailable(
        f"{client.config}: gave up a claim after {_CLAIM_ATTEMPTS_MAX} conflicts with records that "
        "disappeared each time"
    )


def _put(client: DynamoClient, swap: Swap, record: Record) -> Record | None:
    """Write *record*, without its response if that does not fit."""
    item = records.item_of(record)
    current = _write(client, "put_item", swap, Item=item)
    if record.response is None or records.has_response(item):
        return current
    if current is None:
        _warn_not_kept(record)
    elif is_same_write_cut(current, record):
        return record  # our own write, whose acknowledgement was lost: let the caller recognise it
    return current


def _write(client: DynamoClient, operation: str, swap: Swap, **parameters: object) -> Record | None:
    """Return None if the write was applied, otherwise the current record; `GONE`: there is none."""
    parameters["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    try:
        client.call(operation, **parameters, **records.condition_of(swap))
    except StoreUnavailable as error:
        if code_of(error) != CONDITION_FAILED:
            raise
        item = conflicting_item(error)
        current = _decode(client.config, item) if item else GONE
        if isinstance(current, UndecodableRecord):
            raise current from error
        return current
    return None


def read(client: DynamoClient, ids: Sequence[bytes]) -> dict[bytes, Outcome]:
    """
    Return what the table has for at most a hundred *ids*, with consistent reads.

    One request, or more if the answer would exceed 16 MB or capacity runs short. If a part of the
    table stays throttled, only the ids in that part get an error.
    """
    found: dict[bytes, Outcome] = {}
    table = client.config.table
    keys = [{"id": {"B": id}} for id in ids]
    pause_s, paused_s = _PAUSE_S, 0.0
    while True:
        request = {table: {"Keys": keys, "ConsistentRead": True}}
        answer = client.send("batch_get_item", RequestItems=request)
        for item in answer["Responses"].get(table, ()):
            found[item["id"]["B"]] = _decode(client.config, item)
        left = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", [])
        if not left:
            return found
        if len(left) == len(keys):  # no progress: the table is throttled
            if paused_s > client.config.timeout_s:
                error = StoreUnavailable(f"{client.config}: throttled while reading")
                return found | {key["id"]["B"]: error for key in left}
            pause(pause_s)
            paused_s += pause_s
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        keys = left


def _decode(config: DynamoConfig, item: records.Item) -> Record | UndecodableRecord:
    try:
        return records.record_of(item)
    except records.UnreadableItem as error:
        return UndecodableRecord(f"{config}: {error}")


def _warn_not_kept(record: Record) -> None:
    logger.warning(
        "coatcheck: operation %s: its response of %d bytes exceeds DynamoDB's limit and was not "
        "kept; a retry gets 409 result-unavailable",
        reference_of(record.id),
        len(record.response or b""),
    )
