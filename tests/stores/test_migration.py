"""D4: schemas are versioned, made by themselves in development and by a command in production.

There is only one version so far, so a second and a third one are made up here: one that could not
be made twice, and one that counts how often it was made.
"""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psycopg
import pymysql
import pytest

from coatcheck import AsyncEngine, Engine
from coatcheck.cli import main
from coatcheck.core.record import Swap
from coatcheck.errors import Misconfigured
from coatcheck.stores import migrate_store, open_store
from coatcheck.stores.mysql import schema as mysql_schema
from coatcheck.stores.postgres import schema as postgres_schema
from coatcheck.stores.sqlite import schema as sqlite_file
from tests.stores.laws.records import claim_of, id_of
from tests.support.servers.dynamodb import dynamodb
from tests.support.servers.mariadb import PLAIN, mariadb
from tests.support.servers.postgres import postgres
from tests.support.servers.redis import redis_server

NODES = 6
RECORDS = [claim_of(id_of(number)) for number in range(1, 20)]
IDS = [record.id for record in RECORDS]


@dataclass
class Place:
    """A database of one kind that nobody has used, and how it is looked into."""

    url: str
    module: ModuleType
    next: tuple[Any, ...]  # what its list of migrations would grow by
    ask: Callable[[str], list[tuple[Any, ...]]]
    shape: tuple[str, ...]  # what tells all about its tables

    def looks(self) -> list[list[tuple[Any, ...]]]:
        """What its tables are like, whoever has made them."""
        return [self.ask(question) for question in self.shape]

    def option(self, text: str) -> str:
        """Its URL with one more option."""
        return f"{self.url}{'&' if '?' in self.url else '?'}{text}"


ADD = "alter table {} add column colour integer default 7"
COUNT = "update {} set attempt = coalesce(attempt, 1) + 1"


def sqlite_place(directory) -> Place:
    path = directory / "keys.db"

    def ask(statement):
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute(statement).fetchall()

    steps = tuple((text.format("coatcheck_records"),) for text in (ADD, COUNT))
    shape = ("select name, sql from sqlite_master order by name", "select * from coatcheck_meta")
    return Place(f"sqlite:///{path}", sqlite_file, steps, ask, shape)


def postgres_place(_directory) -> Place:
    url = postgres().fresh_url()
    schema = url.rpartition("=")[2]

    def ask(statement):
        with psycopg.connect(postgres().url) as connection:
            connection.execute(f"set search_path to {schema}")
            return connection.execute(statement).fetchall()

    def inside(column):
        return f"where {column} = '{schema}' order by 1{', 2' if 'table' in column else ''}"

    columns = "table_name, column_name, data_type, column_default, is_nullable"
    tables = f"where relnamespace = '{schema}'::regnamespace and relkind = 'r'"
    shape = (
        f"select {columns} from information_schema.columns {inside('table_schema')}",
        f"select replace(indexdef, '{schema}', '') from pg_indexes {inside('schemaname')}",
        f"select relname, reloptions from pg_class {tables} order by 1",
        "select version from coatcheck_schema order by 1",
    )
    steps = tuple(text.format("{records}") for text in (ADD, COUNT))
    return Place(url, postgres_schema, steps, ask, shape)


