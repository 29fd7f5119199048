"""Starting a server: what a store that is down, and a mistake in the settings, do to it."""

import asyncio
import os
import subprocess
import sys
from contextlib import closing

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.testclient import TestClient

from coatcheck import AsyncEngine, Engine, Misconfigured, MissingExtra, StoreUnavailable
from coatcheck.server import asgi, wsgi
from coatcheck.server.fastapi import idempotent
from coatcheck.stores.lazy import RETRY_S, LazyStore
from coatcheck.stores.memory import MemoryStore
from tests.support.servers import free_port
from tests.support.servers.postgres import Postgres
from tests.support.servers.redis import Redis
from tests.support.times import WAIT_S_MAX, eventually
from tests.support.web_servers import ROOT, UVICORN, UVICORN_ALONE, WAITRESS, Server

APP = "tests.server.boot_app"
MIDDLEWARES = {"asgi": asgi.IdempotencyMiddleware, "wsgi": wsgi.IdempotencyMiddleware}


@pytest.fixture
def postgres():
    server = Postgres()
    yield server
    server.remove()


@pytest.mark.parametrize("kind", [UVICORN_ALONE, WAITRESS], ids=lambda kind: kind.name)
def test_a_server_starts_while_its_store_is_down_and_recovers(kind, postgres, tmp_path):
    """D2: the application's lifespan runs, unguarded requests work, guarded ones get 503."""
    postgres.kill()
    store = f"{postgres.url}?timeout=1s"
    with closing(Server(kind, tmp_path, APP, SHOP_STORE=store)) as server:
        assert server.exchange("GET", "/pid").status == 200
        assert server.exchange("POST", "/unguarded").status == 200
        refused = server.post("k-1", "/orders")
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert refused.code == "store-unavailable"
        is_asgi = kind.flavour == "asgi"
        assert server.lines_of("started") == ["x"] * is_asgi
        before = len(server.lines_of("orders"))
        postgres.start()
        eventually(lambda: server.post("k-1", "/orders").status < 300)
        assert server.post("k-1", "/orders").header("idempotent-replayed") == "true"
        assert len(server.lines_of("orders")) == before + 1
    assert server.lines_of("stopped") == ["x"] * is_asgi


