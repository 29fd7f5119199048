"""Outgoing events commit with the effect, in every idiom (E5)."""

import pytest

from coatcheck import Engine, current_operation
from coatcheck.errors import Misconfigured
from coatcheck.stores import open_store
from coatcheck.stores.event_table import EventTable
from tests.transactions.idioms import IDIOMS

# One for each database.
FIRST = [next(i for i in IDIOMS if i.kind == kind) for kind in ("sqlite", "postgres", "mysql")]


@pytest.fixture
def events(shop):
    """The table of events of the shop."""
    store = open_store(shop.store)
    table = EventTable(store.transaction_statements)
    table.create()
    table.create()  # a second relay
    yield table
    store.close()


def emits(number):
    return current_operation().emit("orders.placed", {"number": number}, key=f"order-{number}")


def test_an_event_is_there_once_if_its_transaction_commits(harness, events):
    """E5: a duplicate adds none, and the id depends on the operation alone."""
    for _ in range(2):
        harness.done(harness.engine.transaction("a", harness.handler(emits), 1, scope="orders"))
    ((_, event),) = events.read(10)
    assert (event.topic, event.body, event.key) == ("orders.placed", b'{"number":1}', "order-1")
    assert event.headers == {"content-type": "application/json"}
    assert len(event.message_id) == 36


def test_an_event_of_a_failed_handler_is_not_there(harness, events):
    def fail(number):
        emitted = emits(number)
        if emitted is None:
            raise ValueError

        async def awaited():
            await emitted
            raise ValueError

        return awaited()

    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        harness.done(harness.engine.transaction("a", harness.handler(fail), 1, scope="orders"))
    assert events.read(10) == []


@pytest.mark.parametrize("idiom", FIRST, ids=lambda idiom: idiom.name)
def test_a_missing_table_is_named_and_nothing_is_committed(harness):
    with pytest.raises(Misconfigured, match="coatcheck migrate --events"):
        harness.done(harness.engine.transaction("a", harness.handler(emits), 1, scope="orders"))
    assert (harness.shop.orders(), harness.shop.records()) == ([], 0)


@pytest.mark.parametrize("idiom", FIRST, ids=lambda idiom: idiom.name)
def test_events_are_left_out_and_deleted_by_their_numbers(shop, events):
    with Engine(shop.store) as engine:

        def emit_three():
            for payload in (b"1", b"2", b"3"):
                current_operation().emit("t", payload)

        engine.transaction("a", emit_three, scope="orders")
    rows = events.read(10)
    assert [event.body for _, event in rows] == [b"1", b"2", b"3"]
    assert len({event.message_id for _, event in rows}) == 3
    assert events.read(2, {rows[1][0]}) == [rows[0], rows[2]]
    events.delete([rows[0][0], rows[2][0]])
    assert [event.body for _, event in events.read(10)] == [b"2"]


def test_emit_needs_a_transaction(tmp_path):
    with (
        Engine(f"sqlite:///{tmp_path}/store.db") as engine,
        pytest.raises(Misconfigured, match="mode='transaction'"),
    ):
        engine.run("a", emits, 1)


def test_a_payload_that_is_neither_bytes_nor_json_is_refused(tmp_path):
    with (
        Engine(f"sqlite:///{tmp_path}/store.db") as engine,
        pytest.raises(Misconfigured, match="neither bytes nor JSON"),
    ):
        engine.transaction("a", lambda: current_operation().emit("t", object()), scope="orders")
