"""The DynamoDB store: one item per record, shared by any number of machines, no server to run.

An acknowledged swap is on disks in three data centres. Each claim and each completion is one
request, also if it conflicts: the answer then has the current item.

DynamoDB has no bulk write whose members succeed and fail on their own. So the swaps of a batch are
sent at the same time by a few threads; a single swap is sent in the caller's thread. Event loops
use this store through threads, one request per call (`batch_max`), so a slow request delays no
other.

The table has no order but that of a hash, and no index, which would double the cost of every write.
So `find`, which is rare and for people, scans the whole table. Nothing is swept: DynamoDB itself
deletes expired items, usually within days.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import (
    Outcome,
    SkipUndecodable,
    UndecodableRecord,
    results_of,
)
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, compact_swap, matches
from coatcheck.stores.dynamodb import records, requests, schema
from coatcheck.stores.dynamodb.client import DynamoClient
from coatcheck.stores.dynamodb.url import DynamoConfig, parse_url
from coatcheck.stores.migration import Migration
from coatcheck.stores.record_counts import RecordCount, record_count_of
from coatcheck.stores.registry import DYNAMODB

T = TypeVar("T")

# No record has this id, so a conditional write for it fails its condition and changes nothing.
_ABSENT = Record(bytes(ID_BYTES), 2, RUNNING, 1, b"", 1, 1, 1, 1, 1, "", "", "", None, None)


class DynamoStore:
    """
    Records in a DynamoDB table.

    With *create*, a missing table is created: billed on demand, with a time to live.
    """

    info = DYNAMODB

    # For event loops: one swap in each call, so that a slow request delays no other swap.
    batch_max = 1

    def __init__(self, config: DynamoConfig, *, create: bool = True) -> None:
        self.config = config
        self.in_flight = config.concurrency  # for event loops: calls at the same time
        self._client = DynamoClient(config)
        self._skip = SkipUndecodable()
        try:
            schema.prepare(self._client, create=create)
        except BaseException:
            self._client.close()
            raise

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> DynamoStore:
        """Open `dynamodb://table?region=eu-west-1`; `url.py` has the options."""
        return cls(parse_url(url), create=create)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Create the table in *url*; an existing one is never altered."""
        config = parse_url(url)
        with closing(DynamoClient(config)) as client:
            found = schema.version_of(client)
        if not only_look:
            cls(config).close()
        is_done = not found and not only_look
        return Migration(str(config), found, 1, is_done)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; all at the same time."""
        if self.config.compact:
            swaps = [compact_swap(swap) for swap in swaps]
        return results_of(self._client.send_all(partial(requests.swap, self._client), swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records in the order of *ids*, with consistent reads."""
        unique = list(dict.fromkeys(ids))  # DynamoDB refuses a request with one id twice
        starts = range(0, len(unique), requests.READ_MAX)
        chunks = [unique[start : start + requests.READ_MAX] for start in starts]
        answers = self._client.send_all(partial(requests.read, self._client), chunks)
        outcomes: dict[bytes, Outcome] = {}
        for chunk, found in zip(chunks, answers, strict=True):
            outcomes |= dict.fromkeys(chunk, found) if isinstance(found, Exception) else found
        return results_of([outcomes.get(id) for id in ids])

    def find(self, query: Query) -> Page:
        """
        Return records for operators.

        Each page scans the whole table, because items are in the order of a hash. Only headings
        are transferred, and no more of them are kept than the page needs.
        """
        found = self._matching(query)
        if query.newest_first:
            newest = heapq.nlargest(query.limit, found, key=lambda h: (h.created_ms, h.id))
            ids, next_after_id = [heading.id for heading in newest], None
        else:
            first = heapq.nsmallest(query.limit + 1, found)
            ids = [heading.id for heading in first[: query.limit]]
            next_after_id = ids[-1] if len(first) > query.limit else None
        # A record may have changed since the scan, and not match any more.
        page = [record for record in self._skip.read(self.get, ids) if matches(record, query)]
        return Page(page, next_after_id)

    def _matching(self, query: Query) -> Iterator[records.Heading]:
        for heading in self._scan(records.heading_of, records.scan_of(query)):
            if heading.id.startswith(query.id_prefix) and heading.id > query.after_id:
                yield heading

    def count_records(self) -> Iterator[RecordCount]:
        """Count each record by itself, because DynamoDB cannot group them; scans the table once."""
        return map(record_count_of, self._scan(records.record_of, {}))

    def _scan(self, decode: Callable[[records.Item], T], parameters: dict[str, Any]) -> Iterator[T]:
        """Scan the table, 1 MB at a time; yield what *decode* makes of each item."""
        while True:
            answer = self._client.call("scan", ConsistentRead=True, **parameters)
            for item in answer["Items"]:
                try:
                    yield decode(item)
                except records.UnreadableItem as error:
                    self._skip.warn_once(UndecodableRecord(f"{self.config}: {error}"))
            if "LastEvaluatedKey" not in answer:
                return
            parameters["ExclusiveStartKey"] = answer["LastEvaluatedKey"]

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete nothing: DynamoDB deletes a record when its time to live is over."""
        del now_ms, limit
        self._client.botocore_client()  # raises if the store is closed
        return 0

    def check(self) -> Sequence[Finding]:
        """Check the table, its time to live and capacity, and our permissions."""
        try:
            findings = list(schema.table_findings(self._client))
        except StoreUnavailable as error:
            return [Finding("error", str(error))]
        if not any(finding.level == "error" for finding in findings):
            findings += self._check_permissions()
        return findings

    def _check_permissions(self) -> Iterator[Finding]:
        """Try each operation that needs its own permission, without changing anything."""
        attempts: dict[str, Callable[[], object]] = {
            "PutItem": lambda: self.swap((Swap(_ABSENT.id, 1, _ABSENT),)),
            "DeleteItem": lambda: self.swap((Swap(_ABSENT.id, 1, None),)),
            "BatchGetItem": lambda: self.get((_ABSENT.id,)),
            "Scan": lambda: self._client.call("scan", Limit=1),
        }
        for operation, attempt in attempts.items():
            try:
                attempt()
            except StoreUnavailable as error:
                yield Finding("error", f"{operation} does not work: {error}")

    def now_ms(self) -> int:
        """Return this machine's clock, within the second of DynamoDB's clock; see `clock_ms`."""
        sent_ms = _local_ms()
        answer = self._client.call("describe_table")
        return clock_ms(sent_ms, _local_ms(), answer["ResponseMetadata"]["HTTPHeaders"])

    def close(self) -> None:
        """Close connections and threads."""
        self._client.close()


def _local_ms() -> int:
    return time.time_ns() // 1_000_000


def clock_ms(sent_ms: int, answered_ms: int, headers: Mapping[str, str]) -> int:
    """
    Return the server's clock as exactly as it is known.

    The `Date` header of an answer has whole seconds. If this machine's clock agrees with it, as it
    does with NTP, return that; otherwise the nearest time that the header allows.
    """
    if "date" not in headers:
        return answered_ms
    second_ms = round(parsedate_to_datetime(headers["date"]).timestamp()) * 1_000
    latest_ms = second_ms + 999 + max(0, answered_ms - sent_ms)
    return min(max(answered_ms, second_ms), latest_ms)
