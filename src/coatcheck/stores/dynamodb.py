"""The DynamoDB store: one item for each record, any number of machines, nothing to operate.

What a swap has acknowledged is on disks in three data centres. One request for each claim and each
completion, also where it loses: the answer then brings the item that stands.

DynamoDB has no bulk write whose parts succeed and fail apart, so the swaps of a batch are sent at
the same time, by a few threads of the store's own; one alone is sent in its caller's thread, and
an event loop has a client of its own (`wire`). What is said is in `dynamodb_flow.py`.

There is no order among items but that of a hash, and no index, which would double the cost of
every write. So what is rare and for people (`find`) reads the whole table, and the sweep reads a
stretch of it at a time: DynamoDB deletes what has expired by itself, within days.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.core.scope import ID_BYTES
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import dynamodb_items as items
from coatcheck.stores import dynamodb_table as table
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Wire, matches
from coatcheck.stores.declared import DYNAMODB
from coatcheck.stores.dynamodb_flow import Flows, in_order, portions_of
from coatcheck.stores.dynamodb_line import Line
from coatcheck.stores.dynamodb_place import Place, place_of
from coatcheck.stores.fates import results_of
from coatcheck.stores.migration import Migration
from coatcheck.stores.unread import LeftOut, Unread

logger = logging.getLogger("coatcheck")

# A page of a scan is 1 MB of table. 4: half a thousand read units each time, which once a minute
# comes to a few dollars in a month; the whole of a large table would be hundreds in a day.
_SWEEP_PAGES = 4

# What nobody has, so that every change of it loses, and changes nothing.
_IDLE = Record(bytes(ID_BYTES), 2, RUNNING, 1, b"", 1, 1, 1, 1, 1, "", "", "", None, None)
_IDLE_CHANGE, _IDLE_DELETION = Swap(_IDLE.id, 1, _IDLE), Swap(_IDLE.id, 1, None)


class DynamoStore:
    """
    Records in the DynamoDB table at *place*.

    Where *create* is true it is made if it is missing: billed on demand, with a time to live.
    """

    declared = DYNAMODB

    def __init__(self, place: Place, *, create: bool = True) -> None:
        self.name = place.table
        self._place = place
        self._flows = Flows(place)
        self._line = Line(self._flows)
        self._left_out = LeftOut()
        # Anywhere, so that nodes do not fight for the same stretch; None: where the table begins.
        self._sweep_from: bytes | None = os.urandom(16)
        try:
            table.prepare(self._line, create=create)
        except BaseException:
            self._line.close()
            raise

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> DynamoStore:
        """
        The store that *url* names: `dynamodb://table?region=eu-west-1`.

        Options: `endpoint=http://…`, `compact=1`, `timeout=5s`, `concurrency=32`.
        """
        return cls(place_of(url), create=create)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Make the table that *url* names; one that is there is never altered."""
        place = place_of(url)
        with closing(Line(Flows(place))) as line:
            found = table.version_of(line)
        if not only_look:
            cls(place).close()
        is_done = not found and not only_look
        return Migration(str(place), found, 1, is_done)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands; all at the same time."""
        return results_of(self._line.each(self._flows.swap, swaps))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; never an older one than was written."""
        return in_order(ids, self._line.each(self._flows.read, portions_of(ids)))

    def find(self, query: Query) -> Page:
        """
        Records for operators, in id order.

        Reads the whole table for every page, because items lie in the order of a hash; but only
        ids come over the network, and no more of them are remembered than the page takes.
        """
        ids = heapq.nsmallest(query.limit + 1, self._matching_ids(query))
        page = ids[: query.limit]
        # What has changed since the scan came by may not belong to the page any more.
        records = [r for r in self._left_out.read(self.get, page) if matches(r, query)]
        return Page(records, page[-1] if len(ids) > query.limit else None)

    def _matching_ids(self, query: Query) -> Iterator[bytes]:
        start: bytes | None = None
        while True:
            seen, start = self._stretch(query, start, consistent=True)
            for id, _ in seen:
                if id.startswith(query.id_prefix) and id > query.after_id:
                    yield id
            if start is None:
                return

    def _stretch(
        self, query: Query, start: bytes | None, *, consistent: bool
    ) -> tuple[list[tuple[bytes, int]], bytes | None]:
        """The next megabyte of the table: ids and versions of what matches, and where it ends."""
        scan = items.scan_of(query)
        if start is not None:
            scan["ExclusiveStartKey"] = {"id": {"B": start}}
        answer = self._line.call("scan", ConsistentRead=consistent, **scan)
        seen: list[tuple[bytes, int]] = []
        for item in answer["Items"]:
            id, version = item["id"]["B"], items.version_of(item)
            if version:
                seen.append((id, version))
            else:
                self._left_out.tell(Unread(f"{self._place}: {id.hex()} is not one of our records"))
        last = answer.get("LastEvaluatedKey")
        return seen, None if last is None else last["id"]["B"]

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """
        Delete up to *limit* records whose retention is over.

        Looks at four megabytes at most, going on where the last sweep stopped, so that it costs
        the same however large the table is; the time to live takes what it has not come by.
        """
        query = Query(expired_at_ms=now_ms)
        start, taken = self._sweep_from, 0
        is_from_the_beginning = start is None
        for _ in range(_SWEEP_PAGES):
            # Half the price of a consistent read. What is out of date is not deleted: see `_take`.
            over, start = self._stretch(query, start, consistent=False)
            count, stopped_at = self._take(over, limit - taken)
            taken += count
            if stopped_at is not None:
                start = stopped_at
                break
            if start is None:
                if is_from_the_beginning:
                    break
                is_from_the_beginning = True
        self._sweep_from = start  # whoever sweeps at the same time may set it, too: no harm done
        return taken

    def sweep_all(self, now_ms: int) -> Iterator[int]:
        """Sweep the table from its beginning to its end, a megabyte at a time."""
        query = Query(expired_at_ms=now_ms)
        start: bytes | None = None
        while True:
            over, start = self._stretch(query, start, consistent=False)
            count, _ = self._take(over, len(over) + 1)
            yield count
            if start is None:
                return

    def _take(self, over: list[tuple[bytes, int]], count: int) -> tuple[int, bytes | None]:
        """Delete *count* of *over*, as they were seen; how many it were, and where it stopped."""
        taken, last = 0, None
        while taken < count and over:
            some, over = over[: count - taken], over[count - taken :]
            lost = self.swap([Swap(id, version, None) for id, version in some])
            taken += lost.count(None)
            last = some[-1][0]
        return taken, last if taken == count else None

    def check(self) -> Sequence[Finding]:
        """Whether the table is there, forgets by itself, can take what comes, and lets us."""
        try:
            findings = list(table.findings_about(self._line))
        except StoreUnavailable as error:
            return [Finding("error", str(error))]
        if not any(finding.level == "error" for finding in findings):
            findings += self._findings_about_rights()
        return findings

    def _findings_about_rights(self) -> Iterator[Finding]:
        """Try what is needed, so that nothing is changed; each has a permission of its own."""
        needed: dict[str, Callable[[], object]] = {
            "PutItem": lambda: self.swap((_IDLE_CHANGE,)),
            "DeleteItem": lambda: self.swap((_IDLE_DELETION,)),
            "BatchGetItem": lambda: self.get((_IDLE.id,)),
            "Scan": lambda: self._line.call("scan", Limit=1),
        }
        for operation, attempt in needed.items():
            try:
                attempt()
            except StoreUnavailable as error:
                yield Finding("error", f"{operation} does not work: {error}")

    def now_ms(self) -> int:
        """DynamoDB's clock, to the second, and this machine's within that; see `clock_ms`."""
        asked_ms = _local_ms()
        answer = self._line.call("describe_table")
        return table.clock_ms(asked_ms, _local_ms(), answer["ResponseMetadata"]["HTTPHeaders"])

    def wire(self) -> Wire:
        """A client of the running event loop's own, where aiobotocore is installed."""
        try:
            from coatcheck.stores.dynamodb_wire import DynamoWire  # noqa: PLC0415 - may be missing
        except ImportError as error:
            if error.name != "aiobotocore":  # it is there, and yet cannot be used
                logger.warning("event loops ask DynamoDB through threads: %s", error)
            raise NotImplementedError from error
        return DynamoWire(self._flows)

    def close(self) -> None:
        """Let go of connections and threads."""
        self._line.close()


def _local_ms() -> int:
    return time.time_ns() // 1_000_000
