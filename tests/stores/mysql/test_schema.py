"""The tables of the MySQL store: creating them, and refusing those that cannot be used."""

from contextlib import closing

import pymysql
import pytest

from coatcheck import Engine
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import open_store
from tests.stores.laws.records import ID, claim_of, id_of
from tests.stores.mysql.support import claim, other_session, query


def test_a_store_that_may_not_create_creates_nothing(url):
    """D4: and reads an existing table with nothing but the right to select."""
    with pytest.raises(Misconfigured, match="coatcheck_records is missing; run"):
        open_store(url, create=False)
    with other_session(url) as other:
        assert query(other, "show tables") == ()
        with closing(open_store(url)) as store:
            store.swap([claim()])
        query(other, "create user reader")
        query(other, "grant select on *.* to reader")
    with closing(open_store(url.replace("root@", "reader@"), create=False)) as store:
        assert store.get([ID]) == [claim_of()]
        with pytest.raises(StoreUnavailable, match="the user may not do this") as caught:
            store.swap([claim(id_of(2))])
        assert not caught.value.is_ambiguous
        errors = [finding.message for finding in store.check() if finding.level == "error"]
        for right in ("insert", "update", "delete"):
            assert any(f"the user may not {right} in coatcheck_records" in e for e in errors)
    with pytest.raises(Misconfigured, match="the user may not do this"):
        open_store(url.replace("root@", "reader@") + "&table=another")
    with other_session(url) as other:
        query(other, "drop user reader")


def test_several_tables_share_a_database_with_those_of_an_application(url):
    """D4: a table of the application is not mistaken for ours."""
    with other_session(url) as other:
        query(other, "create table orders (id int, version int)")
        with pytest.raises(Misconfigured, match="was not made by coatcheck"):
            open_store(url + "&table=orders")
        with closing(open_store(url)) as one, closing(open_store(url + "&table=more")) as two:
            assert one.swap([claim()]) == two.swap([claim()]) == [None]
        tables = {name for (name,) in query(other, "show tables")}
        assert tables == {"orders", "coatcheck_meta", "coatcheck_records", "more"}
        query(other, "drop table more")
        with (
            closing(open_store(url + "&table=more")) as two,
            pytest.raises(StoreUnavailable, match="a table of coatcheck is gone"),
        ):
            two.swap([claim()])


def test_a_table_that_loses_its_key_after_it_was_opened_accepts_no_claim(url):
    """L1: neither on a new connection nor in a transaction."""
    runs = []
    with other_session(url) as other, closing(Engine(url)) as engine:
        engine.ensure_started()
        query(other, "alter table coatcheck_records drop primary key")
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="lost an index"):
                engine.run("order-1", runs.append, 1, scope="orders")
            with pytest.raises(pymysql.MySQLError, match="PRIMARY"):
                engine.transaction("order-2", lambda: None, scope="orders")
        assert not runs
        assert query(other, "select * from coatcheck_records") == ()
        query(other, "alter table coatcheck_records add primary key (id)")
        for _ in range(2):
            engine.run("order-1", runs.append, 1, scope="orders")
            engine.transaction("order-2", runs.append, 2, scope="orders")
    assert runs == [1, 2]