def mysql_place(_directory) -> Place:
    url = mariadb().fresh_url()
    port, _, database = url.partition("?")[0].rpartition(":")[2].partition("/")

    def ask(statement):
        options = {"host": "127.0.0.1", "port": int(port), "user": "root", "database": database}
        with (
            closing(pymysql.connect(**options, **PLAIN)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())

    shape = (
        "show create table coatcheck_records",
        "show create table coatcheck_meta",
        "select * from coatcheck_meta",
    )
    return Place(url, mysql_schema, (ADD, COUNT), ask, shape)


PLACES = {"sqlite": sqlite_place, "postgres": postgres_place, "mysql": mysql_place}


@pytest.fixture(params=PLACES)
def make(request, tmp_path_factory) -> Callable[[], Place]:
    """Makes databases of each kind."""
    return lambda: PLACES[request.param](tmp_path_factory.mktemp("place"))


@pytest.fixture
def place(make) -> Place:
    return make()


@pytest.fixture
def release(monkeypatch) -> Callable[[Place], None]:
    """Go on to a release that has two migrations more."""

    def grow(place: Place) -> None:
        longer = (*place.module.MIGRATIONS, *place.next)
        monkeypatch.setattr(place.module, "MIGRATIONS", longer)

    return grow


def filled(place: Place) -> None:
    with closing(open_store(place.url)) as store:
        assert store.swap([Swap(record.id, 0, record) for record in RECORDS]) == [None] * 19


UPGRADED = [record._replace(attempt=2) for record in RECORDS]


# ------------------------------------------------------------------------------------- by themselves


def test_an_old_schema_is_upgraded_and_its_records_are_kept(place, release):
    """D4: by whoever opens it first, and it can be used."""
    filled(place)
    release(place)
    with closing(open_store(place.url)) as store:
        assert store.get(IDS) == UPGRADED
        assert store.swap([Swap(id_of(50), 0, claim_of(id_of(50)))]) == [None]
        assert store.swap([Swap(IDS[0], RECORDS[0].version, None)]) == [None]
    with closing(open_store(place.url)) as store:
        assert store.get(IDS)[1:] == UPGRADED[1:], "and no second time"


def test_nodes_that_start_at_once_upgrade_once(place, release):
    """D4: each migration is made by one of them, and all of them go on."""
    filled(place)
    release(place)
    start = threading.Barrier(NODES)

    def node(number: int) -> list[Any]:
        start.wait()
        with closing(open_store(place.url)) as store:
            store.swap([Swap(id_of(100 + number), 0, claim_of(id_of(100 + number)))])
            return store.get(IDS)

    with ThreadPoolExecutor(NODES) as threads:
        assert list(threads.map(node, range(NODES))) == [UPGRADED] * NODES


def test_upgrading_and_making_anew_lead_to_the_same_schema(make, release):
    """D4: whatever is true of the one database is true of the other."""
    old, new = make(), make()
    open_store(old.url).close()
    before = old.looks()
    release(old)
    open_store(old.url).close()
    open_store(new.url).close()
    assert old.looks() == new.looks()
    assert old.looks() != before


def test_one_upgrade_that_was_cut_short_is_finished_by_the_next(release):
    """D4: MySQL cannot undo a change of a table, so it may be made and not be noted."""
    place = mysql_place(None)
    filled(place)
    release(place)
    place.ask(ADD.format("coatcheck_records"))
    with closing(open_store(place.url)) as store:
        assert store.get(IDS) == UPGRADED


def test_an_upgrade_that_fails_leaves_the_old_schema(place, monkeypatch):
    """D4: with its records, and for the release that knows it."""
    filled(place)
    known = place.module.MIGRATIONS
    broken = ("select nonsense",) if place.module is sqlite_file else "select nonsense"
    with monkeypatch.context() as patch:
        patch.setattr(place.module, "MIGRATIONS", (*known, broken))
        with pytest.raises(Exception, match="nonsense"):
            open_store(place.url)
    with closing(open_store(place.url)) as store:
        assert store.get(IDS) == RECORDS


# ---------------------------------------------------------------------------------------- explicitly


def asked(capsys, *words: str) -> tuple[int, str, str]:
    """The exit code of `coatcheck migrate`, what it answered and what it complained of."""
    code = main(["migrate", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("engine", [Engine, AsyncEngine])
def test_an_engine_that_must_not_create_says_which_command_does(place, engine, capsys):
    """D4: in production the schema is made before the servers start."""
    strict = place.option("create=0")

    async def start() -> None:
        started = engine(strict).ensure_started()
        if started is not None:
            await started

    with pytest.raises(Misconfigured, match="coatcheck migrate"):
        asyncio.run(start())
    assert migrate_store(place.url, only_look=True).found == 0, "nothing was created"
    assert asked(capsys, place.url)[0] == 0
    with closing(open_store(strict)) as store:
        assert store.swap([Swap(IDS[0], 0, RECORDS[0])]) == [None]


def test_an_engine_that_must_not_create_does_not_upgrade(place, release, capsys):
    """D4: and an older schema is left as it is."""
    filled(place)
    before = place.looks()
    release(place)
    with pytest.raises(Misconfigured, match=r"older than 3 .*`coatcheck migrate"):
        open_store(place.option("create=0"))
    assert place.looks() == before
    assert asked(capsys, place.url)[0] == 0
    with closing(open_store(place.option("create=0"))) as store:
        assert store.get(IDS) == UPGRADED


def test_migrate_tells_what_is_to_be_done_and_then_does_it(place, release, capsys):
    """D4, O1: --check only tells, for a pipeline that wants to know."""
    code, out, err = asked(capsys, place.url, "--check")
    assert (code, err) == (1, "")
    assert ": missing; schema version" in out
    assert asked(capsys, place.url, "--check")[0] == 1, "telling makes nothing"
    code, out, _ = asked(capsys, place.url)
    assert code == 0
    assert "created, schema version 1" in out
    filled(place)
    code, out, _ = asked(capsys, place.url)
    assert (code, "up to date" in out) == (0, True)
    assert asked(capsys, place.url, "--check")[0] == 0
    release(place)
    code, out, _ = asked(capsys, "--store", place.url, "--check")
    assert (code, "has schema version 1, this release needs 3" in out) == (1, True)
    code, out, _ = asked(capsys, "--store", place.url)
    assert (code, "upgraded from schema version 1 to 3" in out) == (0, True)


def test_migrate_answers_programs_in_json(place, capsys):
    """D4, O1."""
    told = []
    for words in (("--check",), (), ()):
        code, out, _ = asked(capsys, place.url, "--json", *words)
        document = json.loads(out)
        told.append((code, document["found"], document["wanted"], document["done"]))
    assert told == [(1, 0, 1, False), (0, 0, 1, True), (0, 1, 1, False)]


def test_migrate_also_works_where_engines_must_not_create(place, capsys):
    """D4: the same URL for both, so that it is configured once."""
    assert asked(capsys, place.option("create=0"))[0] == 0
    open_store(place.option("create=0")).close()


def test_a_newer_schema_is_refused_and_left_alone(place, monkeypatch, capsys):
    """D4: by an old release, and by its command line."""
    with monkeypatch.context() as patch:
        patch.setattr(place.module, "MIGRATIONS", (*place.module.MIGRATIONS, *place.next))
        open_store(place.url).close()
    before = place.looks()
    for words in ((), ("--check",)):
        code, _, err = asked(capsys, place.url, *words)
        assert code == 2
        assert "upgrade coatcheck" in err
    with pytest.raises(Misconfigured, match=r"schema 3, but this release .* up to 1; upgrade"):
        open_store(place.url)
    assert place.looks() == before


def test_where_there_is_no_schema_there_is_nothing_to_make(capsys):
    """D4: a prefix without records is an empty store."""
    for words in ((), ("--check",)):
        code, out, _ = asked(capsys, redis_server().fresh_url(), *words)
        assert (code, "nothing to do" in out) == (0, True)
    assert "nothing to do" in asked(capsys, "memory://")[1]
    assert asked(capsys, "redis://127.0.0.1:1/0")[0] == 2
    with closing(open_store(f"{redis_server().fresh_url()}&create=0")) as store:
        assert store.get(IDS[:1]) == [None]


def test_a_table_of_dynamodb_is_made_by_migrate(capsys):
    """D4: and named where it is missing."""
    url = dynamodb().fresh_url()
    name = url.removeprefix("dynamodb://").partition("?")[0]
    with pytest.raises(Misconfigured, match=rf"no table {name}.*coatcheck migrate"):
        open_store(f"{url}&create=0")
    code, out, _ = asked(capsys, url, "--check")
    assert (code, f"table {name}" in out, ": missing;" in out) == (1, True, True)
    code, out, _ = asked(capsys, url)
    assert (code, f"table {name}" in out, "created" in out) == (0, True, True)
    assert "up to date" in asked(capsys, url)[1]
    open_store(f"{url}&create=0").close()


@pytest.mark.parametrize("value", ["2", "perhaps", ""])
def test_an_answer_that_is_none_is_refused(value, tmp_path):
    """D4: neither yes nor no."""
    with pytest.raises(Misconfigured, match="create=0"):
        open_store(f"sqlite:///{tmp_path}/a.db?create={value}")
    assert list(tmp_path.iterdir()) == []


def test_other_options_are_not_touched(tmp_path):
    """D1: whatever stands before and after it."""
    url = f"sqlite:///{tmp_path}/a.db?compact=1&create=1&busy_timeout=2s"
    assert migrate_store(url, only_look=True).found == 0
    with closing(open_store(url)) as store:
        assert store._busy_timeout_s == 2.0
