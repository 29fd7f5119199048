"""Applications, clients and functions of an unusual kind: guarded as well, or told what is wrong."""

import asyncio
import io
import resource
import subprocess
import sys
import tempfile
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask, request
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Host, Route

from coatcheck import AsyncEngine, Engine, Misconfigured, Policy, current_operation
from coatcheck.server import callers
from coatcheck.server.asgi import IdempotencyMiddleware as Asgi
from coatcheck.server.request import fields_of
from coatcheck.server.starlette import idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as Wsgi
from coatcheck.stores import open_async_store
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support.http import AsgiExchange, with_key

KEY = {"Idempotency-Key": "k"}


def posted(app, *asks, **more) -> list[httpx.Response]:
    """What each of *asks* is answered, a URL with its headers."""

    async def story() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.post(url, headers=headers, **more) for url, headers in asks]

    return asyncio.run(story())


def flask_shop(**options):
    """A client of a shop that tells whom it served, and whom that was."""
    app, served = Flask(__name__), []

    @app.post("/orders")
    def order():
        who = request.remote_user or request.cookies.get("session")
        served.append(who)
        return {"served": who}, 201

    app.wsgi_app = Wsgi(app.wsgi_app, store="memory://", **options)
    return app.test_client(use_cookies=False), served


def logged_in_shop() -> Starlette:
    """A shop behind a middleware that finds out who its user is."""

    class Backend(AuthenticationBackend):
        async def authenticate(self, conn):
            return AuthCredentials(), SimpleUser(conn.headers["x-forwarded-user"])

    async def order(request) -> JSONResponse:
        return JSONResponse({"served": request.user.username})

    app = Starlette(routes=[Route("/", order, methods=["POST"])])
    app.add_middleware(Asgi, store="memory://")
    app.add_middleware(AuthenticationMiddleware, backend=Backend())
    return app


# --- whose key it is ------------------------------------------------------------------------


def test_two_remote_users_are_two_callers_by_default():
    """S1, S2: the server in front has told who they are."""
    client, served = flask_shop()
    for who in ("ada", "bob", "ada"):
        environ = {"REMOTE_USER": who}
        answer = client.post("/orders", headers=KEY, environ_overrides=environ)
        assert answer.json == {"served": who}
    assert served == ["ada", "bob"]


def test_two_users_of_a_middleware_in_front_are_two_callers_by_default():
    """S1, S2: also where no header of ours tells them apart."""
    asks = [("/", {**KEY, "X-Forwarded-User": who}) for who in ("ada", "bob")]
    answers = posted(logged_in_shop(), *asks)
    assert [answer.json()["served"] for answer in answers] == ["ada", "bob"]


@pytest.mark.parametrize(
    ("caller", "headers"),
    [
        (callers.user, {}),
        *(
            (None, {name: "of the whole application"})
            for name in ("X-API-Key", "API-Key", "APIKey", "X-APIKey")
        ),
    ],
)
def test_two_sessions_never_get_each_other_s_answer(caller, headers):
    """S1, S2: without a user, and with a key that identifies the application only."""
    client, served = flask_shop(caller=caller)
    statuses = [
        client.post("/orders", headers={**KEY, **headers, "Cookie": f"session={who}"}).status_code
        for who in ("ada", "bob", "ada")
    ]
    assert (statuses, served) == ([201, 422, 201], ["ada"])


def test_a_cookie_beside_a_user_s_own_credential_may_change():
    """S1: the credential identifies the user, so the cookie is not compared."""
    client, served = flask_shop()
    for session in ("one", "two"):
        headers = {**KEY, "Authorization": "Bearer ada", "Cookie": f"session={session}"}
        assert client.post("/orders", headers=headers).json == {"served": "one"}
    assert served == ["one"]


def test_a_cookie_beside_a_remote_user_may_change():
    """S1, S2: the server in front has told who it is, so a retry with a fresh cookie is one."""
    client, served = flask_shop()
    for session in ("one", "two"):
        headers = {**KEY, "Cookie": f"session={session}"}
        environ = {"REMOTE_USER": "ada"}
        answer = client.post("/orders", headers=headers, environ_overrides=environ)
        assert (answer.status_code, answer.json) == (201, {"served": "ada"})
    assert served == ["ada"]


