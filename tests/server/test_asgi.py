"""What is particular to ASGI: messages, tasks, streams, disconnects, and Starlette's own ways."""

import asyncio
import contextvars
import gc
import io
import tempfile
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute

from coatcheck import AsyncEngine, Policy, current_operation
from coatcheck.engine.transactions import Repeat
from coatcheck.server import callers
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.asgi.exchange import RUNNING_EXCHANGES
from coatcheck.server.body import MEMORY_BYTES_MAX
from coatcheck.stores import ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support.http import ORDER, AsgiExchange, Response, with_key
from tests.support.times import WAIT_S_MAX

# How long a blocked event loop is waited for: in vain, if the test is to fail.
LOOP_S_MAX = 5
PLAIN = b"".join(b"line %d\n" % n for n in range(500))


@pytest.fixture(params=["at once", "in a thread"])
def engine(request: pytest.FixtureRequest) -> AsyncEngine:
    """A store that answers at once, and one that lets others run meanwhile."""
    store = MemoryStore()
    slow = ThreadedStore(store)
    engine = AsyncEngine(AsyncMemoryStore(store) if request.param == "at once" else slow)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def guard(engine: AsyncEngine) -> Callable[..., IdempotencyMiddleware]:
    return lambda app: IdempotencyMiddleware(app, engine=engine)


def run(story: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(story, WAIT_S_MAX))


async def post(app, path: str = "/", body: bytes = ORDER, *, key: str | None = "k-1", headers=()):
    return await AsgiExchange("POST", path, with_key(key, headers), body).run(app)


def send(app, *args: Any, **kwargs: Any) -> Response:
    """The same on an event loop of its own."""
    return run(post(app, *args, **kwargs))


def starlette(endpoint, *middleware: Middleware) -> Starlette:
    routes = [Route("/", endpoint, methods=["GET", "HEAD", "POST"])]
    return Starlette(routes=routes, middleware=list(middleware))


class Endpoint:
    """A Starlette endpoint that counts its calls and answers with what *make* makes."""

    def __init__(self, make: Callable[[], Any] = lambda: JSONResponse({"n": 1}, 201)) -> None:
        self.calls = 0
        self._make = make

    async def __call__(self, request: Request) -> Any:
        self.calls += 1
        await request.body()
        return self._make()

    def route(self):
        async def endpoint(request: Request) -> Any:
            return await self(request)

        return endpoint


def test_a_collision_that_is_not_of_this_request_is_an_error_like_any_other(guard, engine):
    """L1, L4: a guarded function of the handler may pass on that its own database wants a repeat."""
    runs = []

    async def collide(_scope, receive, _send):
        await receive()
        runs.append(1)
        raise Repeat(len(runs)) if len(runs) == 1 else ZeroDivisionError

    answer = send(guard(collide))
    assert (answer.status, type(answer.error), runs) == (500, Repeat, [1])
    assert engine.attempts.heartbeat.leases == {}


def test_a_caller_may_be_read_from_a_large_body_also_for_a_refusal_from_memory(engine):
    """F1: the file of the body is open until the answer is found."""

    async def order(_scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"1"})

    app = IdempotencyMiddleware(order, engine=engine, caller=lambda request: request.json()[0])
    bodies = [b'["ada", %d, "%s"]' % (n, b"x" * MEMORY_BYTES_MAX) for n in (1, 2)]
    answers = [send(app, body=body) for body in bodies]
    assert [answer.status for answer in answers] == [201, 422]


