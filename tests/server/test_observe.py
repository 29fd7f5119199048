"""R1: observe mode where ASGI, WSGI or a framework differ."""

import asyncio
import os
import signal
import threading

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from coatcheck import AsyncEngine, Decision, Engine, Policy, current_operation
from coatcheck.core.record import COMPLETED
from coatcheck.server import observe
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from coatcheck.stores import Query
from tests.support.http import AsgiExchange, Response, environ_of, exchange_wsgi, with_key
from tests.support.times import WAIT_S_MAX, eventually

OBSERVE = Policy(mode="observe")


class Charge(BaseModel):
    amount: int


def ok(_environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]


def post(app, key: str | None, body: bytes = b"{}") -> Response:
    return asyncio.run(AsgiExchange("POST", "/charges", with_key(key), body).run(app))


def test_a_marked_route_is_observed_and_refusals_before_its_handler_free_the_key():
    """R1, L8: a corrected request with the same key would have run."""
    decisions: list[Decision] = []
    engine = AsyncEngine("memory://", observers=[decisions.append])
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, engine=engine)
    seen = []

    @app.post("/charges")
    @idempotent(mode="observe", required=True)
    async def charge(body: Charge, operation: CurrentOperation) -> int:
        seen.append(await operation.step("charge", lambda: body.amount))
        return body.amount

    for count, (body, status) in enumerate(
        [(b"{}", 422), (b'{"amount": 1}', 200), (b'{"amount": 1}', 200), (b'{"amount": 2}', 200)], 1
    ):
        assert post(app, "k", body).status == status
        eventually(lambda count=count: len(decisions) == count)
    assert [(decision.outcome, decision.code) for decision in decisions] == [
        *(("executed", ""), ("executed", ""), ("would_replay", "")),
        ("would_refuse", "key-reused"),
    ]
    assert seen == [1, 1, 2]
    asyncio.run(engine.close())


def test_a_request_that_would_be_refused_still_has_an_operation(caplog):
    """R1: a handler that asks for its operation runs, and the log has a sentence about it."""
    caplog.set_level("INFO", "coatcheck")
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://", policy=OBSERVE)

    @app.post("/charges")
    @idempotent(required=True)
    async def charge(operation: CurrentOperation) -> str:
        return operation.derive("charge")

    bodies = {post(app, key).body for key in (None, None, "not a key \x7f")}
    assert len(bodies) == 3
    assert [line.split("(POST /charges) ")[1] for line in caplog.messages] == [
        "was run, and would have been refused with key-missing",
        "was run, and would have been refused with key-missing",
        "was run, and would have been refused with key-invalid",
    ]
    assert post(app, None).status == 200


def test_the_application_receives_every_message_of_the_server():
    """R1: also a client that leaves in the middle of its body, which record mode would not run."""
    incoming = [
        {"type": "http.request", "body": b'{"a"', "more_body": True},
        {"type": "http.disconnect"},
        {"type": "http.disconnect"},
    ]
    received = []

    async def app(_scope, receive, send):
        received.extend([await receive(), await receive(), await receive()])

    async def receive():
        return left.pop(0)

    async def send(message):
        raise AssertionError(message)

    left = list(incoming)
    engine = AsyncEngine("memory://", OBSERVE)
    guarded = IdempotencyMiddleware(app, engine=engine)
    asgi_scope = AsgiExchange("POST", "/charges", with_key("k"), b"").asgi_scope
    asyncio.run(guarded(asgi_scope, receive, send))
    assert received == incoming
    asyncio.run(engine.close())


def test_a_cancelled_request_is_cancelled_as_before():
    """R1: record mode would have let it finish; nothing is known of its outcome."""
    engine = AsyncEngine("memory://", OBSERVE)
    ended = []

    async def app(_scope, receive, _send):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        guarded = IdempotencyMiddleware(app, engine=engine)
        exchange = AsgiExchange("POST", "/charges", with_key("k"), b"{}")
        task = asyncio.create_task(exchange.run(guarded))
        leases = engine.attempts.heartbeat.leases
        await asyncio.to_thread(eventually, lambda: leases)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, lambda: not leases)
        await engine.close()

    asyncio.run(main())
    assert ended == [True]


