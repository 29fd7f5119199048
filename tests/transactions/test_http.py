"""L9 over HTTP: a response leaves only after the commit, through ASGI and WSGI."""

import asyncio
import io
from contextlib import closing, suppress

import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from flask import Flask, jsonify
from sqlalchemy import orm

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.errors import Misconfigured
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.transactions.idioms import SHOPS, alchemy_url, django_source

KEY = {"Idempotency-Key": "order-1"}


@pytest.fixture
def shop(tmp_path):
    return SHOPS["postgres"](tmp_path)


class Site:
    """A FastAPI application with one route in transaction mode, and clients for it."""

    def __init__(self, shop, handler, *, transactions=None, observers=(), **changes):
        self._runner = asyncio.Runner()
        self._engine = AsyncEngine(shop.store, transactions=transactions, observers=observers)
        self.app = FastAPI()
        self.app.add_middleware(IdempotencyMiddleware, engine=self._engine)
        marked = idempotent(mode="transaction", **changes)(handler)
        self.app.post("/orders", status_code=201)(marked)

    def post(self, *bodies):
        """The answers to *bodies*, one after the other."""

        async def main():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return [await client.post("/orders", json=b, headers=KEY) for b in bodies]

        return self._runner.run(main())

    def close(self):
        self._runner.run(self._engine.close())
        self._runner.close()


