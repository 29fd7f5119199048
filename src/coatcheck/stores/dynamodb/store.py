"""The DynamoDB store: one item per record, shared by any number of machines, no server to run.

An acknowledged swap is on disks in three data centres. Each claim and each completion is one
request, also if it conflicts: the answer then has the current item.

DynamoDB has no bulk write whose members succeed and fail on their own. So the swaps of a batch are
sent at the same time by a few threads; a single swap is sent in the caller's thread. Event loops
use this store through threads, one request per call (`batch_max`), so a slow request delays no
other.

The table has no order but that of a hash, and no index, which would double the cost of every write.
So `find`, which is rare and for people, scans the whole table. The sweep scans a part of it at a
time; DynamoDB itself deletes expired items within days.
"""

from __future__ import annotations

import heapq
import os
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

# A page of a scan is 1 MB of the table. 4 pages: half a thousand read units per sweep, which once a
# minute costs a few dollars a month. Scanning a large table each time would cost hundreds a day.
_SWEEP_PAGES = 4
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
        # A random start, so that the nodes do not sweep the same part; None: the table's beginning.
        self._sweep_from: bytes | None = os.urandom(16)
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
        start: bytes | None = None
        while True:
            found, start = self._scan_page(query, start, consistent=True)
            for heading in found:
                if heading.id.startswith(query.id_prefix) and heading.id > query.after_id:
                    yield heading
            if start is None:
                return

    def _scan_page(
        self, query: Query, start: bytes | None, *, consistent: bool
    ) -> tuple[list[records.Heading], bytes | None]:
        """Scan 1 MB of the table; return the headings that match, and the next start."""
        items, start = self._scan(records.scan_of(query), start, consistent=consistent)
        return self._decoded(records.heading_of, items), start

    def count_records(self) -> Iterator[RecordCount]:
        """Count each record by itself, because DynamoDB cannot group them; scans the table once."""
        start: bytes | None = None
        while True:
            items, start = self._scan({}, start, consistent=True)
            yield from map(record_count_of, self._decoded(records.record_of, items))
            if start is None:
                return

    def _scan(
        self, scan: dict[str, Any], start: bytes | None, *, consistent: bool
    ) -> tuple[list[records.Item], bytes | None]:
        """Scan 1 MB of the table from *start*; return items, and the next start."""
        if start is not None:
            scan["ExclusiveStartKey"] = {"id": {"B": start}}
        answer = self._client.call("scan", ConsistentRead=consistent, **scan)
        last = answer.get("LastEvaluatedKey")
        return answer["Items"], None if last is None else last["id"]["B"]

    def _decoded(
        self, decode: Callable[[records.Item], T], items: Sequence[records.Item]
    ) -> list[T]:
        """Return what *decode* makes of *items*, without those that are not records."""
        decoded = []
        for item in items:
            try:
                decoded.append(decode(item))
            except records.UnreadableItem as error:
                self._skip.warn_once(UndecodableRecord(f"{self.config}: {error}"))
        return decoded

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """
        Delete up to *limit* records whose retention is over; return how many.

        Scans at most four megabytes and continues where the last sweep stopped, so the cost does
        not grow with the table. The time to live deletes what no sweep has reached.
        """
        query = Query(expired_at_ms=now_ms)
        start, deleted = self._sweep_from, 0
        is_second_round = start is None
        for _ in range(_SWEEP_PAGES):
            # An inconsistent read costs half, and `_delete` compares the versions anyway.
            expired, start = self._scan_page(query, start, consistent=False)
            count, stopped_at = self._delete(expired, limit - deleted)
            deleted += count
            if stopped_at is not None:
                start = stopped_at
                break
            if start is None:  # the end of the table: continue at its beginning, but only once
                if is_second_round:
                    break
                is_second_round = True
        self._sweep_from = start  # a concurrent sweep may overwrite it, which does no harm
        return deleted

    def sweep_all(self, now_ms: int) -> Iterator[int]:
        """Sweep the whole table, page by page; yield how many records each page had."""
        query = Query(expired_at_ms=now_ms)
        start: bytes | None = None
        while True:
            expired, start = self._scan_page(query, start, consistent=False)
            count, _ = self._delete(expired, len(expired) + 1)
            yield count
            if start is None:
                return

    def _delete(self, expired: list[records.Heading], limit: int) -> tuple[int, bytes | None]:
        """Delete up to *limit* unchanged records; return how many, and the last id at the limit."""
        deleted, last = 0, None
        while deleted < limit and expired:
            some, expired = expired[: limit - deleted], expired[limit - deleted :]
            results = self.swap([Swap(heading.id, heading.version, None) for heading in some])
            deleted += results.count(None)
            last = some[-1].id
        return deleted, last if deleted == limit else None

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
