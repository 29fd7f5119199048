"""R2: the kill switch lets guarded requests pass, for a process and for a route, without a release."""

import asyncio
import logging
import os

import pytest
from fastapi import FastAPI

from coatcheck import AsyncEngine, Misconfigured
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.server.switch import VARIABLE, DisabledFile
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.server.laws.api import OpenApi
from tests.support.http import AsgiExchange, environ_of, exchange_wsgi, with_key

ORDERS, REFUNDS = "POST /orders", "POST /refunds"


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def warnings(caplog) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.name == "coatcheck"]
    caplog.clear()
    return found


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


# --- the file -------------------------------------------------------------------------------


def test_a_file_is_read_again_when_it_has_changed(tmp_path, seconds, caplog):
    """R2: at most once a second, and each change is logged once."""
    path = tmp_path / "coatcheck.off"
    switch = DisabledFile(path, seconds)
    assert not switch.is_disabled(ORDERS)
    path.write_text(f"# the provider is broken\n\n  {ORDERS}  \n")
    assert not switch.is_disabled(ORDERS)
    assert warnings(caplog) == []
    seconds.now_s += 1
    assert switch.is_disabled(ORDERS)
    assert not switch.is_disabled(REFUNDS)
    assert warnings(caplog) == [f"coatcheck: disabled by {path}: {ORDERS}"]
    seconds.now_s += 1
    assert switch.is_disabled(ORDERS)
    path.unlink()
    seconds.now_s += 1
    assert not switch.is_disabled(ORDERS)
    assert warnings(caplog) == [f"coatcheck: {path} disables nothing any more"]


@pytest.mark.parametrize(
    ("line", "disabled"),
    [
        ("*", {ORDERS, REFUNDS, "PATCH /orders/{id}"}),
        ("POST /*", {ORDERS, REFUNDS}),
        ("PATCH /orders/{id}", {"PATCH /orders/{id}"}),
        ("POST /order", set()),
        ("", set()),
    ],
)
def test_a_line_is_a_label_or_its_beginning(tmp_path, seconds, line, disabled):
    """R2."""
    path = tmp_path / "coatcheck.off"
    path.write_text(line)
    switch = DisabledFile(path, seconds)
    labels = {ORDERS, REFUNDS, "PATCH /orders/{id}"}
    assert {label for label in labels if switch.is_disabled(label)} == disabled


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path, seconds, caplog):
    """R2: the last known state stays, and the error is logged once."""
    path = tmp_path / "coatcheck.off"
    path.write_text(ORDERS)
    switch = DisabledFile(path, seconds)
    assert switch.is_disabled(ORDERS)
    warnings(caplog)
    path.unlink()
    path.mkdir()
    for _ in range(3):
        seconds.now_s += 1
        assert switch.is_disabled(ORDERS)
    (error,) = warnings(caplog)
    assert error.startswith(f"coatcheck: {path} cannot be read")
    path.rmdir()
    path.write_bytes(b"\xff\xfe\n")
    seconds.now_s += 1
    assert switch.is_disabled(ORDERS)
    path.write_text(REFUNDS)
    seconds.now_s += 1
    assert switch.is_disabled(REFUNDS)
    assert not switch.is_disabled(ORDERS)


# --- in a middleware ------------------------------------------------------------------------


def test_a_disabled_route_passes_and_another_is_guarded(open_api: OpenApi, tmp_path, caplog):
    """R2: nothing of ours is in the response, and nothing is stored."""
    path = tmp_path / "coatcheck.off"
    path.write_text(ORDERS)
    api = open_api(disabled_by=path)
    responses = [api.post(), api.post()]
    assert [response.body for response in responses] == [b'{"order": 1}', b'{"order": 2}']
    assert [response.all("idempotency-reference") for response in responses] == [[], []]
    assert api.records() == []
    assert warnings(caplog) == [f"coatcheck: disabled by {path}: {ORDERS}"]
    assert not api.post(path="/refunds").is_replay
    assert api.post(path="/refunds").is_replay


def test_a_function_switches_a_route_off_and_on(open_api: OpenApi, caplog):
    """R2: without a restart; each change is logged once."""
    disabled: set[str] = set()
    api = open_api(disabled_by=disabled.__contains__)
    api.post()
    disabled.add(ORDERS)
    for _ in range(2):
        assert not api.post().is_replay
    disabled.clear()
    for _ in range(2):
        assert api.post().is_replay
    assert warnings(caplog) == [
        f"coatcheck: disabled by a function: {ORDERS}",
        f"coatcheck: guarded again: {ORDERS}",
    ]


def test_a_function_that_fails_disables_nothing(open_api: OpenApi, caplog):
    """R2: the safe side is to guard; the log is not flooded."""

    def fail(_label):
        raise ZeroDivisionError

    api = open_api(disabled_by=fail)
    assert [api.post().is_replay, api.post().is_replay] == [False, True]
    assert warnings(caplog) == [f"coatcheck: disabled_by= failed, so {ORDERS} stays guarded"]