@pytest.fixture
def site():
    """Makes sites, and closes them."""
    made = []

    def make(*args, **options):
        made.append(Site(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def insert(operation, number):
    await operation.connection.execute("insert into orders values (%s)", (number,))


# --- ASGI -------------------------------------------------------------------------------------


def test_the_response_leaves_after_record_and_effect_are_committed(shop, site):
    """L9: whoever reads the first byte can read the row, too."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        return {"number": body["number"]}

    seen = []
    guarded = site(shop, place)
    app = guarded.app

    async def watching(scope, receive, send):
        async def watched(message):
            if message["type"] == "http.response.start":
                seen.append((shop.orders(), shop.records()))
            await send(message)

        await app(scope, receive, watched)

    guarded.app = watching
    first, second = guarded.post({"number": 1}, {"number": 1})
    assert (first.status_code, first.json()) == (201, {"number": 1})
    assert (second.status_code, second.json()) == (201, {"number": 1})
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert first.headers["Idempotency-Reference"] == second.headers["Idempotency-Reference"]
    assert seen == [([1], 1), ([1], 1)]


def test_an_error_of_the_route_leaves_nothing_and_the_retry_runs(shop, site):
    """L9, L6."""
    runs = []

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("no")
        return JSONResponse({"run": len(runs)}, status_code=503 if len(runs) == 2 else 201)

    answers = site(shop, place).post({"number": 1}, {"number": 1}, {"number": 1}, {"number": 1})
    assert [answer.status_code for answer in answers] == [500, 503, 201, 201]
    assert (len(runs), shop.orders(), shop.records()) == (3, [1], 1)


def test_a_commit_that_the_database_refuses_is_never_a_success(shop, site):
    """L9: a deferred constraint speaks only at the commit; the client gets a 500."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    async def place(body: dict[str, int], operation: CurrentOperation):
        await operation.connection.execute("insert into lines values (%s)", (body["number"],))
        return {"number": body["number"]}

    guarded = site(shop, place)
    (refused,) = guarded.post({"number": 7})
    assert refused.status_code == 500
    assert (shop.records(), shop.ask("select * from lines")) == (0, [])
    shop.ask("insert into orders values (7)")
    (answer,) = guarded.post({"number": 7})
    assert answer.status_code == 201


def test_a_commit_that_nobody_has_heard_of_is_a_503_with_the_same_key(shop, site):
    """L9, D2: the session is ended by the server before it can commit."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        if len(lost) == 0:
            lost.append(operation.connection.info.backend_pid)
            shop.ask(f"select pg_terminate_backend({lost[0]})")
        return {"number": body["number"]}

    lost = []
    first, second = site(shop, place).post({"number": 1}, {"number": 1})
    assert first.status_code == 503
    assert first.json()["code"] == "store-unavailable"
    assert first.json()["retry"] == "same-key"
    assert "not known whether the work of this request is committed" in first.json()["detail"]
    assert (second.status_code, shop.orders()) == (201, [1])


def test_a_refusal_after_a_failed_statement_reaches_its_client(shop, site):
    """L9: PostgreSQL commits nothing any more, and nothing was to be committed."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        try:
            await insert(operation, body["number"])
        except psycopg.errors.UniqueViolation:
            return JSONResponse({"error": "taken"}, status_code=409)
        return {"number": body["number"]}

    shop.ask("insert into orders values (5)")
    first, second = site(shop, place).post({"number": 5}, {"number": 5})
    assert [first.status_code, second.status_code] == [409, 409]
    assert first.json() == {"error": "taken"}
    assert "Idempotent-Replayed" not in second.headers
    assert shop.records() == 0


def test_a_success_after_a_failed_statement_does_not_leave(shop, site):
    """L9: the handler believes that it has written, and the database does not."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        with suppress(psycopg.errors.UniqueViolation):
            await insert(operation, body["number"])
        return {"number": body["number"]}

    shop.ask("insert into orders values (5)")
    (answer,) = site(shop, place).post({"number": 5})
    assert answer.status_code == 500
    assert shop.records() == 0


def test_a_refusal_is_kept_with_what_was_written_beside_it(shop, site):
    """L12: a declined attempt is an outcome like any other."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        return JSONResponse({"error": "declined"}, status_code=402)

    first, second = site(shop, place).post({"number": 1}, {"number": 1})
    assert [first.status_code, second.status_code] == [402, 402]
    assert second.headers["Idempotent-Replayed"] == "true"
    assert shop.orders() == [1]


def test_another_request_with_the_same_key_is_refused_and_writes_nothing(shop, site):
    """F1."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        return body

    first, second = site(shop, place).post({"number": 1}, {"number": 2})
    assert [first.status_code, second.status_code] == [201, 422]
    assert shop.orders() == [1]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_handler_that_collided_is_started_again_where_that_is_safe(shop, retries, site):
    """L9: with the same body, and what it said before is forgotten."""
    runs = []

    async def place(body: dict[str, int], operation: CurrentOperation):
        runs.append(body["number"])
        await insert(operation, body["number"])
        if len(runs) == 1:
            raise psycopg.errors.SerializationFailure
        return {"run": len(runs)}

    (answer,) = site(shop, place, transaction_retries=retries).post({"number": 1})
    if retries:
        assert (answer.status_code, answer.json()) == (201, {"run": 2})
        assert (runs, shop.orders()) == ([1, 1], [1])
    else:
        assert answer.status_code == 500
        assert (runs, shop.orders()) == ([1], [])


@pytest.mark.parametrize("collisions", [1, 2])
def test_observers_hear_once_of_a_request_that_was_started_again(shop, site, collisions):
    """O3: and of one that collided too often."""
    told, runs = [], []

    async def place(body: dict[str, int], operation: CurrentOperation):
        runs.append(body["number"])
        await insert(operation, body["number"])
        if len(runs) <= collisions:
            raise psycopg.errors.SerializationFailure
        return body

    site(shop, place, observers=[told.append], transaction_retries=1).post({"number": 1})
    outcome = "executed" if collisions == 1 else "failed"
    assert (len(runs), [decision.outcome for decision in told]) == (2, [outcome])


def test_a_commit_that_collided_is_started_again_where_that_is_safe(shop, site):
    """L9: the response was whole already, and is thrown away with its transaction."""
    runs = []

    async def serializable():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        await connection.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
        return connection

    async def place(body: dict[str, int], operation: CurrentOperation):
        cursor = await operation.connection.execute("select count(*) from orders")
        (found,) = await cursor.fetchone()
        await insert(operation, body["number"] + found)
        runs.append(found)
        if len(runs) == 1:
            with psycopg.connect(shop.place) as rival:
                rival.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                (seen,) = rival.execute("select count(*) from orders").fetchone()
                rival.execute("insert into orders values (%s)", (100 + seen,))
        return {"number": body["number"] + found}

    guarded = site(shop, place, transactions=serializable, transaction_retries=1)
    (answer,) = guarded.post({"number": 1})
    assert (answer.status_code, answer.json()) == (201, {"number": 2})
    assert (runs, shop.orders()) == ([0, 1], [2, 100])


def test_a_route_in_a_thread_uses_a_session_of_its_own_kind(shop, site):
    """L9: a plain function of FastAPI's, with a plain session of SQLAlchemy's."""
    engine = sa.create_engine(alchemy_url(shop, "psycopg"))

    def place(body: dict[str, int], operation: CurrentOperation):
        statement = sa.text("insert into orders values (:number)")
        operation.connection.execute(statement, {"number": body["number"]})
        return body

    guarded = site(shop, place, transactions=orm.sessionmaker(engine))
    answers = guarded.post({"number": 1}, {"number": 1})
    engine.dispose()
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.orders() == [1]


def test_a_response_too_large_to_keep_is_committed_before_it_streams(shop, site):
    """L12: its first byte leaves after the commit, and a retry is told that it is not kept."""

    async def place(body: dict[str, int], operation: CurrentOperation):
        await insert(operation, body["number"])
        return StreamingResponse((b"x" * 100 for _ in range(10)), status_code=201)

    first, second = site(shop, place, response_bytes_max=150).post({"number": 1}, {"number": 1})
    assert (first.status_code, len(first.content)) == (201, 1_000)
    assert (second.status_code, second.json()["code"]) == (409, "result-unavailable")
    assert shop.orders() == [1]


def test_without_its_database_nothing_runs_and_the_client_is_told(shop, site):
    """D2: no connection can be opened, so nothing is claimed and nothing runs."""
    runs = []

    async def place(operation: CurrentOperation):
        runs.append(operation)

    def nobody():
        raise ConnectionRefusedError("no database here")

    (answer,) = site(shop, place, transactions=nobody).post({"number": 1})
    assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable")
    assert runs == []


def test_a_store_that_cannot_do_it_is_refused_before_anything_runs():
    """S3."""
    runs = []
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://")

    @app.post("/orders")
    @idempotent(mode="transaction")
    async def place():
        runs.append(1)

    async def main():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            await client.post("/orders", headers=KEY)

    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        asyncio.run(main())
    assert runs == []


# --- WSGI -------------------------------------------------------------------------------------


def flask_site(shop, handler, **options):
    """A Flask application of which everything is in transaction mode."""
    app = Flask(__name__)
    app.post("/orders")(handler)
    policy = Policy(mode="transaction", **options.pop("policy", {}))
    app.wsgi_app = WsgiMiddleware(app.wsgi_app, store=shop.store, policy=policy, **options)
    return app


def dbapi_insert(number):
    with closing(current_operation().connection.cursor()) as cursor:
        cursor.execute(f"insert into orders values ({number:d})")


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def anywhere(request, tmp_path):
    return SHOPS[request.param](tmp_path)


def test_wsgi_commits_record_and_effect_before_it_answers(anywhere):
    """L9: one line, nothing to configure, on every database."""

    def place():
        dbapi_insert(1)
        return jsonify(number=1), 201

    app = flask_site(anywhere, place)
    client = app.test_client()
    first, second = (client.post("/orders", headers=KEY) for _ in range(2))
    app.wsgi_app.engine.close()
    assert [first.status_code, second.status_code] == [201, 201]
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (anywhere.orders(), anywhere.records()) == ([1], 1)


def test_wsgi_undoes_what_failed_and_runs_the_retry(anywhere):
    """L9, L6."""
    runs = []

    def place():
        dbapi_insert(1)
        runs.append(1)
        return jsonify(run=len(runs)), 500 if len(runs) == 1 else 201

    app = flask_site(anywhere, place)
    client = app.test_client()
    first, second = (client.post("/orders", headers=KEY) for _ in range(2))
    app.wsgi_app.engine.close()
    assert [first.status_code, second.status_code] == [500, 201]
    assert (anywhere.orders(), anywhere.records()) == ([1], 1)


def test_wsgi_tells_an_outage_at_the_commit_from_a_success(shop):
    """L9, D2."""
    lost = []

    def place():
        dbapi_insert(1)
        if not lost:
            lost.append(current_operation().connection.info.backend_pid)
            shop.ask(f"select pg_terminate_backend({lost[0]})")
        return jsonify(number=1), 201

    app = flask_site(shop, place)
    client = app.test_client()
    first, second = (client.post("/orders", headers=KEY) for _ in range(2))
    app.wsgi_app.engine.close()
    assert [first.status_code, second.status_code] == [503, 201]
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_wsgi_gives_the_servers_error_for_a_commit_that_is_refused(shop):
    """L9: what escapes us becomes the server's 500; here the test's own client sees it."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    def place():
        current_operation().connection.execute("insert into lines values (1)")
        return jsonify(number=1), 201

    app = flask_site(shop, place)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        app.test_client().post("/orders", headers=KEY)
    app.wsgi_app.engine.close()
    assert shop.records() == 0


def test_wsgi_starts_a_handler_again_that_collided(shop):
    """L9: Flask makes a 500 of what its handler raises, so the error comes out at the commit."""
    runs = []

    def application(environ, start_response):
        runs.append(environ["wsgi.input"].read())
        dbapi_insert(1)
        if len(runs) == 1:
            raise psycopg.errors.DeadlockDetected
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"done"]

    policy = Policy(mode="transaction", transaction_retries=1)
    guarded = WsgiMiddleware(application, store=shop.store, policy=policy)
    started = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "QUERY_STRING": "",
        "CONTENT_LENGTH": "4",
        "HTTP_IDEMPOTENCY_KEY": "order-1",
        "wsgi.input": io.BytesIO(b"body"),
    }
    said = b"".join(guarded(environ, lambda status, *_: started.append(status)))
    guarded.engine.close()
    assert (started, said) == (["201 Created"], b"done")
    assert (runs, shop.orders()) == ([b"body", b"body"], [1])


