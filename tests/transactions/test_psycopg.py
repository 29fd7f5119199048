"""L9 on psycopg's connections: what the application has set there, and what goes wrong at the end."""

from contextlib import closing

import psycopg
import pytest
from idioms import SHOPS

from coatcheck import Engine, current_operation
from coatcheck.errors import NotCommitted


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


def insert(number):
    current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


def test_a_connection_begins_at_its_own_isolation_level(shop):
    """What the application has set on its connection holds in our transactions, too."""

    def level(number):
        connection = current_operation().connection
        (name,) = connection.execute("show transaction_isolation").fetchone()
        connection.execute("insert into orders values (%s)", (number,))
        return name

    with closing(psycopg.connect(shop.place)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        with closing(Engine(shop.store, transactions=connection)) as engine:
            assert engine.transaction("key", level, 1, scope="orders") == "serializable"
    assert shop.orders() == [1]


def test_a_handler_that_has_rolled_back_by_itself_commits_nothing(shop):
    """Else what it wrote after that would be there without a record."""

    def rolls_back(number):
        connection = current_operation().connection
        connection.rollback()
        connection.execute("insert into orders values (%s)", (number,))

    with (
        closing(psycopg.connect(shop.place)) as connection,
        closing(Engine(shop.store, transactions=connection)) as engine,
    ):
        with pytest.raises(NotCommitted, match="rolled back by itself"):
            engine.transaction("key", rolls_back, 1, scope="orders")
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert shop.orders() == []
    assert shop.records() == 0


def test_a_commit_that_fails_is_no_success(shop):
    """A constraint that is checked at the commit: nothing of it is there, and nothing is kept."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    def breaks():
        current_operation().connection.execute("insert into lines values (7)")

    with (
        closing(psycopg.connect(shop.place)) as connection,
        closing(Engine(shop.store, transactions=connection)) as engine,
    ):
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            engine.transaction("key", breaks, scope="orders")
        assert engine.transaction("key", insert, 1, scope="orders") == 1
    assert shop.ask("select count(*) from lines") == [(0,)]
