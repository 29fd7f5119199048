"""L9 over HTTP: a response leaves only after the commit, through ASGI and WSGI."""

import asyncio
import functools
from contextlib import ExitStack, suppress

import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from flask import Flask, abort
from sqlalchemy import orm

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.errors import Misconfigured
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.transactions.idioms import SHOPS, alchemy_url, settled
from tests.transactions.sites import AsgiSite, WsgiSite

KEY = {"Idempotency-Key": "order-1"}


@pytest.fixture
def shop(tmp_path):
    return SHOPS["postgres"](tmp_path)


@pytest.fixture(params=[AsgiSite, WsgiSite], ids=["asgi", "wsgi"])
def site(request, shop):
    """Makes sites of either kind, and closes them."""
    is_async = request.param is AsgiSite
    with ExitStack() as stack:

        def make(place, *, transactions=None, observers=(), **changes):
            run = stack.enter_context(asyncio.Runner()).run if is_async else None
            policy = Policy(mode="transaction", **changes)
            options = {"transactions": transactions, "observers": observers}
            engine = (AsyncEngine if is_async else Engine)(shop.store, policy, **options)
            stack.callback(lambda: run(engine.close()) if is_async else engine.close())
            return request.param(engine, place, run, lambda: (shop.orders(), shop.records()))

        yield make


async def execute(text, *values):
    """Execute *text* on the connection of the operation, of either kind."""
    return await settled(current_operation().connection.execute(text, values))


async def place(number):
    await execute("insert into orders values (%s)", number)
    return {"number": number}, 201


# --- both -------------------------------------------------------------------------------------


def test_the_response_leaves_after_record_and_effect_are_committed(site):
    """L9: a client that reads the first byte can read the row, too."""
    guarded = site(place)
    first, second = guarded.post(1, 1)
    assert first[:2] == second[:2] == (201, {"number": 1})
    assert [first.is_replayed, second.is_replayed] == [False, True]
    assert first.headers["Idempotency-Reference"] == second.headers["Idempotency-Reference"]
    assert guarded.seen == [([1], 1), ([1], 1)]


def test_an_error_of_the_route_leaves_nothing_and_the_retry_runs(shop, site):
    """L9, L6."""
    runs = []

    async def fail_twice(number):
        await place(number)
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("no")
        return {"run": len(runs)}, 503 if len(runs) == 2 else 201

    answers = site(fail_twice).post(1, 1, 1, 1)
    assert [answer.status for answer in answers] == [500, 503, 201, 201]
    assert (len(runs), shop.orders(), shop.records()) == (3, [1], 1)


