"""How many records a store has, by state and label; for `coatcheck stats`.

A store that can count without reading every response implements `HasRecordCounts`. The records of
any other store are read page by page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from coatcheck.core.record import Record, State
from coatcheck.stores.contract import Query, Store

# 1000: a few megabytes of usual responses.
_PAGE_RECORDS = 1_000


class RecordCount(NamedTuple):
    """Some records of the same state and label."""

    state: State
    label: str
    records: int
    oldest_ms: int  # when the oldest of them was created
    body_bytes: int  # of their responses and progress, as they are stored


@runtime_checkable
class HasRecordCounts(Protocol):
    """A store that can count its records."""

    def count_records(self) -> Iterable[RecordCount]:
        """Return counts that have every record once; a state and label may occur repeatedly."""
        ...


def count_records(store: Store) -> list[RecordCount]:
    """Return one count for each state and label of *store*, sorted by both."""
    counts = store.count_records() if isinstance(store, HasRecordCounts) else _by_page(store)
    totals: dict[tuple[State, str], RecordCount] = {}
    for count in counts:
        group = count.state, count.label
        total = totals.get(group)
        totals[group] = count if total is None else _sum_of(total, count)
    return sorted(totals.values())


def _by_page(store: Store) -> Iterator[RecordCount]:
    query = Query(limit=_PAGE_RECORDS)
    while True:
        records, next_after_id = store.find(query)
        yield from map(record_count_of, records)
        if next_after_id is None:
            return
        query = replace(query, after_id=next_after_id)


def record_count_of(record: Record) -> RecordCount:
    """Return the count of one *record*."""
    body_bytes = len(record.progress or b"") + len(record.response or b"")
    return RecordCount(record.state, record.label, 1, record.created_ms, body_bytes)


def _sum_of(one: RecordCount, other: RecordCount) -> RecordCount:
    return RecordCount(
        one.state,
        one.label,
        one.records + other.records,
        min(one.oldest_ms, other.oldest_ms),
        one.body_bytes + other.body_bytes,
    )
