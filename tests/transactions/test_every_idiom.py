"""L9 in every idiom: record and effect are one transaction of the application's own connection."""

import inspect

import pytest

from coatcheck import current_operation
from coatcheck.errors import KeyReused, NotCommitted, OutcomeUnknown
from tests.transactions.idioms import IDIOMS

# Django itself refuses to commit in an atomic block.
COMMITTED = [idiom for idiom in IDIOMS if not idiom.name.startswith("django")]
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


def test_a_handler_that_rolls_back_is_not_taken_for_done(harness):
    """Its answer says that something was written, and nothing was."""

    def undo(number):
        connection = current_operation().connection
        undone = harness.idiom.undo(connection)
        return undone if inspect.isawaitable(undone) else number

    with pytest.raises(NotCommitted):
        harness.done(harness.engine.transaction("a", harness.handler(undo), 3, scope="orders"))
    assert harness.shop.orders() == []
    assert harness.shop.records() == 0


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


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("idiom", COMMITTED, ids=lambda idiom: idiom.name)
def test_a_handler_that_commits_and_then_fails_does_not_run_again_by_itself(harness, goes_on):
    """L9: an error leaves nothing, but what was committed before it is there."""

    def fail(number):
        connection = current_operation().connection
        is_asyncpg = harness.idiom.name == "asyncpg"
        ended = connection.execute("commit") if is_asyncpg else connection.commit()
        if inspect.isawaitable(ended):
            return fail_after(ended, connection, number)
        if goes_on:  # in another transaction, as an ORM does that reads again
            harness.idiom.write(connection, number + 1)
        raise ValueError("no")

    async def fail_after(ended, connection, number):
        await ended
        if goes_on and harness.idiom.name != "asyncpg":  # it would not be let
            await harness.idiom.write(connection, number + 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        harness.done(harness.engine.transaction("a", harness.handler(fail), 3, scope="orders"))
    with pytest.raises(OutcomeUnknown):
        harness.place("a", 3)
    assert harness.runs == [3]
    # Where every statement commits by itself, the last one has, too.
    assert harness.shop.orders() in ([3], [3, 4])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_handler_that_commits_is_not_taken_for_done(harness, goes_on):
    """L9: what it wrote is there and its record is not: a crash would have left just that."""

    def end(number):
        connection = current_operation().connection
        is_asyncpg = harness.idiom.name == "asyncpg"
        ended = connection.execute("commit") if is_asyncpg else connection.commit()
        if inspect.isawaitable(ended):
            return go_on(ended, connection, number)
        return harness.idiom.write(connection, number + 1) if goes_on else number

    async def go_on(ended, connection, number):
        await ended
        return await harness.idiom.write(connection, number + 1) if goes_on else number

    # Django itself refuses to commit in an atomic block, and asyncpg cannot go on.
    with pytest.raises(Exception, match=r"has committed|'atomic' block|SAVEPOINT can only"):
        harness.done(harness.engine.transaction("a", harness.handler(end), 3, scope="orders"))
    assert harness.place("b", 5) == {"number": 5}