def test_a_large_body_is_written_to_its_file_beside_the_event_loop(guard, monkeypatch):
    """X2: a slow disk does not delay the other requests of the process."""
    body = bytes(range(256)) * (3 * MEMORY_BYTES_MAX // 256)
    loops, tries = [], []

    class SlowFile(io.BytesIO):
        """A file that takes what it is given when the event loop has had its turn."""

        def write(self, chunk):
            has_run = threading.Event()
            loops[0].call_soon_threadsafe(has_run.set)
            tries.append(has_run.wait(LOOP_S_MAX))
            return super().write(chunk)

    monkeypatch.setattr(tempfile, "TemporaryFile", SlowFile)

    async def echo(request: Request) -> Any:
        return PlainTextResponse(await request.body(), 201)

    async def story():
        loops.append(asyncio.get_running_loop())
        return await post(guard(starlette(echo)), body=body)

    assert run(story()).body == body
    assert set(tries) == {True}


def test_a_body_that_cannot_be_written_is_refused_before_anything_runs(guard, monkeypatch):
    """X2."""

    class FullDisk(io.BytesIO):
        def write(self, chunk):
            raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", FullDisk)
    endpoint = Endpoint()
    answer = send(guard(starlette(endpoint.route())), body=b"x" * 3 * MEMORY_BYTES_MAX)
    assert (answer.status, answer.code, endpoint.calls) == (503, "store-unavailable", 0)


def test_an_application_that_waits_for_the_end_of_a_broken_connection_gets_it(guard):
    """L11: the answer is stored, and the client cannot get it any more."""
    received = []

    async def wait_for_end(_scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 201, "headers": []})
        with suppress(OSError):
            await send({"type": "http.response.body", "body": b"1"})
        received.append((await receive())["type"])

    class Broken(AsgiExchange):
        async def send(self, message):
            self.is_done.set()
            raise OSError("the client has hung up")

    async def story():
        exchange = Broken("POST", "/", with_key("k-1"), ORDER)
        await guard(wait_for_end)(exchange.asgi_scope, exchange.receive, exchange.send)

    run(story())
    assert received == ["http.disconnect"]


# --- other middleware, inside and outside ---------------------------------------------------


async def passes_on(request, call_next):
    response = await call_next(request)
    response.headers["X-Seen"] = "1"
    return response


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_a_base_http_middleware_beside_ours_changes_nothing(guard, engine, where: str):
    """L12: it cuts every response into chunks, and runs the application in a task of its own."""
    endpoint = Endpoint()
    ours = Middleware(IdempotencyMiddleware, engine=engine)
    theirs = Middleware(BaseHTTPMiddleware, dispatch=passes_on)
    order = {"inside": (ours, theirs), "outside": (theirs, ours), "both": (theirs, ours, theirs)}
    app = starlette(endpoint.route(), *order[where])

    first, again = send(app), send(app)
    assert first.body == again.body == b'{"n":1}'
    assert again.is_replay
    assert first.header("content-length") == "7"
    assert set(again.all("x-seen")) == {"1"}
    assert endpoint.calls == 1