def test_a_cookie_beside_a_user_of_a_middleware_in_front_may_change():
    """S1, S2."""
    app = logged_in_shop()
    asks = [
        ("/", {**KEY, "X-Forwarded-User": "ada", "Cookie": f"session={session}"})
        for session in ("one", "two")
    ]
    answers = posted(app, *asks)
    assert [answer.json() for answer in answers] == [{"served": "ada"}] * 2
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true"]


@pytest.mark.parametrize("who", [7, UUID(int=7)])
def test_a_caller_may_be_a_number(who):
    """S2: of a user, the likeliest of all."""
    client, served = flask_shop(caller=lambda _request: who)
    assert [client.post("/orders", headers=KEY).status_code for _ in range(2)] == [201, 201]
    assert len(served) == 1


@pytest.mark.parametrize("who", [7.5, ["ada"]])
def test_a_caller_that_is_no_text_is_refused(who):
    """S2: but not with what it is, because that may be a credential."""
    client, served = flask_shop(caller=lambda _request: who)
    client.application.testing = True
    with pytest.raises(
        Misconfigured, match=r"caller= returned a value of type (float|list)"
    ) as told:
        client.post("/orders", headers=KEY)
    assert "ada" not in str(told.value)
    assert served == []


class _Callable:
    async def __call__(self, _request) -> str:
        return "k"


def test_async_functions_for_key_and_keep_are_refused():
    """K4, L4: two orders must not be one because two coroutines had one address."""

    def key_of(order: str):
        return _Callable()(order)

    with pytest.raises(Misconfigured, match=r"keep=.* must not be async"):
        Policy(keep=_Callable().__call__)
    for kind in (Engine, AsyncEngine):
        engine = kind("memory://")
        with pytest.raises(Misconfigured, match=r"key=.* must not be async"):
            engine.guard(key=_Callable())
    with Engine("memory://") as engine:
        placed = []
        place = engine.guard(key=key_of, scope="orders")(placed.append)
        with pytest.raises(Misconfigured, match=r"key=.* must not be async"):
            place("A")
        assert placed == []


@pytest.mark.parametrize(("kind", "name"), [(Asgi, "key"), (Wsgi, "key"), (Wsgi, "caller")])
def test_a_function_that_would_have_to_be_awaited_is_refused(kind, name):
    """K4, S2: else the key would be the address of a coroutine, and each retry another key."""
    for function in (_Callable().__call__, _Callable()):
        with pytest.raises(Misconfigured, match=f"{name}=.* must not be async"):
            kind(lambda: None, store="memory://", **{name: function})


@pytest.mark.parametrize("kind", [Asgi, Wsgi])
@pytest.mark.parametrize("name", ["key", "caller"])
def test_a_key_or_caller_that_cannot_be_called_is_refused_at_start(kind, name):
    """K4, S2."""
    with pytest.raises(Misconfigured, match=f"{name}= is a str; it must be a function"):
        kind(lambda: None, store="memory://", **{name: "X-Tenant"})


@pytest.mark.parametrize("kind", [Asgi, Wsgi])
def test_a_url_that_was_given_for_an_engine_is_not_repeated(kind):
    """X1: there may be a password in it."""
    with pytest.raises(
        Misconfigured, match=r"engine is a str; it must be .*, and store= takes"
    ) as told:
        kind(lambda: None, engine="postgresql://shop:hunter2@db/shop")
    assert "hunter2" not in str(told.value)


def test_a_key_function_that_returns_an_awaitable_is_refused_before_anything_runs():
    """K4."""
    number = _Callable()
    client, served = flask_shop(key=lambda request: number(request))  # noqa: PLW0108 - looks sync
    client.application.testing = True
    with pytest.raises(Misconfigured, match="must not be async"):
        client.post("/orders")
    assert served == []


# --- where it is sent -----------------------------------------------------------------------


