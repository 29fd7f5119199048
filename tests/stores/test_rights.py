"""The rights that docs/howto/database-rights.md grants are enough, and no more than that."""

import asyncio
import re
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from coatcheck import Engine, Policy, current_async_operation
from coatcheck.cli import main
from coatcheck.consumer import Acknowledge, Inbox, Message
from coatcheck.consumer.relay import Relay
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, open_store
from tests.support.servers import START_S_MAX
from tests.support.servers.mariadb import mariadb
from tests.support.servers.postgres import postgres

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "database-rights.md"
OF_CONSUMERS = "Outgoing events and Kafka's offsets"
DAY_MS = 86_400_000


def grants(heading: str) -> list[str]:
    """The statements below *heading* on the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```sql\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1].strip().splitlines()


@pytest.fixture
def on_postgres():
    """The URL of a database with our tables, for the role that is put in place of `{role}`."""
    server = postgres()
    with psycopg.connect(server.url, autocommit=True) as owner:
        owner.execute("create database rights")
        url = server.url.removesuffix("/postgres") + "/rights"
        assert main(["migrate", url, "--events", "--offsets"]) == 0
        with psycopg.connect(url, autocommit=True) as there:
            there.execute("create role shop login; create role support login")
            for heading in ("PostgreSQL", OF_CONSUMERS, "Operators"):
                for statement in grants(heading):
                    there.execute(statement)
        try:
            yield url.replace("postgres@", "{role}@")
        finally:
            owner.execute("drop database rights with (force)")
            owner.execute("drop role shop, support")


@pytest.fixture
def on_mysql():
    server = mariadb()
    server.ask("create database shop", "create user shop", "flush privileges")
    url = f"{server.url}/shop?ssl=0"
    assert main(["migrate", url, "--events", "--offsets"]) == 0
    more = [statement.replace(" on ", " on shop.") for statement in grants(OF_CONSUMERS)]
    server.ask(*grants("MySQL and MariaDB"), *more)
    try:
        yield url.replace("root@", "{role}@")
    finally:
        server.ask("drop database shop", "drop user shop")


def works_and_is_swept(url: str) -> None:
    """Claim, renew, complete, replay, find and sweep."""
    now_ms = 1_800_000_000_000
    with Engine(url, Policy(window="1h"), clock=lambda: now_ms, sweep_every_s=None) as engine:
        assert engine.run("k", str, 5, scope="rights") == "5"
        assert engine.run("k", str, 5, scope="rights") == "5"
        (record,) = engine.store.find(Query()).records
        assert record.label == "rights"
        assert engine.store.sweep(now_ms + 2 * DAY_MS) == 1
        assert [found for found in engine.store.check() if found.level == "error"] == []


@pytest.mark.timeout(START_S_MAX)
def test_the_rights_of_the_page_are_enough_on_postgresql(on_postgres):
    """D4, R6."""
    works_and_is_swept(on_postgres.format(role="shop") + "?create=0")


@pytest.mark.timeout(START_S_MAX)
def test_the_rights_of_the_page_are_enough_on_mysql(on_mysql):
    """D4, R6."""
    works_and_is_swept(on_mysql.format(role="shop") + "&create=0")


def emits_and_stores_its_offset(url: str) -> None:
    """A handler emits an event and stores an offset, and a relay publishes the event."""
    published = []

    async def publish(event):
        published.append(event.body)

    async def consume_and_relay():
        async with Inbox(url, consumer="c") as inbox:

            @inbox.handler(mode="transaction")
            async def on_order(_message):
                await current_async_operation().emit("orders", b"1")

            for number in (1, 2):  # the second changes the row
                message = Message(b"", message_id=f"event-{number}")
                offset = PartitionOffset("group", "orders", 0, number)
                assert await on_order.handle(message, offset=offset) == Acknowledge()
        relay = Relay(url, publish)
        try:
            assert await relay.publish_all() == 2
        finally:
            await relay.close()

    asyncio.run(consume_and_relay())
    assert published == [b"1", b"1"]


@pytest.mark.timeout(START_S_MAX)
def test_the_rights_of_the_page_are_enough_for_events_and_offsets_on_postgresql(on_postgres):
    """D4, E2, E5."""
    emits_and_stores_its_offset(on_postgres.format(role="shop") + "?create=0")


@pytest.mark.timeout(START_S_MAX)
def test_the_rights_of_the_page_are_enough_for_events_and_offsets_on_mysql(on_mysql):
    """D4, E2, E5."""
    emits_and_stores_its_offset(on_mysql.format(role="shop") + "&create=0")


@pytest.mark.timeout(START_S_MAX)
def test_support_may_look_and_not_write_on_postgresql(on_postgres):
    """O1, R6."""
    with Engine(on_postgres.format(role="shop") + "?create=0") as engine:
        engine.run("k", str, 5, scope="rights")
    with closing(open_store(on_postgres.format(role="support"), create=False)) as store:
        (record,) = store.find(Query(label="rights")).records
        assert store.get([record.id]) == [record]
        with pytest.raises(StoreUnavailable):
            store.sweep(record.expires_ms + DAY_MS)
