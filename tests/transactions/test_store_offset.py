"""Offsets of Kafka commit with the effect, in every idiom (E2)."""

import pytest

from coatcheck import current_operation
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.errors import Misconfigured
from coatcheck.stores import open_store
from coatcheck.stores.offset_table import OffsetTable
from tests.transactions.idioms import IDIOMS

# One for each database.
FIRST = [next(i for i in IDIOMS if i.kind == kind) for kind in ("sqlite", "postgres", "mysql")]


@pytest.fixture
def offsets(shop):
    """The table of offsets of the shop."""
    store = open_store(shop.store)
    table = OffsetTable(store.transaction_statements)
    table.create()
    table.create()  # a second consumer
    yield table
    store.close()


# What the handlers of these orders store.
STORED = [
    PartitionOffset("billing", "orders", 0, 7),
    PartitionOffset("billing", "orders", 0, 8),
    PartitionOffset("billing", "orders", 1, 1 << 40),
    PartitionOffset("Billing", "orders", 0, 3),
    PartitionOffset("billing", "Orders", 0, 2),
]


def stores(number):
    return current_operation()._transaction.store_offset(STORED[number])


def run(harness, function, number):
    handler = harness.handler(function)
    harness.done(harness.engine.transaction(f"event-{number}", handler, number, scope="events"))


def test_an_offset_is_there_if_its_transaction_commits(harness, offsets):
    """E2: one row for each group, topic and partition; the last offset wins."""
    for number in range(len(STORED)):
        run(harness, stores, number)
    assert offsets.read("billing") == {("orders", 0): 8, ("orders", 1): 1 << 40, ("Orders", 0): 2}
    assert offsets.read("Billing") == {("orders", 0): 3}
    assert offsets.read("unknown") == {}
    assert len(harness.shop.orders()) == len(STORED)


@pytest.mark.parametrize("idiom", FIRST, ids=lambda idiom: idiom.name)
def test_an_offset_of_a_failed_handler_is_not_there(harness, offsets):
    """E2: a handler that is rolled back leaves no offset."""

    def fail(number):
        stored = stores(number)
        if stored is None:
            raise ValueError

        async def awaited():
            await stored
            raise ValueError

        return awaited()

    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        run(harness, fail, 0)
    assert offsets.read("billing") == {}
    assert harness.shop.orders() == []


@pytest.mark.parametrize("idiom", FIRST, ids=lambda idiom: idiom.name)
def test_a_missing_table_is_named_and_nothing_is_committed(harness):
    with pytest.raises(Misconfigured, match="coatcheck_offsets"):
        run(harness, stores, 0)
    assert (harness.shop.orders(), harness.shop.records()) == ([], 0)