def test_two_hosts_of_starlette_are_two_tenants():
    """S1."""

    def tenant(name: str) -> Starlette:
        async def order(_request) -> JSONResponse:
            return JSONResponse(name)

        return Starlette(routes=[Route("/", order, methods=["POST"])])

    app = Starlette(routes=[Host(f"{name}.shop", tenant(name)) for name in ("acme", "beta")])
    app.add_middleware(Asgi, store="memory://")
    asks = [(f"http://{name}.shop/", KEY) for name in ("acme", "beta", "acme")]
    answers = posted(app, *asks)
    assert [answer.json() for answer in answers] == ["acme", "beta", "acme"]
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, None, "true"]


def test_a_host_is_one_tenant_however_its_letters_are_written():
    """S1, L1: names of hosts know no case, so a retry does not run again."""
    served = []

    async def order(request) -> JSONResponse:
        served.append(request.headers["host"])
        return JSONResponse({})

    shop = Starlette(routes=[Route("/", order, methods=["POST"])])
    app = Starlette(routes=[Host("{tenant}", shop)])
    app.add_middleware(Asgi, store="memory://")
    hosts = ("Shop.Example", "shop.example", "other.example")
    answers = posted(app, *(("/", {**KEY, "Host": host}) for host in hosts))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert served == ["Shop.Example", "other.example"]


def test_a_process_that_has_served_nothing_yet_knows_the_polling_address_of_a_host():
    """L10: where the server has no lifespan, too."""
    store = MemoryStore()

    def process() -> Asgi:
        async def order(_request) -> JSONResponse:
            return JSONResponse({})

        shop = Starlette(routes=[Route("/", order, methods=["POST"])])
        engine = AsyncEngine(AsyncMemoryStore(store), Policy(in_flight="202"))
        return Asgi(Starlette(routes=[Host("{tenant}.shop", shop)]), engine=engine)

    async def story() -> None:
        headers = with_key("k", [("Host", "acme.shop"), ("Prefer", "respond-async")])
        first = await AsgiExchange("POST", "/", headers, b"").run(process())
        address = first.header("location")
        assert address is not None
        polled = await AsgiExchange("GET", address, [("Host", "acme.shop")], b"").run(process())
        assert (first.status, polled.status, polled.body) == (202, 200, b"{}")

    asyncio.run(story())


@pytest.mark.parametrize("caller", [None, lambda _request: "ada"])
def test_two_subdomains_of_flask_are_two_tenants(caller):
    """S1."""
    app = Flask(__name__, subdomain_matching=True)
    app.config["SERVER_NAME"] = "shop.test"
    for name in ("acme", "beta"):
        app.add_url_rule(
            "/", name, lambda name=name: {"tenant": name}, subdomain=name, methods=["POST"]
        )
    app.wsgi_app = Wsgi(app.wsgi_app, store="memory://", caller=caller)
    for name in ("acme", "beta", "acme"):
        answer = app.test_client().post("/", base_url=f"http://{name}.shop.test", headers=KEY)
        assert answer.json == {"tenant": name}


def test_a_route_whose_parameter_is_renamed_is_the_same_route():
    """L1: a retry that meets the next release does not run again."""
    store, served = open_async_store("memory://"), []

    def release(template: str) -> Starlette:
        @idempotent()
        async def pay(_request) -> JSONResponse:
            served.append(template)
            return JSONResponse({})

        app = Starlette(routes=[Route(template, pay, methods=["POST"])])
        app.add_middleware(Asgi, store=store)
        return app

    for template in ("/orders/{id}/pay", "/orders/{order_id}/pay"):
        posted(release(template), ("/orders/7/pay", KEY))
    assert served == ["/orders/{id}/pay"]


@pytest.mark.filterwarnings("ignore")  # FastAPI would rather be told another way
def test_an_operation_is_asked_for_behind_a_proxy_that_takes_off_a_prefix():
    """L3: the prefix is in `root_path` then, and not in the path."""
    app, may_end = FastAPI(root_path="/api"), asyncio.Event()

    @app.post("/reports")
    async def report():
        await current_operation().accept()
        await may_end.wait()

    app.add_middleware(Asgi, store="memory://", policy=Policy(in_flight="202"))

    async def story() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            told = await client.post("/reports", headers=KEY)
            asked = await client.get(told.headers["location"].removeprefix("/api"))
            may_end.set()
            return asked.status_code

    assert asyncio.run(story()) == 202


