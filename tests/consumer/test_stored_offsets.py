"""Kafka's offsets in the handler's transaction, with both clients (E2)."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing

import pytest

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox
from tests.consumer.test_kafka import CLIENTS, published, settings_of
from tests.consumer.waits import until
from tests.support.servers.kafka import kafka


@pytest.fixture(params=CLIENTS)
def client(request):
    return request.param


class Ledger:
    """The database of the handler and of the inbox."""

    def __init__(self, path):
        self.path = path
        self.run("create table effects (event text)")

    @property
    def url(self):
        return f"sqlite:///{self.path}"

    def run(self, statement):
        with closing(sqlite3.connect(self.path, timeout=20)) as connection, connection:
            return connection.execute(statement).fetchall()

    def effects(self):
        return [event for (event,) in self.run("select event from effects order by rowid")]

    def offsets(self, group):
        """Next offsets by partition."""
        columns = "partition_number, next_offset"
        where = f"consumer_group = '{group}'"
        return dict(self.run(f"select {columns} from coatcheck_offsets where {where}"))

    def both(self, group):
        """The effects and offsets at one moment."""
        effects = "(select count(*) from effects)"
        stored = (
            "(select coalesce(sum(next_offset), 0) from coatcheck_offsets "
            f"where consumer_group = '{group}')"
        )
        return self.run(f"select {effects}, {stored}")[0]


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.db")


@pytest.fixture
def topic():
    """A topic with a record in partition 3; its consumers' groups have the same name."""
    name = kafka().fresh_name()
    published(name, [("first", b"first")], 3)
    return name


def settings_for(client, group, **more):
    name = "group.id" if client == "kafka" else "group_id"
    return {**settings_of(client), name: group, **more}


@asynccontextmanager
async def consuming(client, ledger, topic, function=None, *, settings=None, **options):
    """A consumer of *topic* in a task, which is stopped at the end."""

    async def write(message, operation):
        await operation.connection.execute("insert into effects values (?)", (message.message_id,))

    async with Inbox(ledger.url, consumer="c", backoff="10ms", **options) as inbox:
        handler = inbox.handler(name="h", mode="transaction")(function or write)
        stop = asyncio.Event()
        task = asyncio.create_task(
            CLIENTS[client].consume(
                settings or settings_for(client, topic),
                handler,
                topics=[topic],
                stop=stop,
                offsets_in_store=True,
            )
        )
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, 20)


def events(*names):
    return [(name, name.encode()) for name in names]


async def effects_are(ledger, *names):
    async def are_there():
        return sorted(ledger.effects()) == sorted(names)

    await until(are_there)


def test_the_offset_commits_with_the_effect(client, ledger, topic):
    """E2: at no moment is one of them there without the other."""
    published(topic, events(*"abcdefgh"), 0)
    moments = set()

    async def main():
        async with consuming(client, ledger, topic):

            async def is_done():
                moments.add(ledger.both(topic))
                return len(ledger.effects()) == 9

            # The table is there soon after the consumer has started.
            await until(lambda: table_is_there(ledger))
            await until(is_done, pause_s=0.001)

    asyncio.run(main())
    assert {effects - offsets for effects, offsets in moments} == {0}
    assert ledger.offsets(topic) == {0: 8, 3: 1}


async def table_is_there(ledger):
    return ledger.run("select 1 from sqlite_master where name = 'coatcheck_offsets'")


def test_a_sync_handler_stores_its_offset_too(client, ledger, topic):
    published(topic, events("a", "b"), 0)

    def write(message, operation):
        operation.connection.execute("insert into effects values (?)", (message.message_id,))

    async def main():
        async with consuming(client, ledger, topic, write):
            await effects_are(ledger, "first", "a", "b")

    asyncio.run(main())
    assert ledger.offsets(topic) == {0: 2, 3: 1}


def test_a_handler_that_is_rolled_back_leaves_neither(client, ledger, topic):
    """E2: and the next attempt leaves both."""
    published(topic, events("a", "b"), 0)
    found = []

    async def main():
        async def fail_once(message, operation):
            await operation.connection.execute(
                "insert into effects values (?)", (message.message_id,)
            )
            if message.message_id == "b" and not found:
                found.append("failing")
                raise ValueError
            if message.message_id == "b":
                found.append((ledger.effects().count("b"), ledger.offsets(topic)[0]))

        async with consuming(client, ledger, topic, fail_once):
            await effects_are(ledger, "first", "a", "b")

    asyncio.run(main())
    assert found == ["failing", (0, 1)]
    assert ledger.offsets(topic)[0] == 2


