"""L9 in every idiom: record and effect are one transaction of the application's own connection."""

import inspect
from contextlib import closing

import pytest

from coatcheck import current_operation
from coatcheck.core.record import IN_DOUBT
from coatcheck.errors import KeyReused, Misconfigured, NotCommitted, OutcomeUnknown
from coatcheck.stores import Query, open_store
from coatcheck.transactions.sources import acquire, acquire_async, connection_source
from tests.transactions.idioms import IDIOMS, Idiom, drive, settled

DJANGO = [idiom for idiom in IDIOMS if idiom.name.startswith("django")]
COMMITTED = [idiom for idiom in IDIOMS if idiom not in DJANGO]
# Neither the store's own connections, nor scoped sessions, which are never a single one's.
GIVEN = [idiom for idiom in COMMITTED if not idiom.name.startswith(("own", "scoped"))]
# A site closes its scoped session in a teardown, so that stays open until our end.
CLOSED = [idiom for idiom in IDIOMS if not idiom.name.startswith("scoped")]


def test_record_and_effect_are_committed_together_and_replayed(harness):
    assert harness.place("a", 1) == {"number": 1}
    assert harness.place("a", 1) == {"number": 1}
    assert harness.runs == [1]
    assert harness.shop.orders() == [1]
    assert harness.shop.records() == 1


def test_another_process_replays_what_was_committed_here(open_harness):
    first, second = open_harness(), open_harness()
    first.place("a", 1)
    assert second.place("a", 1) == {"number": 1}
    assert second.runs == []
    with pytest.raises(KeyReused):
        second.place("a", 2)


def test_an_error_of_the_handler_leaves_nothing_at_all(harness):
    def fail(number):
        raise ValueError(number)

    with pytest.raises(ValueError, match="7"):
        harness.done(harness.engine.transaction("a", harness.handler(fail), 7, scope="orders"))
    assert harness.shop.orders() == []
    assert harness.shop.records() == 0
    assert harness.place("a", 7) == {"number": 7}
    assert harness.runs == [7, 7]
    assert harness.shop.orders() == [7]


def test_a_row_that_cannot_be_written_leaves_no_record(harness):
    """Whether the statement fails or only the commit, as with an ORM that writes late."""
    harness.shop.ask("insert into orders values (5)")
    with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
        harness.place("a", 5)
    assert harness.shop.records() == 0
    assert harness.place("b", 6) == {"number": 6}  # and the connection is in order again


def test_many_operations_one_after_the_other_do_not_use_up_connections(harness):
    for number in range(30):
        harness.place(f"key-{number}", number)
        harness.place(f"key-{number}", number)
    assert harness.shop.orders() == list(range(30))


@pytest.mark.parametrize("idiom", CLOSED, ids=lambda idiom: idiom.name)
def test_a_handler_that_closes_its_connection_is_no_outage(harness):
    """L9: nothing was sent of the end, so nothing is in doubt, and a retry would do the same."""

    def close(number):
        closed = current_operation().connection.close()
        return closed if inspect.isawaitable(closed) else number

    with pytest.raises(NotCommitted):
        harness.done(harness.engine.transaction("a", harness.handler(close), 3, scope="orders"))
    assert (harness.shop.orders(), harness.shop.records()) == ([], 0)
    assert harness.place("a", 3) == {"number": 3}


def end_by_oneself(harness, end, *, goes_on, answer):
    """Run a handler that commits or rolls back, *goes_on* to write, and then gives *answer*."""
    idiom = harness.idiom

    async def then(number):
        connection = current_operation().connection
        await settled(end(idiom, connection))
        if goes_on:  # in another transaction, as an ORM does that reads again
            await settled(idiom.write(connection, number + 1))
        return answer()

    then_here = then if idiom.is_async else lambda number: drive(then(number))
    handler = harness.handler(then_here)
    return harness.done(harness.engine.transaction("a", handler, 3, scope="orders"))


GOES_ON = pytest.mark.parametrize("goes_on", [False, True])