def run_uvicorn(tmp_path, **environ) -> tuple[int, str]:
    """How uvicorn ended, and what it wrote."""
    command = [word.format(app=APP) for word in UVICORN]
    done = subprocess.run(
        [*command, f"--port={free_port()}"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "SHOP_DIRECTORY": str(tmp_path),
            "SHOP_FLAVOUR": "asgi",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    return done.returncode, done.stderr


MISTAKES = {
    "scheme": ({"SHOP_STORE": "postgrest://localhost/shop"}, "no store is known for 'postgrest'"),
    "option": ({"SHOP_STORE": "sqlite:///a.db?compakt=1"}, "compakt"),
    "policy": ({"SHOP_STORE": "memory://", "SHOP_POLICY": "paiments"}, "paiments"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_uvicorn_does_not_start_with_a_mistake_in_the_settings(mistake, tmp_path):
    """D2: it exits with an error that names the mistake."""
    environ, words = MISTAKES[mistake]
    status, written = run_uvicorn(tmp_path, **environ)
    assert status == 3
    assert "coatcheck: " in written
    assert words in written
    assert "Application startup failed" in written
    assert "Traceback" not in written


def test_uvicorn_does_not_start_on_a_redis_that_may_evict_records(tmp_path):
    """D2, D3."""
    redis = Redis(**{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    try:
        url = f"redis://127.0.0.1:{redis.port}/0"
        status, written = run_uvicorn(tmp_path, SHOP_STORE=url)
        assert status == 3
        assert "allkeys-lru" in written
        with pytest.raises(Misconfigured, match="allkeys-lru"):
            wsgi.IdempotencyMiddleware(lambda _environ, _start: [], store=url)
    finally:
        redis.remove()


@pytest.mark.parametrize("kind", [UVICORN_ALONE, WAITRESS], ids=lambda kind: kind.name)
def test_a_store_that_comes_back_unsafe_is_refused_until_it_is_safe(kind, tmp_path):
    """D2, D3: the server runs already, so guarded requests get 503 and the log says why."""
    redis = Redis(**{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    try:
        redis.kill()
        with closing(Server(kind, tmp_path, APP, SHOP_STORE=redis.url)) as server:
            assert server.post("k-1", "/orders").code == "store-unavailable"
            redis.start()

            def is_refused_as_unsafe() -> bool:
                refused = server.post("k-1", "/orders")
                assert (refused.status, refused.code) == (503, "store-unavailable")
                return "allkeys-lru" in server.log()

            eventually(is_refused_as_unsafe)
            assert server.exchange("POST", "/unguarded").status == 200
            redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
            eventually(lambda: server.post("k-1", "/orders").status < 300)
    finally:
        redis.remove()


@pytest.mark.parametrize("flavour", MIDDLEWARES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_raised_where_the_middleware_is_made(flavour, mistake):
    """D2: so that the import of the application fails."""
    environ, words = MISTAKES[mistake]
    with pytest.raises(Misconfigured, match=words):
        MIDDLEWARES[flavour](None, store=environ["SHOP_STORE"], policy=environ.get("SHOP_POLICY"))


@pytest.mark.parametrize("flavour", MIDDLEWARES)
def test_a_missing_driver_is_named_where_the_middleware_is_made(flavour, monkeypatch):
    """D2."""
    monkeypatch.setitem(sys.modules, "coatcheck.stores.postgres.store", None)
    with pytest.raises(MissingExtra, match=r"pip install 'coatcheck\[postgres\]'"):
        MIDDLEWARES[flavour](None, store="postgresql://127.0.0.1/shop")


def test_a_schema_that_is_missing_and_may_not_be_created_stops_the_server(tmp_path):
    """D2, D4: over WSGI where the middleware is made."""
    url = f"sqlite:///{tmp_path}/orders.db?create=0"
    status, written = run_uvicorn(tmp_path, SHOP_STORE=url)
    assert status == 3
    assert "coatcheck migrate" in written
    with pytest.raises(Misconfigured, match="coatcheck migrate"):
        wsgi.IdempotencyMiddleware(None, store=url)


def test_a_mistake_is_raised_by_starlettes_test_client():
    """D2: and not by each request, while the client waits for ever at its end."""
    app = Starlette()
    app.add_middleware(asgi.IdempotencyMiddleware, store="mongodb://localhost/orders")
    with pytest.raises(Misconfigured, match="mongodb"), TestClient(app):
        pytest.fail("the application has started")


def test_a_misspelt_argument_of_the_middleware_stops_the_server():
    """D2: Starlette makes its middlewares so late that a server would start all the same."""
    app = Starlette()
    app.add_middleware(asgi.IdempotencyMiddleware, store="memory://", polcy="payments")
    with (
        pytest.raises(Misconfigured, match=r"no argument 'polcy' \(did you mean policy\?\)"),
        TestClient(app),
    ):
        pytest.fail("the application has started")


@pytest.mark.parametrize("variable", ["", "1"])
def test_a_mark_that_contradicts_the_policy_of_the_middleware_stops_the_server(
    monkeypatch, variable
):
    """D2: not each request of that route; a process that is switched off starts all the same."""
    monkeypatch.setenv("COATCHECK_DISABLED", variable)
    app = FastAPI()
    app.add_middleware(asgi.IdempotencyMiddleware, store="memory://", policy="payments")

    @app.post("/charges")
    @idempotent(on_outage="execute")
    async def charge() -> str:
        return "charged"

    if variable:
        with TestClient(app) as client:
            assert client.post("/charges").json() == "charged"
        return
    with pytest.raises(Misconfigured, match=r"POST /charges: on_outage='execute'"), TestClient(app):
        pytest.fail("the application has started")


@pytest.mark.parametrize("flavour", MIDDLEWARES)
@pytest.mark.parametrize("wrong", [{"store": ""}, {"store": ()}, {"routes": 7}])
def test_a_value_that_is_empty_or_no_function_is_refused(flavour, wrong):
    """D2: an empty variable of the environment does not mean the default store."""
    with pytest.raises(Misconfigured):
        MIDDLEWARES[flavour](None, **{"store": "memory://", **wrong})


def test_a_mistake_in_starlettes_settings_is_raised_by_requests_without_a_lifespan():
    """D2: servers without a lifespan would otherwise serve unguarded requests."""
    app = Starlette()
    app.add_middleware(asgi.IdempotencyMiddleware, store="nothing://")

    async def send(_message) -> None:
        pass

    async def story() -> None:
        with pytest.raises(Misconfigured, match="nothing"):
            await app({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send)

    asyncio.run(story())


@pytest.mark.parametrize("flavour", MIDDLEWARES)
def test_making_a_middleware_opens_nothing(flavour, tmp_path):
    """D2: no file and no connection."""
    MIDDLEWARES[flavour](None, store=f"sqlite:///{tmp_path}/orders.db")
    assert list(tmp_path.iterdir()) == []
    MIDDLEWARES[flavour](None, store=f"postgresql://127.0.0.1:{free_port()}/shop")


def test_an_engine_opens_its_store_at_the_first_call(tmp_path):
    """D2."""
    with Engine(f"sqlite:///{tmp_path}/orders.db") as engine:
        assert list(tmp_path.iterdir()) == []
        assert engine.run("k", int, "7") == 7
        assert (tmp_path / "orders.db").exists()


def test_an_async_engine_that_was_never_used_is_closed_without_opening_its_store(tmp_path):
    """D2."""

    async def story() -> None:
        async with AsyncEngine(f"sqlite:///{tmp_path}/orders.db"):
            pass

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []


# --- the store that is opened at its first use ------------------------------------------------


class Opening:
    """Opens a memory store, unless it is down; counts how often it was tried."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.tries = 0
        self.is_down = True
        self.is_unsafe = False
        self.lazy = LazyStore(self.open, monotonic=lambda: self.now_s)

    def open(self) -> MemoryStore:
        self.tries += 1
        if self.is_down:
            raise StoreUnavailable("down")
        if self.is_unsafe:
            raise Misconfigured("unsafe")
        return MemoryStore()


def test_an_unreachable_store_is_tried_once_a_second():
    """D2: not by each of a thousand requests, one after the other."""
    opening = Opening()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="down"):
            opening.lazy.now_ms()
    assert opening.tries == 1
    opening.now_s += RETRY_S
    opening.is_down = False
    assert opening.lazy.get([bytes(16)]) == [None]
    assert opening.lazy.get([bytes(16)]) == [None]
    assert opening.tries == 2


def test_a_mistake_is_raised_at_once_and_after_an_outage_it_is_a_part_of_it():
    """D2, D3: a server that has started without its store keeps running."""
    opening = Opening()
    opening.is_down, opening.is_unsafe = False, True
    with pytest.raises(Misconfigured, match="unsafe"):
        opening.lazy.now_ms()
    opening.is_down = True
    with pytest.raises(StoreUnavailable, match="down"):
        opening.lazy.now_ms()
    opening.is_down = False
    opening.now_s += RETRY_S
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="unsafe"):
            opening.lazy.now_ms()
    assert opening.tries == 3
    opening.is_unsafe = False
    opening.now_s += RETRY_S
    assert opening.lazy.get([bytes(16)]) == [None]


def test_the_check_of_an_unreachable_store_is_a_finding():
    """D3."""
    (finding,) = Opening().lazy.check()
    assert (finding.level, finding.message) == ("error", "down")


def test_a_closed_store_is_not_opened_again():
    opening = Opening()
    opening.is_down = False
    opening.lazy.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        opening.lazy.now_ms()
    assert opening.tries == 0