# --- what it is made of ---------------------------------------------------------------------


@pytest.mark.parametrize("routes", [list, {"/": None}, None])
def test_an_application_with_other_routes_than_starlette_s_is_guarded_as_any(routes):
    """S3: and what is not guarded passes."""

    class App:
        router = type("Router", (), {"routes": routes})

        async def __call__(self, _asgi_scope, _receive, send) -> None:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    app = Asgi(App(), store="memory://")
    answers = posted(app, ("/", {}), ("/", KEY), ("/", KEY))
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert answers[2].headers["idempotent-replayed"] == "true"


def test_the_reference_of_a_guarded_service_behind_us_is_not_passed_on():
    """K5, L2: one reference and one mark, however many services an answer came through."""
    theirs = [("Idempotency-Reference", "A"), ("idempotent-replayed", "true"), ("ETag", "1")]

    def app(_environ, start_response):
        start_response("200 OK", theirs)
        return []

    async def app_async(_asgi_scope, _receive, send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in theirs]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    for _ in range(2):  # and neither is one remembered for the replay
        said = []
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k"}
        environ |= {"wsgi.input": io.BytesIO()}
        Wsgi(app, store="memory://")(environ, lambda _, headers, said=said: said.extend(headers))
        names = [name.lower() for name, _ in said]
        assert (names.count("idempotency-reference"), names.count("etag")) == (1, 1)
        assert "idempotent-replayed" not in names
    first, second = posted(Asgi(app_async, store="memory://"), ("/", KEY), ("/", KEY))
    assert "A" not in first.headers.get_list("idempotency-reference")
    assert len(first.headers.get_list("idempotency-reference")) == 1
    assert "idempotent-replayed" not in first.headers
    assert second.headers.get_list("idempotent-replayed") == ["true"]


def test_a_large_body_needs_no_place_for_files(monkeypatch, caplog):
    """X2: a container may have none; memory is bounded by the policy then."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    client, served = flask_shop()
    body = b"x" * 3_000_000
    answers = [client.post("/orders", headers=KEY, data=body).status_code for _ in range(2)]
    assert (answers, len(served)) == ([201, 201], 1)
    assert client.post("/orders", headers=KEY, data=body + b"y").status_code == 422
    assert caplog.text.count("stays in memory") == 3


@pytest.mark.parametrize("room_bytes", [0, 1_450_000, 2_000_000, 3_000_000])
def test_a_body_for_which_the_disk_has_no_room_is_refused_before_anything_runs(room_bytes, caplog):
    """X2: a clear 503; a retry is served when there is room."""
    client, served = flask_shop()
    body = bytes(range(256)) * 12_000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
    try:
        refused = client.post("/orders", headers=KEY, data=body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.status_code, refused.headers["Retry-After"], served) == (503, "1", [])
    assert "could not be kept in a temporary file" in refused.get_json()["detail"]
    assert "its body could not be kept" in caplog.text
    assert client.post("/orders", headers=KEY, data=body).status_code == 201


def test_a_header_that_no_client_could_send_is_no_error():
    """X2: a middleware in front may have put it there."""
    client, served = flask_shop()
    environ = {"HTTP_X_NAME": "Žofie", "CONTENT_TYPE": "text/plain; name=Ž"}
    answer = client.post("/orders", headers=KEY, environ_overrides=environ)
    assert (answer.status_code, len(served)) == (201, 1)
    answer = client.post("/orders", environ_overrides={"HTTP_IDEMPOTENCY_KEY": "Ž"})
    assert answer.status_code == 400


def test_any_number_of_lines_of_one_header_is_joined():
    """X2: in a time that grows with them, and not with their square."""
    assert fields_of([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == {b"a": b"1, 3", b"b": b"2"}
    script = (
        "from coatcheck.server.request import fields_of;"
        "assert len(fields_of([(b'a', b'x' * 20)] * 300_000)[b'a']) == 22 * 300_000 - 2"
    )
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)
