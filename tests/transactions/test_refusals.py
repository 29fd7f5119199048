"""L9 in every idiom: a refusal undoes what its handler has written, and is kept all the same."""

import asyncio
import threading
from contextlib import closing

import pymysql
import pytest
import sqlalchemy as sa

from coatcheck import AsyncEngine, Engine, NotCommitted, Policy, current_operation
from tests.support.servers import until
from tests.transactions.idioms import IDIOMS, SHOPS, WAITING, settled
from tests.transactions.sites import AsgiSite, WsgiSite

# Django itself refuses to commit in an atomic block.
COMMITTED = [idiom for idiom in IDIOMS if not idiom.name.startswith("django")]


@pytest.fixture
def site(open_harness):
    """Makes sites whose handler writes a row, and *then* answers."""

    def make(then, **changes):
        harness = open_harness(policy=Policy(mode="transaction", **changes))

        async def place(number):
            harness.runs.append(number)
            connection = current_operation().connection
            return await then(harness.idiom, connection, number)

        kind = AsgiSite if harness.idiom.is_async else WsgiSite
        return harness, kind(harness.engine, place, harness.done)

    return make


async def place(idiom, connection, number):
    await settled(idiom.write(connection, number))
    return {"number": number}, 402 if number == 1 else 201


@pytest.mark.parametrize(("commit", "orders"), [("success", [2]), ("kept", [1, 2])])
def test_the_status_decides_whether_the_handlers_writes_are_committed(site, commit, orders):
    """L9: either way the answer is kept, and the connection is in order afterwards."""
    harness, guarded = site(place, commit=commit)
    answers = [*guarded.post(1, 1, key="a"), *guarded.post(2, 2, key="b")]
    assert [answer.status for answer in answers] == [402, 402, 201, 201]
    assert [answer.is_replayed for answer in answers] == [False, True, False, True]
    assert harness.runs == [1, 2]
    assert (harness.shop.orders(), harness.shop.records()) == (orders, 2)


def test_a_refusal_after_a_failed_statement_is_kept(site):
    """L9: PostgreSQL has aborted the transaction, and an ORM has ended its own."""

    async def refuse(idiom, connection, number):
        await settled(idiom.write(connection, number + 1))
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):  # noqa: PT012 - an ORM writes late
            if idiom.name == "asyncpg":  # not in a savepoint
                await connection.execute("insert into orders values (5)")
            await settled(idiom.write(connection, number))
            await settled(connection.flush())
        return {"error": "taken"}, 409

    harness, guarded = site(refuse)
    harness.shop.ask("insert into orders values (5)")
    first, second = guarded.post(5, 5)
    assert first[:2] == second[:2] == (409, {"error": "taken"})
    assert second.is_replayed
    assert (harness.runs, harness.shop.orders(), harness.shop.records()) == ([5], [5], 1)


@pytest.mark.parametrize("status", [201, 402])
@pytest.mark.parametrize("idiom", COMMITTED, ids=lambda idiom: idiom.name)
def test_a_handler_that_commits_by_itself_and_then_answers_is_in_doubt(site, status):
    """L9: a refusal reaches the client, and a success does not; neither is final."""

    async def commit(idiom, connection, number):
        await settled(idiom.write(connection, number))
        if idiom.name.startswith("orm") and number == 2:  # the session does not know of it
            await settled(connection.execute(sa.text("commit")))
        else:
            await settled(idiom.commit(connection))
        return {"number": number}, status

    harness, guarded = site(commit)
    for number in (1, 2):
        if status == 201:
            with pytest.raises(NotCommitted, match="has committed"):
                guarded.post(number, key=f"{number}")
        else:
            assert guarded.post(number, key=f"{number}")[0].status == 402
        (again,) = guarded.post(number, key=f"{number}")
        assert (again.status, again.body["code"]) == (409, "outcome-unknown")
    assert harness.runs == [1, 2]
    assert 1 in harness.shop.orders()


def test_a_handler_that_rolls_back_and_then_refuses_leaves_nothing(site):
    """L9: its row is free already, so its refusal cannot be kept; Django only marks the block."""

    async def undo(idiom, connection, number):
        await settled(idiom.write(connection, number))
        await settled(idiom.undo(connection))
        return {"error": "declined"}, 402

    harness, guarded = site(undo)
    first, second = guarded.post(1, 1)
    is_kept = harness.idiom.name.startswith("django")
    assert [first.status, second.status] == [402, 402]
    assert second.is_replayed == is_kept
    assert harness.runs == ([1] if is_kept else [1, 1])
    assert (harness.shop.orders(), harness.shop.records()) == ([], int(is_kept))


# --- simultaneous duplicates and deadlocks ------------------------------------------------------


@pytest.mark.parametrize("kind", SHOPS)
def test_duplicates_that_wait_for_a_refusal_get_it_and_do_not_run(kind, tmp_path):
    """L1, L9: the row is locked until the refusal is stored, also for another node."""
    shop = SHOPS[kind](tmp_path)
    runs, has_begun, may_end = [], asyncio.Event(), asyncio.Event()

    async def decline(number):
        runs.append(number)
        has_begun.set()
        await may_end.wait()
        return {"error": "declined"}, 402

    async def main():
        policy = Policy(mode="transaction", wait="20s")
        nodes = [AsyncEngine(shop.store, policy) for _ in range(2)]
        sites = [AsgiSite(node, decline, asyncio.run) for node in nodes]
        posts = [asyncio.ensure_future(site.posted(1)) for site in sites * 2]
        await has_begun.wait()
        may_end.set()
        answers = await asyncio.gather(*posts)
        for node in nodes:
            await node.close()
        return answers

    answers = asyncio.run(main())
    assert [answer.status for answer in answers] == [402] * 4
    assert sorted(answer.is_replayed for answer in answers) == [False, True, True, True]
    assert runs == [1]


def test_a_refusal_after_a_deadlock_is_not_kept_where_the_database_has_undone_the_claim(tmp_path):
    """L9: MySQL rolls the whole transaction back, and its savepoints with it."""
    shop = SHOPS["mysql"](tmp_path)
    shop.ask("insert into orders values (1), (2)")

    async def collide(_number):
        cursor = current_operation().connection.cursor()
        with closing(shop.connect()) as rival, closing(rival.cursor()) as other:
            # The rival has more to undo, so the server chooses the handler.
            other.execute("insert into orders select seq from seq_100_to_200")
            other.execute("update orders set number = 12 where number = 2")
            cursor.execute("update orders set number = 11 where number = 1")
            waits = threading.Thread(
                target=other.execute, args=("update orders set number = 21 where number = 1",)
            )
            waits.start()
            until(lambda: shop.ask(WAITING["mysql"])[0][0] > 0)
            with pytest.raises(pymysql.OperationalError, match="Deadlock"):
                cursor.execute("update orders set number = 22 where number = 2")
            waits.join()
            rival.rollback()
        return {"error": "busy"}, 409

    with closing(Engine(shop.store, Policy(mode="transaction"))) as engine:
        first, second = WsgiSite(engine, collide, None).post(1, 1)
    assert [first[:2], second[:2]] == [(409, {"error": "busy"})] * 2
    assert not second.is_replayed
    assert (shop.orders(), shop.records()) == ([1, 2], 0)