def test_what_a_middleware_in_front_adds_to_one_replay_is_not_in_the_next(guard):
    """L12: middleware adds to the list of headers that it is given, and to that very list."""
    inner = guard(starlette(Endpoint().route()))

    async def in_front(asgi_scope, receive, send) -> None:
        async def add(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-added", b"1"))
            await send(message)

        await inner(asgi_scope, receive, add)

    send(in_front)
    for _ in range(3):
        again = send(in_front)
        assert again.is_replay
        assert again.all("x-added") == ["1"]


@pytest.mark.parametrize("path", ["/", "/below"])
def test_a_request_that_is_guarded_twice_is_guarded_once(engine, path: str):
    """L1: the middleware around the application and again around a part of it."""
    calls: list[int] = []

    async def endpoint(request: Request) -> PlainTextResponse:
        calls.append(len(await request.body()))
        return PlainTextResponse("done")

    inner = IdempotencyMiddleware(starlette(endpoint), engine=engine)
    app = inner if path == "/" else Starlette(routes=[Mount("/below", inner)])
    guarded = IdempotencyMiddleware(app, engine=engine)

    async def story() -> None:
        first = await asyncio.wait_for(post(guarded, path + "/" * (path != "/")), 1)
        assert (first.status, first.body) == (200, b"done")
        assert first.reference
        assert (await post(guarded, path + "/" * (path != "/"))).is_replay
        assert calls == [len(ORDER)]

    run(story())


# --- what is not ours -----------------------------------------------------------------------


def test_a_stream_that_is_cancelled_ends_as_without_us(guard):
    """L11, L12: its record was complete when it began, so nothing is left to finish."""

    async def story() -> None:
        has_begun, is_closed = asyncio.Event(), asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
                has_begun.set()
                await asyncio.Event().wait()
            finally:
                is_closed.set()

        endpoint = Endpoint(lambda: StreamingResponse(chunks(), media_type="text/event-stream"))
        running = asyncio.create_task(post(guard(starlette(endpoint.route()))))
        await has_begun.wait()
        running.cancel()
        await asyncio.wait_for(is_closed.wait(), WAIT_S_MAX)

    run(story())


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_every_kind_of_response_is_kept_and_given_whole(guard, tmp_path, kind: str):
    """L12: Starlette's streams watch for a disconnect while they send; they must see none."""
    (tmp_path / "file.txt").write_bytes(PLAIN)

    async def in_pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(PLAIN), 100):
            yield PLAIN[at : at + 100]

    makes = {
        "stream": lambda: StreamingResponse(in_pieces(), media_type="text/plain"),
        "file": lambda: FileResponse(tmp_path / "file.txt"),
    }
    endpoint = Endpoint(makes[kind])
    app = guard(starlette(endpoint.route()))

    first, again = send(app), send(app)
    assert first.body == again.body == PLAIN
    assert again.is_replay
    assert endpoint.calls == 1


def test_an_answer_that_is_too_large_at_once_is_not_kept(engine):
    """L12, X2: in one message, so nothing could be streamed."""
    engine.policy = Policy(response_bytes_max=1_000)
    app = IdempotencyMiddleware(raw(START, {**REST, "body": b"x" * 1_001}), engine=engine)

    assert send(app).body == b"x" * 1_001
    assert send(app).code == "result-unavailable"


@pytest.mark.parametrize("path", ["/ws", "/idempotency/operations/00"])
def test_a_websocket_passes_us_untouched(guard, path: str):
    """S3: whatever their path looks like."""
    seen: list[str] = []

    async def greet(websocket) -> None:
        await websocket.accept()
        seen.append(await websocket.receive_text())
        await websocket.close()

    app = guard(Starlette(routes=[WebSocketRoute(path, greet)]))
    incoming = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hello"}]
    outgoing: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        outgoing.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "scheme": "ws"}
    run(app({**scope, "subprotocols": [], "root_path": ""}, receive, send))
    assert seen == ["hello"]
    assert [message["type"] for message in outgoing] == ["websocket.accept", "websocket.close"]


def test_the_lifespan_passes_untouched(guard):
    """S3."""
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    outgoing: list[str] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        outgoing.append(message["type"])

    run(guard(Starlette())({"type": "lifespan", "state": {}}, receive, send))
    assert outgoing == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# --- after the response ---------------------------------------------------------------------


def test_background_tasks_run_after_the_response_and_do_not_delay_it(guard):
    """L2: the client has its answer, and a retry too, while the task still runs."""

    async def story() -> None:
        may_end, ended = asyncio.Event(), asyncio.Event()

        async def task() -> None:
            await may_end.wait()
            ended.set()

        def make() -> JSONResponse:
            return JSONResponse({"n": 1}, 201, background=BackgroundTask(task))

        app = guard(starlette(Endpoint(make).route()))
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        running = asyncio.create_task(exchange.run(app))
        await exchange.is_done.wait()
        assert not ended.is_set()
        assert (await post(app)).is_replay
        may_end.set()
        await running
        assert ended.is_set()

    run(story())


def test_a_background_task_that_fails_changes_nothing_of_the_answer(guard):
    """L4: it is the server's to report."""

    def fails() -> None:
        raise OSError("no mail today")

    endpoint = Endpoint(lambda: JSONResponse({}, 201, background=BackgroundTask(fails)))
    app = guard(starlette(endpoint.route()))

    async def story() -> None:
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        with pytest.raises(OSError, match="no mail"):
            await exchange.run(app)
        assert exchange.response().status == 201
        assert (await post(app)).is_replay
        assert endpoint.calls == 1

    run(story())


