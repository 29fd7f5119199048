"""`coatcheck doctor` on PostgreSQL: the settings that it reads, and the writes that it tries."""

from contextlib import closing, contextmanager

import psycopg
import pytest

from coatcheck.stores import open_store
from tests.stores.postgres.access import session, the_error
from tests.stores.postgres.swaps import claim
from tests.support.servers import until


def test_opening_warns_of_a_server_that_can_lose_records(url, caplog):
    """D3: the tests' own server has `fsync` off."""
    with closing(open_store(url)) as store:
        assert "fsync = off" in caplog.text
        assert "fsync = off" in store.check()[0].message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("drop table coatcheck_records", "is gone"),
        ("drop table coatcheck_records, coatcheck_schema", "is missing; run `coatcheck migrate"),
        ("delete from coatcheck_schema", "is missing"),
        ("insert into coatcheck_schema values (99)", "upgrade coatcheck"),
    ],
)
def test_the_doctor_checks_the_table_and_its_version(store, url, damage, message):
    """D4, O1: the tables may be gone or changed since the store was opened."""
    with session(url) as other:
        other.execute(damage)
    assert message in the_error(store)


def test_the_doctor_reports_missing_rights_and_an_unlogged_table(url):
    """D3, O1: a role that may only read, and a table that a crash empties."""
    bare, _, schema = url.partition("?schema=")
    role = f"reader_{schema}"
    open_store(url).close()
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(f"create role {role} login")
        connection.execute(f"grant usage on schema {schema} to {role}")
        connection.execute(f"grant select on all tables in schema {schema} to {role}")
        connection.execute(f"alter table {schema}.coatcheck_records set unlogged")
    with closing(open_store(url.replace("postgres@", f"{role}@"), create=False)) as store:
        found = {finding.level: finding.message for finding in store.check()}
    assert "may not write" in found["error"]
    assert "unlogged" in found["warning"]


@contextmanager
def as_guest(url):
    """A store of a role that has all rights to our tables but does not own them; and the owner."""
    schema = url.partition("?schema=")[2]
    role = f"guest_{schema}"
    open_store(url).close()
    with session(url, autocommit=True) as owner:
        owner.execute(f"create role {role} login; grant usage on schema {schema} to {role}")
        owner.execute(f"grant select, insert, update, delete on coatcheck_records to {role}")
        owner.execute(f"grant select on coatcheck_schema to {role}")
        with closing(open_store(url.replace("postgres@", f"{role}@"), create=False)) as store:
            yield store, owner


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ((), "no key can be claimed: new row violates row-level security"),
        (("insert",), "no key can be claimed: new row violates row-level security"),
        (("insert", "select"), "can never be completed: the statement had no effect"),
        (("insert", "select", "update"), "records cannot be deleted"),
    ],
)
def test_the_doctor_tries_what_row_security_permits(url, allowed, message):
    """O1, D2: a right that was granted may still have no effect."""
    with as_guest(url) as (store, owner):
        owner.execute("alter table coatcheck_records enable row level security")
        for right in allowed:
            rows = "with check (true)" if right == "insert" else "using (true)"
            owner.execute(f"create policy may_{right} on coatcheck_records for {right} {rows}")
        assert message in the_error(store)
        assert any("row security is on" in finding.message for finding in store.check())


def test_the_doctor_tries_whether_triggers_let_a_record_through(url):
    """O1, D2: one that drops the row, and one that raises."""
    with as_guest(url) as (store, owner):
        for body, message in (
            ("return null", "the statement had no effect"),
            ("raise 'not today'", "not today"),
        ):
            owner.execute(
                f"create or replace function meddle() returns trigger language plpgsql as"
                f" $$ begin {body}; end $$"
            )
            owner.execute(
                "create or replace trigger meddling before update on coatcheck_records"
                " for each row execute function meddle()"
            )
            assert f"can never be completed: {message}" in the_error(store)


def test_the_doctor_rolls_back_and_waits_for_no_lock(url):
    """O1: a locked table is reported instead."""
    with as_guest(url) as (store, owner):
        assert {finding.level for finding in store.check()} == {"warning"}  # of `fsync`
        assert owner.execute("select count(*) from coatcheck_records").fetchone() == (0,)
        with session(url) as other:
            other.execute("lock table coatcheck_records")
            assert any(
                "another session has locked it" in finding.message for finding in store.check()
            )
        assert store.swap([claim()]) == [None]


@pytest.mark.parametrize(
    ("level", "standbys", "is_warned"),
    [("local", "", False), ("local", "'*'", True), ("off", "", True), ("on", "'*'", False)],
)
def test_the_doctor_warns_that_a_failover_would_lose_records(own, level, standbys, is_warned):
    """D3: a standby that no commit waits for may lack acknowledged writes."""
    with psycopg.connect(own.url, autocommit=True) as connection:
        open_store(own.url).close()
        connection.execute(f"alter role postgres set synchronous_commit = {level}")
        connection.execute(f"alter system set synchronous_standby_names = {standbys or 'default'}")
        connection.execute("select pg_reload_conf()")
        warning = f"synchronous_commit = {level}"

        def is_found():
            with closing(open_store(own.url)) as store:
                found = store.check()
            return any(warning in finding.message for finding in found)

        until(lambda: is_found() == is_warned)
