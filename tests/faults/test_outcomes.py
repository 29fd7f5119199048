"""The table of outcomes, as the documentation shows it."""

from tests.faults.outcomes import FAULTS, RECOVERIES, outcome_of, table


def test_the_table_has_every_fault_and_every_recovery():
    text = table()
    for fault in FAULTS:
        assert outcome_of(fault, "after effect", "retry") is not None
    assert text.count("###") == len(FAULTS)
    assert all(f"`{recovery}`" in text for recovery in RECOVERIES)