# --- errors ---------------------------------------------------------------------------------


def raw(*messages: dict[str, Any], error: Exception | None = None):
    """An ASGI application that sends *messages*, and then perhaps fails."""

    async def app(asgi_scope, receive, send) -> None:
        app.calls += 1
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    app.calls = 0
    return app


START = {"type": "http.response.start", "status": 201, "headers": [(b"X-Case", b"1")]}
HALF = {"type": "http.response.body", "body": b"half", "more_body": True}
REST = {"type": "http.response.body", "body": b"whole"}


@pytest.mark.parametrize("messages", [[], [START], [START, HALF]], ids=["none", "start", "half"])
def test_an_exception_before_the_response_is_whole_gives_the_key_back(guard, messages):
    """L4: nothing has left yet, so the server can still say 500."""
    app = raw(*messages, error=ValueError("a bug"))

    guarded = guard(app)
    for _ in range(2):
        assert isinstance(send(guarded).error, ValueError)
    assert app.calls == 2


@pytest.mark.parametrize("messages", [[], [START], [START, HALF]], ids=["none", "start", "half"])
def test_an_application_that_never_ends_its_response_has_failed(guard, messages):
    """L4."""
    app = raw(*messages)

    assert isinstance(send(guard(app)).error, RuntimeError)
    send(guard(app))
    assert app.calls == 2


def test_messages_after_the_last_one_are_dropped(guard):
    """L2."""
    app = raw(START, REST, REST)

    assert send(guard(app)).body == b"whole"
    assert send(guard(app)).body == b"whole"


def test_names_of_headers_in_any_case_are_kept(guard):
    """L2: not all applications keep to lower case."""
    app = raw(START, REST)

    send(guard(app))
    assert send(guard(app)).all("x-case") == ["1"]


def test_an_error_page_from_inside_is_an_error_all_the_same(guard):
    """L4: Starlette's own outermost middleware answers 500 and raises on; we stand around it."""
    attempts: list[int] = []

    async def endpoint(request: Request) -> JSONResponse:
        attempts.append(current_operation().attempt)
        if len(attempts) == 1:
            raise ValueError("a bug")
        return JSONResponse({}, 201)

    app = guard(starlette(endpoint))

    async def story() -> None:
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        with pytest.raises(ValueError, match="a bug"):
            await exchange.run(app)
        assert exchange.response().status == 500
        assert (await post(app)).status == 201
        assert attempts == [1, 2]

    run(story())


# --- disconnects and cancellation -----------------------------------------------------------


class Gone(AsgiExchange):
    """A client that hangs up after *messages* messages of its body."""

    def __init__(self, messages: int) -> None:
        super().__init__("POST", "/", with_key("k-1"), ORDER)
        del self._incoming[messages:]
        self.is_done.set()

    async def send(self, message: dict[str, Any]) -> None:
        raise AssertionError("the client has gone")


@pytest.mark.parametrize("messages", [0, 1])
def test_a_client_that_leaves_before_its_body_is_complete_asked_for_nothing(guard, messages: int):
    """L11: nothing runs, and the key is not held."""
    endpoint = Endpoint()
    app = guard(starlette(endpoint.route()))

    async def story() -> None:
        gone = Gone(messages)
        await app(gone.asgi_scope, gone.receive, gone.send)
        assert endpoint.calls == 0
        assert not (await post(app)).is_replay
        assert endpoint.calls == 1

    run(story())


class Slow:
    """An application that waits inside until it may go on."""

    def __init__(self) -> None:
        self.entered, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.calls = 0

    async def __call__(self, asgi_scope, receive, send) -> None:
        self.calls += 1
        self.entered.set()
        await self.may_go_on.wait()
        await send(START)
        await send(REST)


