"""Counting the records of every store, by state and label."""

from contextlib import closing
from pathlib import Path

import pytest

from coatcheck.core.record import COMPLETED, RUNNING, Swap, completed
from coatcheck.stores.record_counts import HasRecordCounts, RecordCount, count_records

from .laws.kinds import KINDS, Kind
from .laws.records import NOW_MS, claim_of, id_of

LABELS = ("", "POST /caf\xe9/\udcff", "POST /orders")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_records_are_counted_by_state_and_label(kind: Kind, tmp_path: Path):
    """O1: with the oldest of each, and what is stored for them; in one pass where that matters."""
    claims = [
        claim_of(id_of(n), now_ms=NOW_MS + n)._replace(label=LABELS[n % 3]) for n in range(1_500)
    ]
    records = [completed(claim, b"12345") if n >= 3 else claim for n, claim in enumerate(claims)]
    with closing(kind.open(kind.fresh_url(tmp_path))) as store:
        assert count_records(store) == []
        swaps = [Swap(record.id, 0, record) for record in records]
        for start in range(0, len(swaps), 250):
            store.swap(swaps[start : start + 250])
        running = [RecordCount(RUNNING, name, 1, NOW_MS + n, 0) for n, name in enumerate(LABELS)]
        done = [
            RecordCount(COMPLETED, one.label, 499, one.oldest_ms + 3, 499 * 5) for one in running
        ]
        assert count_records(store) == running + done
        is_wrapped = kind.name in ("own-store", "memory", "encrypted")
        assert isinstance(store, HasRecordCounts) is not is_wrapped