def test_a_list_is_returned_as_it_is():
    """R1: servers work out its length, and then keep the connection."""
    with Engine("memory://", OBSERVE) as engine:
        body = [b"ok"]

        def app(_environ, start_response):
            start_response("200 OK", [])
            return body

        environ = environ_of("POST", "/orders", with_key("k"), b"{}")
        assert WsgiMiddleware(app, engine=engine)(environ, lambda *_: None) is body
        eventually(lambda: engine.store.find(Query()).records)


def test_a_slow_store_is_given_no_more_requests_than_it_can_take(monkeypatch, caplog):
    """R1: they run, and are not observed."""
    monkeypatch.setattr(observe, "PENDING_MAX", 0)
    with Engine("memory://", OBSERVE) as engine:
        guarded = WsgiMiddleware(ok, engine=engine)
        for _ in range(3):
            environ = environ_of("POST", "/orders", with_key("k"), b"{}")
            assert exchange_wsgi(guarded, environ).body == b"ok"
        assert engine.store.find(Query()).records == []
    assert caplog.messages == [
        "coatcheck: requests are not observed, because the store is too slow"
    ]


def test_a_forked_server_observes_in_its_children(tmp_path):
    """R1: gunicorn loads the application once, and forks."""
    with Engine(f"sqlite:///{tmp_path}/orders.db", OBSERVE) as engine:
        guarded = WsgiMiddleware(ok, engine=engine)

        def serve(key: str) -> None:
            exchange_wsgi(guarded, environ_of("POST", "/orders", with_key(key), b"{}"))
            eventually(lambda: key in [r.key for r in engine.store.find(Query()).records])

        serve("parent")
        child = os.fork()
        if not child:
            code = 1
            try:
                serve("child")
                code = 0
            finally:
                os._exit(code)
        deadline = threading.Timer(WAIT_S_MAX, os.kill, (child, signal.SIGKILL))
        deadline.start()
        assert os.waitpid(child, 0)[1] == 0
        deadline.cancel()


def chunks_of(sent: list[bytes]):
    """Two chunks; the second is made only if the first has been sent."""
    yield b"one"
    assert sent == [b"one"], "the first chunk was held back"
    yield b"two"


def test_a_streamed_response_is_sent_as_it_is_made_over_asgi():
    """R1."""
    sent: list[bytes] = []

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in chunks_of(sent):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.extend([message["body"]] if message.get("body") else [])

    async def main():
        async with AsyncEngine("memory://", OBSERVE) as engine:
            exchange = AsgiExchange("POST", "/charges", with_key("k"), b"{}")
            guarded = IdempotencyMiddleware(app, engine=engine)
            await guarded(exchange.asgi_scope, exchange.receive, send)

    asyncio.run(main())
    assert sent == [b"one", b"two"]


def test_a_streamed_response_is_sent_as_it_is_made_over_wsgi():
    """R1: the handler also has its operation while it makes the chunks."""
    sent: list[bytes] = []
    keys = []

    def app(_environ, start_response):
        start_response("200 OK", [])
        for chunk in chunks_of(sent):
            keys.append(current_operation().key)
            yield chunk

    with Engine("memory://", OBSERVE) as engine:
        environ = environ_of("POST", "/orders", with_key("k"), b"{}")
        returned = WsgiMiddleware(app, engine=engine)(environ, lambda *_: None)
        sent.extend(returned)
        returned.close()
        eventually(lambda: [r.state for r in engine.store.find(Query()).records] == [COMPLETED])
    assert (sent, keys) == ([b"one", b"two"], ["k", "k"])
    assert current_operation() is None


def test_a_middleware_behind_one_that_observes_still_guards():
    """R1, L1: as if the outer one were not there."""
    calls = []

    def app(environ, start_response):
        calls.append(1)
        return ok(environ, start_response)

    with Engine("memory://", OBSERVE) as outer, Engine("memory://") as inner:
        guarded = WsgiMiddleware(WsgiMiddleware(app, engine=inner), engine=outer)
        for _ in range(2):
            environ = environ_of("POST", "/orders", with_key("k"), b"{}")
            assert exchange_wsgi(guarded, environ).body == b"ok"
    assert calls == [1]