def test_a_cancelled_request_goes_on_and_its_retry_gets_the_result(guard):
    """L11: cancelled by the server, a timeout, or a middleware in front."""

    async def story() -> None:
        slow = Slow()
        app = guard(slow)
        running = asyncio.create_task(post(app))
        await slow.entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        retry = asyncio.create_task(post(app))
        await asyncio.sleep(0)
        slow.may_go_on.set()
        assert (await retry).body == b"whole"
        assert (await retry).is_replay
        assert slow.calls == 1

    run(story())


def begin_at_once(loop, coroutine, **options):
    """Tasks begin when they are made: `asyncio.eager_task_factory`, which is younger than us."""
    try:
        first = coroutine.send(None)
    except StopIteration as done:
        ended = loop.create_future()
        ended.set_result(done.value)
        return ended

    @types.coroutine
    def rest():
        waited_for = first
        try:
            while True:
                try:
                    sent = yield waited_for
                except BaseException as error:  # noqa: BLE001 - handed on
                    waited_for = coroutine.throw(error)
                else:
                    waited_for = coroutine.send(sent)
        except StopIteration as done:
            return done.value

    async def go_on():
        return await rest()

    return asyncio.Task(go_on(), loop=loop, **options)


@pytest.mark.parametrize("error", [None, OSError("no")])
def test_an_exchange_that_ends_before_its_task_was_seen_has_ended(guard, error):
    """X2: tasks that begin at once may end at once."""

    async def story() -> None:
        eager = getattr(asyncio, "eager_task_factory", begin_at_once)
        asyncio.get_running_loop().set_task_factory(eager)
        app = guard(raw(START, REST, error=error))
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        with suppress(OSError):
            await exchange.run(app)
        assert exchange.is_done.is_set()
        assert not RUNNING_EXCHANGES
        assert (await post(app)).is_replay

    run(story())


def test_an_error_after_the_client_has_gone_is_logged(guard, caplog):
    """L11: it would otherwise vanish."""

    async def story() -> None:
        entered, may_go_on = asyncio.Event(), asyncio.Event()

        async def fails(asgi_scope, receive, send) -> None:
            entered.set()
            await may_go_on.wait()
            raise OSError("the client has gone")

        app = guard(fails)
        running = asyncio.create_task(post(app))
        await entered.wait()
        running.cancel()
        await asyncio.wait([running])
        may_go_on.set()
        (exchange,) = RUNNING_EXCHANGES
        await asyncio.wait([exchange.task])
        await asyncio.sleep(0)
        assert "the client has gone" in caplog.text

    run(story())


def test_a_client_that_left_is_still_there_for_the_handler(guard):
    """L11: a handler that stops for a disconnect would leave its work half done."""
    answers: list[bool] = []

    async def endpoint(request: Request) -> PlainTextResponse:
        await request.body()
        answers.append(await request.is_disconnected())
        return PlainTextResponse("done")

    app = guard(starlette(endpoint))

    async def story() -> None:
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        exchange.send = nothing
        exchange.is_done.set()
        await app(exchange.asgi_scope, exchange.receive, exchange.send)
        assert answers == [False]
        assert (await post(app)).body == b"done"

    async def nothing(message) -> None:
        pass

    run(story())


def test_a_client_that_leaves_while_the_answer_is_sent_loses_nothing(guard):
    """L11: the record was safe before the first byte left."""
    app = raw(START, REST)

    async def story() -> None:
        async def broken(message) -> None:
            raise OSError("broken pipe")

        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        guarded = guard(app)
        with pytest.raises(OSError, match="broken pipe"):
            await guarded(exchange.asgi_scope, exchange.receive, broken)
        assert (await post(guarded)).is_replay
        assert app.calls == 1

    run(story())