@pytest.mark.parametrize("where", ["handler", "commit"])
@pytest.mark.parametrize("collisions", [1, 2])
def test_observers_hear_once_of_what_wsgi_has_started_again(shop, where, collisions):
    """O3: and of what collided too often, in its handler or at its commit."""
    told, runs = [], []
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

    def application(_environ, start_response):
        runs.append(1)
        dbapi_insert(1)
        start_response("201 Created", [])
        return [b"done"]

    policy = Policy(mode="transaction", transaction_retries=1)
    engine = Engine(shop.store, policy, observers=[told.append])
    guarded = WsgiMiddleware(application, engine=engine)
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "QUERY_STRING": "",
        "HTTP_IDEMPOTENCY_KEY": "order-1",
        "wsgi.input": io.BytesIO(),
    }
    with suppress(psycopg.errors.SerializationFailure):
        list(guarded(environ, lambda *_: None))
    engine.close()
    outcome, orders = ("executed", [1]) if collisions == 1 else ("failed", [])
    assert (len(runs), [decision.outcome for decision in told]) == (2, [outcome])
    assert shop.orders() == orders


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_django_commits_its_own_connection_behind_wsgi(kind, tmp_path):
    """L9: a view that is atomic by itself is a savepoint in ours."""
    from django.db import transaction

    shop = SHOPS[kind](tmp_path)
    connection, close = django_source(shop)

    def view(_environ, start_response):
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("insert into orders values (%s)", (1,))
        start_response("201 Created", [])
        return [b"done"]

    guarded = WsgiMiddleware(
        view, store=shop.store, policy=Policy(mode="transaction"), transactions=lambda: connection
    )
    started = []
    for _ in range(2):
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/orders",
            "QUERY_STRING": "",
            "HTTP_IDEMPOTENCY_KEY": "order-1",
            "wsgi.input": io.BytesIO(b""),
        }
        assert b"".join(guarded(environ, lambda status, *_: started.append(status))) == b"done"
    assert started == ["201 Created"] * 2
    guarded.engine.close()
    close()
    assert (shop.orders(), shop.records()) == ([1], 1)
