"""L9 on psycopg's connections: in how many journeys, and what a value may say there."""

import asyncio
from contextlib import closing

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from idioms import SHOPS

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.core.record import GONE, Swap, completed
from coatcheck.core.serve import Ticket, first_attempt
from coatcheck.errors import NotCommitted
from coatcheck.stores import open_store
from coatcheck.stores.ledger import ledger_of
from coatcheck.stores.postgres_ledger import SPELLED_BYTES_MAX


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


def insert(number):
    current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


def journeys(trace):
    """How often something was sent that waits for an answer; a line is time, who, length, what."""
    lines = [line.split("\t") for line in trace.read_text().splitlines()]
    return sum(who == "F" and what in ("Query", "Sync") for _, who, _, what, *_ in lines)


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_transaction_is_begun_with_its_claim_and_committed_with_its_end(
    shop, tmp_path, autocommit
):
    """Three journeys with the handler's own statement; the driver alone would make five."""
    trace = tmp_path / "trace"
    with (
        closing(psycopg.connect(shop.place, autocommit=autocommit)) as connection,
        closing(Engine(shop.store, transactions=connection)) as engine,
        trace.open("w") as file,
    ):
        engine.transaction("first", insert, 1, scope="orders")
        connection.pgconn.trace(file.fileno())
        engine.transaction("second", insert, 2, scope="orders")
        connection.pgconn.untrace()
    assert shop.orders() == [1, 2]
    assert journeys(trace) == 3


def test_an_async_transaction_makes_no_more_journeys(shop, tmp_path):
    trace = tmp_path / "trace"

    async def insert_async(number):
        await current_operation().connection.execute("insert into orders values (%s)", (number,))

    async def both():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection, AsyncEngine(shop.store, transactions=connection) as engine:
            await engine.transaction("first", insert_async, 1, scope="orders")
            with trace.open("w") as file:
                connection.pgconn.trace(file.fileno())
                await engine.transaction("second", insert_async, 2, scope="orders")
                connection.pgconn.untrace()

    asyncio.run(both())
    assert shop.orders() == [1, 2]
    assert journeys(trace) == 3


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


def test_a_large_result_goes_as_a_parameter(shop):
    large = "x" * (SPELLED_BYTES_MAX + 1)
    with (
        closing(psycopg.connect(shop.place)) as connection,
        closing(Engine(shop.store, transactions=connection)) as engine,
    ):
        for _ in range(2):
            result = engine.transaction("key", lambda: insert(1) and large, scope="orders")
            assert result == large
    assert shop.orders() == [1]


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


# --- what a value may say ---------------------------------------------------------------------

WORDS = st.one_of(
    st.text(max_size=64),
    st.sampled_from(["'", "\\", "\\'; drop table orders; --", "%s", "$1", "'||'", "E'\\x41'"]),
)
OCTETS = st.one_of(st.none(), st.binary(max_size=64))
TIMES = st.integers(1, 2**41)


@st.composite
def records(draw):
    """A claim, of whatever key; and how it ends."""
    ticket = Ticket(
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.one_of(st.just(b""), st.binary(min_size=16, max_size=16))),
        draw(TIMES),
        draw(st.integers(0, 2**63 - 1)),
        *(draw(WORDS) for _ in range(3)),
    )
    claim = first_attempt(ticket, Policy(), GONE, ticket.now_ms)
    claim = claim._replace(attempt=draw(st.integers(1, 9)), progress=draw(OCTETS))
    return claim, completed(claim, draw(OCTETS))


@pytest.fixture(scope="module", params=["on", "off"])
def ledger_and_session(request, tmp_path_factory):
    """A session that takes a backslash as it is, and one that does not."""
    shop = SHOPS["postgres"](tmp_path_factory.mktemp("shop"))
    store = open_store(shop.store)
    with closing(store), psycopg.connect(shop.place) as connection:
        connection.execute(f"set standard_conforming_strings = {request.param}")
        connection.execute("set escape_string_warning = off")
        connection.commit()
        yield ledger_of(store), connection


def written(connection, text, values=None):
    """What stands in the table when this was executed; undone by the next."""
    connection.execute(text, values)
    return connection.execute("select * from coatcheck_records").fetchall()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(both=records())
def test_what_is_spelled_out_keeps_what_parameters_keep(ledger_and_session, both):
    """And no value says anything, be it a quote, a mark or a statement."""
    ledger, connection = ledger_and_session
    claim, end = both
    first = next(ledger.claim(Swap(claim.id, 0, claim), 1_000))
    second = ledger.change(Swap(claim.id, claim.version, end))
    kept = []
    for spells in (True, False):
        for text, values, spelled in (first, second):
            args = (spelled(),) if spells else (text, values)
            kept.append(written(connection, *args))
        connection.rollback()
    assert kept[0] == kept[2]
    assert kept[1] == kept[3]
    assert len(kept[1]) == 1