# --- the request body -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, 1_048_576, 1_048_577, 3_000_000])
@pytest.mark.parametrize("way", ["body", "stream"])
def test_the_handler_reads_the_body_as_it_was_sent(guard, size: int, way: str):
    """L2: in memory or spooled, at once or piece by piece."""
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    seen: list[bytes] = []

    async def endpoint(request: Request) -> PlainTextResponse:
        if way == "body":
            seen.append(await request.body())
        else:
            seen.append(b"".join([chunk async for chunk in request.stream()]))
        return PlainTextResponse("ok")

    app = guard(starlette(endpoint))

    assert send(app, body=body).status == 200
    assert seen == [body]


def test_a_body_without_a_declared_length_has_the_same_limit(engine):
    """X2: the transport announces nothing, so it is counted while it comes."""
    engine.policy = Policy(body_bytes_max=1_000)
    app = raw(START, REST)

    guarded = IdempotencyMiddleware(app, engine=engine)
    refused = send(guarded, body=b"x" * 1_001)
    assert (refused.status, refused.code) == (413, "body-too-large")
    assert app.calls == 0


def test_a_declared_length_over_the_limit_is_refused_unread(engine):
    """X2: before a byte of it was taken."""
    engine.policy = Policy(body_bytes_max=1_000)

    async def story() -> None:
        headers = with_key("k-1", [("Content-Length", "1001")])
        exchange = AsgiExchange("POST", "/", headers, b"x" * 1_001)
        response = await exchange.run(IdempotencyMiddleware(raw(), engine=engine))
        assert response.status == 413
        assert len(exchange._incoming) == 2

    run(story())


def test_extensions_that_bypass_the_middleware_are_not_offered(guard):
    """L2: a response that leaves by the path of a file could not be kept."""
    offered: list[set[str]] = []

    async def app(asgi_scope, receive, send) -> None:
        offered.append(set(asgi_scope["extensions"]))
        await send(START)
        await send(REST)

    async def story() -> None:
        exchange = AsgiExchange("POST", "/", with_key("k-1"), ORDER)
        extensions = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {}}
        exchange.asgi_scope["extensions"] = extensions
        await exchange.run(guard(app))
        assert offered == [{"tls"}]

    run(story())


# --- loops and contexts ---------------------------------------------------------------------


def test_one_application_serves_two_event_loops(guard):
    """L1, L3: a duplicate on one loop is woken by the first on the other."""
    entered, may_go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    async def app(asgi_scope, receive, send) -> None:
        calls.append(1)
        entered.set()
        assert await asyncio.to_thread(may_go_on.wait, WAIT_S_MAX)
        await send(START)
        await send(REST)

    guarded = guard(app)
    answers: list[Response] = []
    threads = [threading.Thread(target=lambda: answers.append(run(post(guarded)))) for _ in "12"]
    threads[0].start()
    assert entered.wait(WAIT_S_MAX)
    threads[1].start()
    may_go_on.set()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert [answer.body for answer in answers] == [b"whole", b"whole"]
    assert sorted(answer.is_replay for answer in answers) == [False, True]
    assert len(calls) == 1


def test_the_handler_runs_in_the_context_of_its_request(guard):
    """S2: what a middleware in front has set, the handler sees; and its operation ends with it."""
    tenant = contextvars.ContextVar("tenant", default="")
    seen: list[Any] = []

    async def app(asgi_scope, receive, send) -> None:
        seen.append((tenant.get(), current_operation().key))
        await send(START)
        await send(REST)

    tenant.set("alice")
    send(guard(app))
    assert seen == [("alice", "k-1")]
    assert current_operation() is None


def test_a_guarded_request_is_freed_when_it_ends(guard):
    """X2: a circle of references would stay until the collector comes, with all that it holds."""

    class Lease:
        """Something of the request that can be watched."""

    async def app(asgi_scope, receive, send) -> None:
        await PlainTextResponse("done")(asgi_scope, receive, send)

    async def story() -> None:
        guarded, held = guard(app), Lease()
        watched = weakref.ref(held)

        async def front(asgi_scope, receive, send) -> None:
            await guarded({**asgi_scope, "held": asgi_scope.pop("held")}, receive, send)

        async def with_held(asgi_scope, receive, send) -> None:
            nonlocal held
            asgi_scope["held"] = held
            del held
            await front(asgi_scope, receive, send)

        assert (await post(with_held)).status == 200
        await asyncio.sleep(0)
        assert not RUNNING_EXCHANGES
        assert watched() is None

    gc.collect()
    gc.disable()
    try:
        run(story())
    finally:
        gc.enable()


