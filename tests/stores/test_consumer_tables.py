"""D4: the tables of events and offsets are made by their users, or by a command in production."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from coatcheck.cli import main
from coatcheck.consumer.relay import Relay
from coatcheck.errors import Misconfigured
from coatcheck.stores import open_store
from coatcheck.stores.event_table import EventTable
from coatcheck.stores.offset_table import OffsetTable
from coatcheck.stores.transaction_statements import transaction_statements_of
from tests.stores.test_migration import NODES, PLACES

TABLES = {"--events": EventTable, "--offsets": OffsetTable}


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    return PLACES[request.param](tmp_path)


@pytest.fixture(params=TABLES)
def option(request):
    return request.param


def is_there(place, option):
    with closing(open_store(place.url)) as store:
        return TABLES[option](transaction_statements_of(store)).is_there()


def migrate(capsys, place, *options):
    """The exit code, and what was printed as JSON."""
    code = main(["migrate", place.url, "--json", *options])
    return code, list(json.loads(capsys.readouterr().out)["tables"].values())


def test_migrate_creates_the_table_that_its_option_names(place, option, capsys):
    main(["migrate", place.url])
    capsys.readouterr()
    assert not is_there(place, option)
    assert migrate(capsys, place, "--check", option) == (1, ["missing"])
    assert not is_there(place, option)
    assert migrate(capsys, place, option) == (0, ["created"])
    assert is_there(place, option)
    assert migrate(capsys, place, option) == (0, ["up to date"])
    assert migrate(capsys, place, "--check", option) == (0, ["up to date"])


def test_migrate_says_what_it_did_in_a_line_for_each_table(place, capsys):
    assert main(["migrate", place.url, "--events", "--offsets"]) == 0
    first, *others = capsys.readouterr().out.replace('"', "").splitlines()
    assert "created, schema version" in first
    names = [line.rpartition(".")[2] for line in others]
    assert names == ["coatcheck_events: created", "coatcheck_offsets: created"]


def test_a_check_of_a_database_without_any_table_creates_none(place, option, capsys):
    assert migrate(capsys, place, "--check", option) == (1, [])
    assert not is_there(place, option)


def test_nodes_that_start_at_once_create_one_table(place, option):
    """PostgreSQL refuses all but one of them, also with "if not exists"."""
    start = threading.Barrier(NODES)

    def node(_number):
        with closing(open_store(place.url)) as store:
            table = TABLES[option](transaction_statements_of(store))
            start.wait()
            table.create_if_allowed()
            return table.is_there()

    open_store(place.url).close()
    with ThreadPoolExecutor(NODES) as threads:
        assert list(threads.map(node, range(NODES))) == [True] * NODES


def test_with_create_0_nothing_is_created_and_the_command_is_named(place, option):
    open_store(place.url).close()
    with closing(open_store(place.option("create=0"))) as store:
        table = TABLES[option](transaction_statements_of(store))
        with pytest.raises(Misconfigured, match=f"coatcheck migrate {option}"):
            table.create_if_allowed()
    assert not is_there(place, option)
    assert main(["migrate", place.url, option]) == 0
    with closing(open_store(place.option("create=0"))) as store:
        TABLES[option](transaction_statements_of(store)).create_if_allowed()


def test_a_relay_with_create_0_names_the_command(place):
    open_store(place.url).close()

    async def publish(_event):
        raise AssertionError("there is nothing to publish")

    async def main_of_relay():
        relay = Relay(place.option("create=0"), publish)
        try:
            await relay.publish_all()
        finally:
            await relay.close()

    with pytest.raises(Misconfigured, match="coatcheck migrate --events"):
        asyncio.run(main_of_relay())