@GOES_ON
def test_a_handler_that_rolls_back_is_not_taken_for_done(harness, goes_on):
    """L9: its answer says that something was written, and nothing was."""
    # asyncpg and Django let no handler go on.
    with pytest.raises(Exception, match=r"rolled back|rollback|SAVEPOINT can only|'atomic' block"):
        end_by_oneself(harness, Idiom.undo, goes_on=goes_on, answer=int)
    assert harness.shop.records() == 0
    # Where every statement commits by itself, the last one has.
    assert harness.shop.orders() == [] or (goes_on and harness.shop.orders() == [4])
    assert harness.place("b", 5) == {"number": 5}


@GOES_ON
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("idiom", COMMITTED, ids=lambda idiom: idiom.name)
def test_a_handler_that_commits_does_not_run_again_by_itself(harness, goes_on, fails):
    """L9: what it wrote is there and its record is not: a crash would have left just that."""

    def fail():
        raise ValueError("no")

    said = "^no$" if fails else "has committed"
    with pytest.raises(Exception, match=f"{said}|SAVEPOINT can only"):  # asyncpg cannot go on
        end_by_oneself(harness, Idiom.commit, goes_on=goes_on, answer=fail if fails else int)
    with pytest.raises(OutcomeUnknown):
        harness.place("a", 3)
    assert harness.runs == [3]
    # Where every statement commits by itself, the last one has, too.
    assert harness.shop.orders() in ([3], [3, 4])
    assert harness.shop.ask(f"select state from {harness.shop.table}") == [(IN_DOUBT,)]
    assert harness.place("b", 5) == {"number": 5}


@pytest.mark.parametrize("idiom", DJANGO, ids=lambda idiom: idiom.name)
def test_django_lets_no_handler_commit(harness):
    """L9."""
    with pytest.raises(Exception, match="'atomic' block"):
        end_by_oneself(harness, Idiom.commit, goes_on=False, answer=int)
    assert (harness.shop.orders(), harness.shop.records()) == ([], 0)
    assert harness.place("a", 3) == {"number": 3}


@pytest.mark.parametrize("idiom", GIVEN, ids=lambda idiom: idiom.name)
def test_a_connection_in_a_transaction_already_is_refused_and_keeps_its_earlier_work(harness):
    """L9: losing against a duplicate rolls back, and that must not undo earlier work."""
    acquire_here = acquire_async if harness.idiom.is_async else acquire

    async def write_first(connection):
        if harness.idiom.name in ("asyncpg", "psycopg-autocommit"):
            await settled(connection.execute("begin"))
        if harness.idiom.name == "asyncpg":
            await connection.execute("insert into orders values (1)")
        else:
            await settled(harness.idiom.write(connection, 1))

    async def refused(connection):
        await write_first(connection)
        with pytest.raises(Misconfigured, match="in a transaction already"):
            await settled(harness.placing("a", 2, connection=connection))
        await settled(harness.idiom.commit(connection))
        assert await settled(harness.placing("a", 2, connection=connection)) == {"number": 2}

    async def story():
        await settled(harness.engine.ensure_started())  # SQLite's file is locked later
        adapter, give_back = await settled(acquire_here(connection_source(harness.source)))
        try:
            await refused(adapter.handle)
        finally:
            await settled(give_back(None, None, None))

    harness.done(story()) if harness.idiom.is_async else drive(story())
    assert harness.shop.orders() == [1, 2]


WORDS = ["plain", "'", "\\", "\\'; drop table orders; --", "%s $1 ?1", "größe", "\N{COAT}\0\ud800"]


def test_a_record_is_stored_as_it_is_whatever_its_key_contains(harness):
    """L9: that of a first attempt, and that of one after an attempt in record mode."""

    def fail(_number):
        raise ValueError("no")

    async def fail_async(_number):
        raise ValueError("no")

    for number, word in enumerate(WORDS):
        handler = harness.handler(WORDS.__getitem__)
        if number % 2:
            failing = fail_async if harness.idiom.is_async else fail
            with pytest.raises(ValueError, match="no"):
                harness.done(harness.engine.run(word, failing, number, scope="orders"))
        for _ in range(2):
            work = harness.engine.transaction(word, handler, number, scope="orders")
            assert harness.done(work) == word
    with closing(open_store(harness.shop.store)) as store:
        assert {record.key for record in store.find(Query()).records} == {*WORDS}
