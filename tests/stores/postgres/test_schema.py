"""The tables of the PostgreSQL store: how they are created, and where."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import quote

import psycopg
import pytest

from coatcheck import Engine, Misconfigured
from coatcheck.stores import Query, migrate_store, open_store
from coatcheck.stores.postgres import schema as postgres_schema
from tests.stores.laws.records import ID, RETENTION_MS
from tests.stores.postgres.swaps import claim
from tests.support.servers import START_S_MAX, until
from tests.support.servers.postgres import postgres


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_node_that_waited_for_another_sees_the_tables_that_it_created(url, level):
    """D4: also if the default of the role is a snapshot for the whole transaction."""
    options = "-c default_transaction_isolation=" + level.replace(" ", "\\ ")
    with (
        psycopg.connect(postgres().url, autocommit=True) as other,
        ThreadPoolExecutor(3) as threads,
    ):
        lock = (postgres_schema._LOCK,)
        other.execute("select pg_advisory_lock(%s)", lock)
        nodes = [threads.submit(open_store, f"{url}&options={quote(options)}") for _ in range(3)]
        waiting = "select from pg_locks where locktype = 'advisory' and not granted"
        until(lambda: other.execute(waiting).rowcount == 3)
        other.execute("select pg_advisory_unlock(%s)", lock)
        for node in nodes:
            node.result(START_S_MAX).close()


def test_two_schemas_are_separate_stores(store):
    with closing(open_store(postgres().fresh_url())) as other:
        store.swap([claim()])
        assert other.get([ID]) == [None]
        assert other.find(Query()).records == []


@pytest.mark.parametrize("schema", ["a%b", "a%sb", "a\0b", "x" * 64, "ü" * 32])
@pytest.mark.parametrize("use", [open_store, migrate_store])
def test_a_schema_name_that_cannot_be_used_is_refused(schema, use):
    """D4: drivers take a percent sign for a placeholder, and PostgreSQL truncates long names."""
    with pytest.raises(Misconfigured, match="schema"):
        use(f"{postgres().url}?schema={quote(schema)}")


@pytest.mark.parametrize("schema", ["Shop", "a\"b'c\\d", "a{b}.c", "x" * 63, "ü" * 31])
def test_a_schema_may_have_any_other_name(schema):
    """D4."""
    with closing(Engine(f"{postgres().url}?schema={quote(schema)}")) as engine:
        assert engine.run("key", lambda: 1, scope="orders") == 1
        assert engine.transaction("key", lambda: 2, scope="payments") == 2
        assert len(engine.store.find(Query()).records) == 2
        assert engine.store.sweep(engine.store.now_ms() + 100 * RETENTION_MS) == 2


def test_an_existing_schema_needs_no_right_to_create_one(url):
    """D4: an operator created it, and granted only the right to create tables in it."""
    bare, _, schema = url.partition("?schema=")
    role = f"creator_{schema}"
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(f"create schema {schema}")
        connection.execute(f"create role {role} login")
        connection.execute(f"grant usage, create on schema {schema} to {role}")
    open_store(url.replace("postgres@", f"{role}@")).close()