def test_a_function_that_returns_something_to_await_disables_nothing(open_api: OpenApi, caplog):
    """R2: a coroutine would count as True, and nothing would be guarded any more."""

    def forgot_to_await(label: str):
        return disabled_later(label)

    api = open_api(disabled_by=forgot_to_await)
    assert [api.post().is_replay, api.post().is_replay] == [False, True]
    assert warnings(caplog) == [f"coatcheck: disabled_by= failed, so {ORDERS} stays guarded"]


def test_a_process_is_disabled_by_its_environment(open_api: OpenApi, monkeypatch, caplog):
    """R2: read when the middleware is made."""
    monkeypatch.setenv(VARIABLE, "1")
    api = open_api(required=True)
    assert [api.post(None).status, api.post().status, api.post().is_replay] == [201, 201, False]
    assert warnings(caplog) == [f"coatcheck: disabled by {VARIABLE}: nothing is guarded"]
    monkeypatch.setenv(VARIABLE, "0")
    assert open_api(required=True).post(None).status == 400


async def disabled_later(_label):
    return True


@pytest.mark.parametrize("disabled_by", [7, disabled_later])
def test_a_wrong_switch_is_refused(open_api: OpenApi, disabled_by):
    """R2."""
    with pytest.raises(Misconfigured, match="disabled_by="):
        open_api(disabled_by=disabled_by)


def test_a_misspelt_environment_is_refused(open_api: OpenApi, monkeypatch):
    """R2: it would otherwise be taken for one of the two."""
    monkeypatch.setenv(VARIABLE, "ture")
    with pytest.raises(Misconfigured, match="'ture'; write 1 to disable coatcheck, or 0"):
        open_api()


def test_a_disabled_process_starts_without_its_store(monkeypatch):
    """R2: a broken store is a reason to switch off."""
    monkeypatch.setenv(VARIABLE, "1")
    seen: list[str] = []

    async def app(asgi_scope, receive, send):
        seen.append(asgi_scope["type"])
        assert (await receive())["type"] == "lifespan.startup"

    async def receive():
        return {"type": "lifespan.startup"}

    store = "sqlite:////no/such/directory/orders.db"
    guarded = IdempotencyMiddleware(app, store=store)
    asyncio.run(guarded({"type": "lifespan"}, receive, None))
    assert seen == ["lifespan"]

    def wsgi(_environ, start_response):
        start_response("200 OK", [])
        return [b"ok"]

    guarded_wsgi = WsgiMiddleware(wsgi, store="redis://127.0.0.1:1/0")
    environ = environ_of("POST", "/orders", with_key("k"), b"{}")
    assert exchange_wsgi(guarded_wsgi, environ).body == b"ok"


def test_a_disabled_process_does_not_ask_the_store_for_a_polling_address(
    open_api: OpenApi, monkeypatch
):
    """R2, L10: 503, because 404 would tell the client that its operation does not exist."""
    monkeypatch.setenv(VARIABLE, "1")
    api = open_api(in_flight="202", settings={"clock": None})
    address = "/idempotency/operations/" + "0" * 64
    polled = api.send("GET", address)
    assert (polled.status, polled.code) == (503, "store-unavailable")
    assert polled.header("retry-after") == "1"
    assert not api.engine.is_started
    assert api.send("HEAD", address).body == b""
    assert [api.send("GET", p).status for p in (address[:-1], "/orders")] == [201, 201]


def test_a_handler_that_accepts_long_work_runs_while_it_is_disabled(tmp_path):
    """R2, L10: there is nothing to poll for, so its client waits for the answer."""
    path = tmp_path / "coatcheck.off"
    path.write_text("*")
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://", disabled_by=path)

    @app.post("/films")
    @idempotent
    async def cut(operation: CurrentOperation) -> str:
        await operation.accept()
        with pytest.raises(Misconfigured, match="no record"):
            await operation.defer()
        return "cut"

    @app.post("/stills")
    @idempotent
    def still(operation: CurrentOperation) -> str:
        operation.accept()
        return "still"

    for target, body in (("/films", b'"cut"'), ("/stills", b'"still"')):
        exchange = AsgiExchange("POST", target, with_key("k"), b"{}")
        response = asyncio.run(exchange.run(app))
        assert (response.status, response.body) == (200, body)


def test_a_marked_route_works_while_it_is_disabled(tmp_path, caplog):
    """R2, K5: by its template; an endpoint that asks for its operation gets one without a record."""
    caplog.set_level(logging.WARNING)
    path = tmp_path / "coatcheck.off"
    path.write_text("POST /charges/{number}")
    engine = AsyncEngine("memory://")
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, engine=engine, disabled_by=os.fspath(path))
    seen = []

    @app.post("/charges/{number}")
    @idempotent(required=True)
    async def charge(number: int, operation: CurrentOperation) -> int:
        assert await operation.step("charge", lambda: 7) == 7
        seen.append((operation.fence, operation.label, operation.derive("charge")))
        return number

    for key in ("k", "k", None):
        exchange = AsgiExchange("POST", "/charges/1", with_key(key), b"{}")
        response = asyncio.run(exchange.run(app))
        assert (response.status, response.all("idempotency-reference")) == (200, [])
    assert [call[:2] for call in seen] == [(0, "POST /charges/{number}")] * 3
    assert len({call[2] for call in seen}) == 3
    asyncio.run(engine.close())