@pytest.mark.parametrize(("size", "is_elsewhere"), [(100, False), (2 * 1024 * 1024, True)])
def test_a_large_body_is_looked_through_in_another_thread(engine, size: int, is_elsewhere: bool):
    """F1, K4: it is in a file, and the event loop has other guests meanwhile."""
    threads: list[int] = []

    def found(_request: object) -> str:
        threads.append(threading.get_ident())
        return "someone"

    async def story() -> Response:
        app = IdempotencyMiddleware(starlette(echo), engine=engine, caller=found, key=found)
        return await post(app, key=None, body=b"x" * size)

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    assert run(story()).body == str(size).encode()
    assert [thread != threading.get_ident() for thread in threads] == [is_elsewhere] * 2


# --- where it is mounted --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "escaped"),
    [
        ("/shop", "/shop"),
        ("/a b", "/a%20b"),
        ("/caf\u00e9", "/caf%C3%A9"),
        ("/100%", "/100%25"),
        ("/a\r\nX-Evil: yes", "/a%0D%0AX-Evil%3A%20yes"),
    ],
)
def test_an_address_is_escaped_wherever_the_application_is_mounted(root: str, escaped: str):
    """L10, X3: who mounts it may take a part of the path from the client."""

    async def accepting(asgi_scope, receive, send):
        await asgi_scope["coatcheck.operation"].accept()
        await PlainTextResponse("done")(asgi_scope, receive, send)

    async def story() -> None:
        app = IdempotencyMiddleware(accepting, store="memory://", policy=Policy(in_flight="202"))
        exchange = AsgiExchange("POST", "/jobs", with_key("k-1"), ORDER)
        exchange.asgi_scope |= {"root_path": root, "path": f"{root}/jobs"}
        location = (await exchange.run(app)).header("location")
        assert location.startswith(f"{escaped}/idempotency/operations/")
        asking = AsgiExchange("GET", location, (), b"")
        asking.asgi_scope["root_path"] = root
        assert (await asking.run(app)).body == b"done"

    run(story())


def test_a_path_that_a_server_has_unescaped_is_escaped_again(guard, engine, caplog):
    """O3: not all tell what was sent, and one decision is one line of the log."""

    async def answer(_asgi_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    guarded = guard(answer)

    async def unescaped(asgi_scope, receive, send):
        del asgi_scope["raw_path"]
        await guarded(asgi_scope, receive, send)

    with caplog.at_level("INFO", "coatcheck"):
        for key in ("k-1", "not a key"):
            send(unescaped, "/a:b%0Aexecuted%C3%BC", key=key)
    labels = [record.getMessage().splitlines() for record in caplog.records]
    assert [len(lines) for lines in labels] == [1, 1]
    assert all("(POST /a:b%0Aexecuted%C3%BC) was" in lines[0] for lines in labels)


@pytest.mark.parametrize("caller", [None, callers.cookie("session")])
def test_a_cookie_that_came_in_crumbs_is_the_same_cookie(engine, caller):
    """S2, L1: over HTTP/2 browsers cut it up (RFC 9113 §8.2.3), and a retry may take HTTP/1.1."""
    served = []

    async def answer(_asgi_scope, _receive, send):
        served.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    guarded = IdempotencyMiddleware(answer, engine=engine, caller=caller)

    send(guarded, headers=[("Cookie", "theme=dark"), ("Cookie", "session=ada")])
    again = send(guarded, headers=[("Cookie", "theme=dark; session=ada")])
    assert (again.is_replay, len(served)) == (True, 1)
    send(guarded, headers=[("Cookie", "theme=dark"), ("Cookie", "session=eve")])
    assert len(served) == (1 if caller is None else 2)