def test_a_restart_begins_at_the_stored_offset_if_kafka_has_none(client, ledger, topic):
    """E2: Kafka has forgotten the group, and so has the store all markers: nothing comes again."""
    published(topic, events("a", "b"), 0)
    reset = "auto.offset.reset" if client == "kafka" else "auto_offset_reset"

    async def main():
        async with consuming(client, ledger, topic):
            await effects_are(ledger, "first", "a", "b")
        # The same rows for a group that Kafka does not know.
        other = f"{topic}-restored"
        ledger.run(f"update coatcheck_offsets set consumer_group = '{other}'")
        ledger.run("delete from coatcheck_records")
        published(topic, events("c"), 0)
        for where in ("earliest", "latest"):
            settings = settings_for(client, other, **{reset: where})
            async with consuming(client, ledger, topic, settings=settings):
                await effects_are(ledger, "first", "a", "b", "c")
                published(topic, events(f"d-{where}"), 0)

                async def is_handled(name=f"d-{where}"):
                    return name in ledger.effects()

                await until(is_handled)
            assert ledger.effects().count("c") == 1
            ledger.run(f"delete from effects where event = 'd-{where}'")
            ledger.run("delete from coatcheck_records")
            other_again = f"{other}-again"
            ledger.run(f"update coatcheck_offsets set consumer_group = '{other_again}'")
            other = other_again

    asyncio.run(main())
    assert sorted(ledger.effects()) == ["a", "b", "c", "first"]
    assert ledger.offsets(f"{topic}-restored-again-again") == {0: 5, 3: 1}


def test_a_record_whose_marker_is_there_is_acknowledged(client, ledger, topic):
    """E2: the offset is behind, so that the records come again, as duplicates."""
    published(topic, events("a", "b"), 0)

    async def main():
        async with consuming(client, ledger, topic):
            await effects_are(ledger, "first", "a", "b")
        ledger.run(
            f"update coatcheck_offsets set consumer_group = '{topic}-2', next_offset = "
            "case partition_number when 0 then 1 else 0 end"
        )
        published(topic, events("c"), 0)
        async with consuming(client, ledger, topic, settings=settings_for(client, f"{topic}-2")):
            await effects_are(ledger, "first", "a", "b", "c")

    asyncio.run(main())
    assert ledger.offsets(f"{topic}-2")[0] == 3


def test_a_later_offset_of_kafka_is_not_undone(client, ledger, topic):
    """A dead letter, for example, has no transaction that could store its offset."""
    published(topic, events("a", "b"), 0)

    async def main():
        async with consuming(client, ledger, topic):
            await effects_are(ledger, "first", "a", "b")
        ledger.run("update coatcheck_offsets set next_offset = 0")
        ledger.run("delete from coatcheck_records")
        published(topic, events("c"), 0)
        async with consuming(client, ledger, topic):
            await effects_are(ledger, "first", "a", "b", "c")

    asyncio.run(main())
    assert ledger.offsets(topic)[0] == 3


def test_partitions_are_assigned_one_by_one_if_the_settings_say_so(ledger, topic):
    published(topic, events("a", "b"), 0)
    settings = settings_for("kafka", topic)
    settings["partition.assignment.strategy"] = "cooperative-sticky"

    async def main():
        async with consuming("kafka", ledger, topic, settings=settings):
            await effects_are(ledger, "first", "a", "b")
        ledger.run(f"update coatcheck_offsets set consumer_group = '{topic}-2'")
        ledger.run("delete from coatcheck_records")
        published(topic, events("c"), 0)
        other = {**settings, "group.id": f"{topic}-2"}
        async with consuming("kafka", ledger, topic, settings=other):
            await effects_are(ledger, "first", "a", "b", "c")

    asyncio.run(main())
    assert ledger.offsets(f"{topic}-2") == {0: 3, 3: 1}


@pytest.mark.parametrize(
    ("mode", "group", "words"),
    [("record", "g", "mode='transaction'"), ("transaction", "g" * 256, "1 to 255 characters")],
)
def test_what_cannot_be_stored_is_refused(client, tmp_path, mode, group, words):
    async def main():
        with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            handler = inbox.handler(name="h", mode=mode)(lambda message: None)
            with pytest.raises(Misconfigured, match=words):
                await CLIENTS[client].consume(
                    settings_for(client, group), handler, topics=["t"], offsets_in_store=True
                )

    asyncio.run(main())
