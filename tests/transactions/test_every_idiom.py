"""L9 in every idiom: record and effect are one transaction of the application's own connection."""

import inspect

import pytest
from idioms import IDIOMS

from coatcheck import current_operation
from coatcheck.errors import KeyReused, NotCommitted, OutcomeUnknown

# Django itself refuses to commit in an atomic block.
COMMITTED = [idiom for idiom in IDIOMS if not idiom.name.startswith("django")]
# A site closes its scoped session in a teardown, so that stays open until our end.
CLOSED = [idiom for idiom in IDIOMS if not idiom.name.startswith("scoped")]


def test_record_and_effect_are_committed_together_and_replayed(till):
    assert till.place("a", 1) == {"number": 1}
    assert till.place("a", 1) == {"number": 1}
    assert till.runs == [1]
    assert till.shop.orders() == [1]
    assert till.shop.records() == 1


def test_another_process_replays_what_was_committed_here(tills):
    first, second = tills(), tills()
    first.place("a", 1)
    assert second.place("a", 1) == {"number": 1}
    assert second.runs == []
    with pytest.raises(KeyReused):
        second.place("a", 2)


def test_an_error_of_the_handler_leaves_nothing_at_all(till):
    def fail(number):
        raise ValueError(number)

    with pytest.raises(ValueError, match="7"):
        till.done(till.engine.transaction("a", till.handler(fail), 7, scope="orders"))
    assert till.shop.orders() == []
    assert till.shop.records() == 0
    assert till.place("a", 7) == {"number": 7}
    assert till.runs == [7, 7]
    assert till.shop.orders() == [7]


def test_a_row_that_cannot_be_written_leaves_no_record(till):
    """Whether the statement fails or only the commit, as with an ORM that writes late."""
    till.shop.ask("insert into orders values (5)")
    with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
        till.place("a", 5)
    assert till.shop.records() == 0
    assert till.place("b", 6) == {"number": 6}  # and the connection is in order again


def test_many_operations_one_after_the_other_do_not_use_up_connections(till):
    for number in range(30):
        till.place(f"key-{number}", number)
        till.place(f"key-{number}", number)
    assert till.shop.orders() == list(range(30))


def test_a_handler_that_rolls_back_is_not_taken_for_done(till):
    """Its answer says that something was written, and nothing was."""

    def undo(number):
        connection = current_operation().connection
        undone = till.idiom.undo(connection)
        return undone if inspect.isawaitable(undone) else number

    with pytest.raises(NotCommitted):
        till.done(till.engine.transaction("a", till.handler(undo), 3, scope="orders"))
    assert till.shop.orders() == []
    assert till.shop.records() == 0


@pytest.mark.parametrize("idiom", CLOSED, ids=lambda idiom: idiom.name)
def test_a_handler_that_closes_its_connection_is_no_outage(till):
    """L9: nothing was sent of the end, so nothing is in doubt, and a retry would do the same."""

    def close(number):
        closed = current_operation().connection.close()
        return closed if inspect.isawaitable(closed) else number

    with pytest.raises(NotCommitted):
        till.done(till.engine.transaction("a", till.handler(close), 3, scope="orders"))
    assert (till.shop.orders(), till.shop.records()) == ([], 0)
    assert till.place("a", 3) == {"number": 3}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("idiom", COMMITTED, ids=lambda idiom: idiom.name)
def test_a_handler_that_commits_and_then_fails_does_not_run_again_by_itself(till, goes_on):
    """L9: an error leaves nothing, but what was committed before it is there."""

    def fail(number):
        connection = current_operation().connection
        is_asyncpg = till.idiom.name == "asyncpg"
        ended = connection.execute("commit") if is_asyncpg else connection.commit()
        if inspect.isawaitable(ended):
            return fail_after(ended, connection, number)
        if goes_on:  # in another transaction, as an ORM does that reads again
            till.idiom.write(connection, number + 1)
        raise ValueError("no")

    async def fail_after(ended, connection, number):
        await ended
        if goes_on and till.idiom.name != "asyncpg":  # it would not be let
            await till.idiom.write(connection, number + 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        till.done(till.engine.transaction("a", till.handler(fail), 3, scope="orders"))
    with pytest.raises(OutcomeUnknown):
        till.place("a", 3)
    assert till.runs == [3]
    # Where every statement commits by itself, the last one has, too.
    assert till.shop.orders() in ([3], [3, 4])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_handler_that_commits_is_not_taken_for_done(till, goes_on):
    """L9: what it wrote is there and its record is not: a crash would have left just that."""

    def end(number):
        connection = current_operation().connection
        is_asyncpg = till.idiom.name == "asyncpg"
        ended = connection.execute("commit") if is_asyncpg else connection.commit()
        if inspect.isawaitable(ended):
            return go_on(ended, connection, number)
        return till.idiom.write(connection, number + 1) if goes_on else number

    async def go_on(ended, connection, number):
        await ended
        return await till.idiom.write(connection, number + 1) if goes_on else number

    # Django itself refuses to commit in an atomic block, and asyncpg cannot go on.
    with pytest.raises(Exception, match=r"has committed|'atomic' block|SAVEPOINT can only"):
        till.done(till.engine.transaction("a", till.handler(end), 3, scope="orders"))
    assert till.place("b", 5) == {"number": 5}