def test_a_commit_that_the_database_refuses_is_never_a_success(shop, site):
    """L9: a deferred constraint is checked only at the commit; the server makes it a 500."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    async def line(number):
        await execute("insert into lines values (%s)", number)
        return {"number": number}, 201

    guarded = site(line)
    (refused,) = guarded.post(7)
    assert refused.status == 500
    assert (shop.records(), shop.ask("select * from lines")) == (0, [])
    shop.ask("insert into orders values (7)")
    (answer,) = guarded.post(7)
    assert answer.status == 201


def test_a_commit_with_an_unknown_outcome_is_a_503_with_the_same_key(shop, site):
    """L9, D2: the server ends the session before it can commit."""
    lost = []

    async def lose_once(number):
        answer = await place(number)
        if not lost:
            lost.append(current_operation().connection.info.backend_pid)
            shop.ask(f"select pg_terminate_backend({lost[0]})")
        return answer

    first, second = site(lose_once).post(1, 1)
    assert first.status == 503
    assert (first.body["code"], first.body["retry"]) == ("store-unavailable", "same-key")
    assert "not known whether the work of this request is committed" in first.body["detail"]
    assert (second.status, shop.orders(), shop.records()) == (201, [1], 1)


def test_a_success_after_a_failed_statement_does_not_leave(shop, site):
    """L9: the handler takes its row for written, and the database has aborted the transaction."""

    async def swallow(number):
        with suppress(psycopg.errors.UniqueViolation):
            await place(number)
        return {"number": number}, 201

    shop.ask("insert into orders values (5)")
    (answer,) = site(swallow).post(5)
    assert answer.status == 500
    assert shop.records() == 0


def test_another_request_with_the_same_key_is_refused_and_writes_nothing(shop, site):
    """F1."""
    first, second = site(place).post(1, 2)
    assert [first.status, second.status] == [201, 422]
    assert shop.orders() == [1]


@pytest.mark.parametrize("where", ["handler", "commit"])
@pytest.mark.parametrize(("collisions", "retries"), [(1, 0), (1, 1), (2, 1)])
def test_a_handler_that_collided_is_run_again_where_that_is_safe(
    shop, site, where, collisions, retries
):
    """L9, O3: with the same body and another response; observers get one decision in all."""
    decisions, runs = [], []
    shop.ask("create sequence runs")  # which no rollback turns back
    shop.ask(
        "create function collide() returns trigger language plpgsql as $$ begin"
        f" if nextval('runs') <= {collisions} then raise 'no' using errcode = '40001'; end if;"
        " return null; end $$"
    )
    is_deferred = "deferrable initially deferred" if where == "commit" else ""
    shop.ask(
        f"create constraint trigger collides after insert on orders {is_deferred}"
        " for each row execute function collide()"
    )

    async def count_runs(number):
        runs.append(number)
        await place(number)
        return {"run": len(runs)}, 201

    guarded = site(count_runs, observers=[decisions.append], transaction_retries=retries)
    (answer,) = guarded.post(1)
    assert runs == [1] * (1 + retries)
    if collisions <= retries:
        assert (answer.status, answer.body, shop.orders()) == (201, {"run": 2}, [1])
        assert [decision.outcome for decision in decisions] == ["executed"]
    else:
        assert (answer.status, shop.orders(), shop.records()) == (500, [], 0)
        assert [decision.outcome for decision in decisions] == ["failed"]


def test_without_its_database_nothing_runs_and_the_client_gets_a_503(site):
    """D2: no connection can be opened, so nothing is claimed and nothing runs."""
    runs = []

    async def count_runs(number):
        runs.append(number)

    def connect():
        raise ConnectionRefusedError("no database here")

    (answer,) = site(count_runs, transactions=connect).post(1)
    assert (answer.status, answer.body["code"]) == (503, "store-unavailable")
    assert runs == []


# --- ASGI -------------------------------------------------------------------------------------


@pytest.fixture
def posted(shop):
    """Posts an order twice to a FastAPI route in transaction mode; the responses."""

    async def post_twice(route, transactions=None, **changes):
        app = FastAPI()
        async with AsyncEngine(shop.store, transactions=transactions) as engine:
            app.add_middleware(IdempotencyMiddleware, engine=engine)
            app.post("/orders", status_code=201)(idempotent(mode="transaction", **changes)(route))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                post = functools.partial(client.post, "/orders", json={"number": 1}, headers=KEY)
                return [await post(), await post()]

    return lambda *args, **options: asyncio.run(post_twice(*args, **options))


def test_a_route_in_a_thread_uses_a_session_of_its_own_kind(shop, posted):
    """L9: a plain function of FastAPI's, with a plain session of SQLAlchemy's."""
    engine = sa.create_engine(alchemy_url(shop, "psycopg"))

    def route(body: dict[str, int], operation: CurrentOperation):
        statement = sa.text("insert into orders values (:number)")
        operation.connection.execute(statement, {"number": body["number"]})
        return body

    answers = posted(route, orm.sessionmaker(engine))
    engine.dispose()
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.orders() == [1]


def test_an_error_response_of_the_framework_is_undone_and_not_replayed(shop, posted):
    """L9, L6: the framework answers for a route that raised, and the retry runs."""
    runs = []

    async def route(body: dict[str, int]):
        runs.append(1)
        await place(body["number"])
        if len(runs) == 1:
            raise ValueError("no")
        return JSONResponse({"run": len(runs)}, status_code=201)

    first, second = posted(route)
    assert [first.status_code, second.status_code] == [500, 201]
    assert (len(runs), shop.orders(), shop.records()) == (2, [1], 1)


@pytest.mark.parametrize("raises", [True, False])
def test_a_refusal_of_a_route_is_undone_and_replayed(shop, posted, raises):
    """L9: the same for a raised HTTPException and a returned response."""
    runs = []

    async def route(body: dict[str, int]):
        runs.append(1)
        await place(body["number"])
        if raises:
            raise HTTPException(402, "declined")
        return JSONResponse({"detail": "declined"}, status_code=402)

    first, second = posted(route)
    assert [first.status_code, second.status_code] == [402, 402]
    assert first.json() == second.json() == {"detail": "declined"}
    assert second.headers["idempotent-replayed"] == "true"
    assert (len(runs), shop.orders(), shop.records()) == (1, [], 1)


def test_a_response_too_large_to_keep_is_committed_before_it_streams(shop, posted):
    """L12: its first byte leaves after the commit, and a retry gets a 409: it was not kept."""

    async def route(body: dict[str, int]):
        await place(body["number"])
        return StreamingResponse((b"x" * 100 for _ in range(10)), status_code=201)

    first, second = posted(route, response_bytes_max=150)
    assert (first.status_code, len(first.content)) == (201, 1_000)
    assert (second.status_code, second.json()["code"]) == (409, "result-unavailable")
    assert shop.orders() == [1]


def test_a_refusal_too_large_to_keep_is_undone_before_it_streams(shop, posted):
    """L9, L12: its status decides; a retry gets a 409, and does not run."""

    async def route(body: dict[str, int]):
        await place(body["number"])
        return StreamingResponse((b"x" * 100 for _ in range(10)), status_code=402)

    first, second = posted(route, response_bytes_max=150)
    assert (first.status_code, len(first.content)) == (402, 1_000)
    assert (second.status_code, second.json()["code"]) == (409, "result-unavailable")
    assert (shop.orders(), shop.records()) == ([], 1)


def test_a_store_that_cannot_do_it_is_refused_before_anything_runs():
    """S3."""
    runs = []
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://")

    @app.post("/orders")
    @idempotent(mode="transaction")
    async def route():
        runs.append(1)

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            await client.post("/orders", headers=KEY)

    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        asyncio.run(main())
    assert runs == []


# --- WSGI -------------------------------------------------------------------------------------


def test_a_refusal_of_a_flask_view_is_undone_and_replayed(shop):
    """L9: `abort` raises, and Flask makes a response of it."""
    app, runs = Flask(__name__), []

    @app.post("/orders")
    def view():
        runs.append(1)
        current_operation().connection.execute("insert into orders values (1)")
        abort(409)

    app.wsgi_app = WsgiMiddleware(app.wsgi_app, store=shop.store, policy=Policy(mode="transaction"))
    first, second = (app.test_client().post("/orders", headers=KEY) for _ in range(2))
    app.wsgi_app.engine.close()
    assert [first.status_code, second.status_code] == [409, 409]
    assert second.headers["idempotent-replayed"] == "true"
    assert (len(runs), shop.orders(), shop.records()) == (1, [], 1)
