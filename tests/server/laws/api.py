"""The guarded shop as its clients see it: requests sent through a middleware, as a server sends them.

`AsgiApi` and `WsgiApi` differ in how they call the middleware, and in nothing a law could see.
Both hold the application and the middleware to their protocols while they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from coatcheck import AsyncEngine, Engine
from coatcheck.core.key import parse_reference, prefix_of
from coatcheck.core.lifecycle import ClaimRequest
from coatcheck.core.record import Record
from coatcheck.operation import Operation
from coatcheck.server.asgi import IdempotencyMiddleware as AsgiMiddleware
from coatcheck.server.request import Request
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from coatcheck.stores import Query, Store, ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore

from .shop import WAIT_S_MAX, Shop

Headers = Sequence[tuple[str, str]]

# Handlers of one law that run at the same time, with room to spare.
THREADS = 64
ORDER = b'{"item": 1}'


class Clock:
    """Time as an argument: it goes on when a law says so."""

    def __init__(self) -> None:
        self.now_ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1_000)


class Response(NamedTuple):
    """What the client got; where the application's error reached the server, a bare 500."""

    status: int
    headers: list[tuple[str, str]]  # names in lower case, one entry for each line
    body: bytes
    error: Exception | None = None

    def all(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found == name]

    def header(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def is_replay(self) -> bool:
        return self.header("idempotent-replayed") == "true"

    @property
    def reference(self) -> str:
        reference = self.header("idempotency-reference")
        assert reference is not None, self
        return reference

    @property
    def problem(self) -> dict[str, Any]:
        """The problem document that this answer is."""
        assert self.header("content-type") == "application/problem+json", self
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        return document

    @property
    def code(self) -> str:
        return self.problem["code"]


class Workers:
    """What all laws share: a way to start threads, and an event loop that runs in one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(THREADS, "handler"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop")
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call in a thread; one that a failed law left waiting does not keep the process."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - for whoever asks the future
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(WAIT_S_MAX)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S_MAX)
        self.loop.close()


class Api(ABC):
    """A guarded shop with its engine, its clock and its store."""

    engine: Engine | AsyncEngine
    middleware: AsgiMiddleware | WsgiMiddleware

    def __init__(self, store: Store, shop: Shop, clock: Clock, workers: Workers) -> None:
        self.store = store
        self.shop = shop
        self.clock = clock
        self.workers = workers

    @abstractmethod
    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        """Send a request, and go on while it is answered."""

    @abstractmethod
    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        """Send a request and hang up without taking the answer; its handler has been entered."""

    @abstractmethod
    def run(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`engine.run` of this flavour, with a plain function."""

    @abstractmethod
    def guard(self, function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        """`engine.guard` of this flavour, around a plain function."""

    @abstractmethod
    def claim(self, key: str, path: str) -> Record:
        """Claim for a POST and be gone, as a process does that is killed in its handler."""

    @abstractmethod
    def close(self) -> None:
        """End the engine, and the store with it."""

    def send(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> Response:
        return self.start(method, target, headers, body).result(WAIT_S_MAX)

    def start_post(
        self,
        key: str | None = "k-1",
        path: str = "/orders",
        body: bytes = ORDER,
        headers: Headers = (),
    ) -> Future[Response]:
        return self.start("POST", path, with_key(key, headers), body)

    def post(
        self,
        key: str | None = "k-1",
        path: str = "/orders",
        body: bytes = ORDER,
        headers: Headers = (),
    ) -> Response:
        return self.start_post(key, path, body, headers).result(WAIT_S_MAX)

    def effects(self, path: str = "/orders") -> int:
        """How often the handler of *path* ran."""
        return sum(call.path == path for call in self.shop.effects)

    def record(self, reference: str) -> Record:
        """The record of the operation that people call *reference*."""
        parsed = parse_reference(reference)
        assert parsed is not None
        (record,) = self.store.find(Query(id_prefix=prefix_of(parsed))).records
        return record

    def records(self) -> list[Record]:
        return list(self.store.find(Query()).records)

    def waiters(self) -> int:
        """How many duplicates stand in line now."""
        return sum(len(line) for line in list(self.engine.attempts.waiters.waiting.values()))

    def _request_of_post(self, key: str, path: str) -> Any:
        fields = {name.lower().encode(): value.encode() for name, value in with_key(key)}
        request = Request("POST", path, b"", fields, ORDER, {})
        policy = self.engine.policy
        return self.middleware.guard.claim_request(request, policy, key, None)


def with_key(key: str | None, headers: Headers = ()) -> Headers:
    """*headers*, with a content type and a key where they have none."""
    given = {name.lower() for name, _ in headers}
    defaults = [] if "content-type" in given else [("Content-Type", "application/json")]
    if key is not None:
        defaults.append(("Idempotency-Key", key))
    return [*defaults, *headers]


# --- ASGI -----------------------------------------------------------------------------------


class AsgiApi(Api):
    """Through the ASGI middleware, on an event loop in a thread of its own."""

    def __init__(
        self,
        store: Store,
        shop: Shop,
        clock: Clock,
        workers: Workers,
        *,
        settings: dict[str, Any],
        middleware: dict[str, Any],
    ) -> None:
        super().__init__(store, shop, clock, workers)
        is_memory = isinstance(store, MemoryStore)
        async_store = AsyncMemoryStore(store) if is_memory else ThreadedStore(store)
        self.engine: AsyncEngine = AsyncEngine(async_store, **{"clock": clock, **settings})
        self.middleware = AsgiMiddleware(shop.asgi, engine=self.engine, **middleware)

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        exchange = AsgiExchange(method, target, headers, body)
        return self.workers.start(exchange.run(self.middleware))

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        entered = len(self.shop.effects)
        running = self.start(method, target, headers, body)
        until(lambda: len(self.shop.effects) > entered)
        running.cancel()

    def run(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.workers.run(self.engine.run(key, _awaitable(function), *args, **kwargs))

    def guard(self, function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        guarded = self.engine.guard(**kwargs)(_awaitable(function))
        return lambda *args: self.workers.run(guarded(*args))

    def claim(self, key: str, path: str) -> Record:
        request = self._request_of_post(key, path)
        return self.workers.run(claimed(self.engine, request))

    def close(self) -> None:
        self.workers.run(self.engine.close())


def _awaitable(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs)

    return call


class AsgiExchange:
    """One request to an ASGI application, and what came back; it watches the order of messages."""

    def __init__(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        path, _, query = target.partition("?")
        self.asgi_scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers],
            "client": ("192.0.2.1", 50_000),
            "server": ("shop.example", 80),
        }
        half = len(body) // 2
        self._incoming = [(body[:half], True), (body[half:], False)] if half else [(body, False)]
        self.messages: list[dict[str, Any]] = []
        self.is_done = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            chunk, more_body = self._incoming.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": more_body}
        await self.is_done.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        is_first = not self.messages
        assert message["type"] == f"http.response.{'start' if is_first else 'body'}"
        assert not self.is_done.is_set(), "a message after the last one"
        self.messages.append(message)
        if not is_first and not message.get("more_body", False):
            self.is_done.set()

    async def run(self, app: Callable[..., Any]) -> Response:
        try:
            await app(self.asgi_scope, self.receive, self.send)
        except Exception as error:
            if not self.messages:
                return Response(500, [], b"", error)
            raise
        assert self.is_done.is_set(), "the response never ended"
        return self.response()

    def response(self) -> Response:
        start, *bodies = self.messages
        lines = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in start["headers"]]
        body = b"".join(message.get("body", b"") for message in bodies)
        return Response(start["status"], [(name.lower(), value) for name, value in lines], body)


# --- WSGI -----------------------------------------------------------------------------------


class WsgiApi(Api):
    """Through the WSGI middleware, in threads, with PEP 3333 watched on both of its sides."""

    def __init__(
        self,
        store: Store,
        shop: Shop,
        clock: Clock,
        workers: Workers,
        *,
        settings: dict[str, Any],
        middleware: dict[str, Any],
    ) -> None:
        super().__init__(store, shop, clock, workers)
        self.engine: Engine = Engine(store, **{"clock": clock, **settings})
        self.middleware = WsgiMiddleware(validator(shop.wsgi), engine=self.engine, **middleware)
        self._app = validator(self.middleware)

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        environ = environ_of(method, target, headers, body)
        return self.workers.submit(exchange_wsgi, self._app, environ)

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        environ = environ_of(method, target, headers, body)

        def hang_up() -> None:
            said = self._app(environ, lambda *_: lambda _chunk: None)
            said.close()

        entered = len(self.shop.effects)
        self.workers.submit(hang_up)
        until(lambda: len(self.shop.effects) > entered)

    def run(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.engine.run(key, function, *args, **kwargs)

    def guard(self, function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        return self.engine.guard(**kwargs)(function)

    def claim(self, key: str, path: str) -> Record:
        operation = self.engine.begin(self._request_of_post(key, path), self.engine.policy)
        assert isinstance(operation, Operation)
        self.engine.attempts.heartbeat.stop_renewing(operation)
        return operation.claim

    def close(self) -> None:
        self.engine.close()


# What follows a body on the same connection, which nobody may read.
NEXT_REQUEST = b"GET /secret HTTP/1.1\r\n\r\n"


def environ_of(method: str, target: str, headers: Headers, body: bytes) -> dict[str, Any]:
    """The environ that a server makes of a request."""
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "192.0.2.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body + NEXT_REQUEST),
    }
    setup_testing_defaults(environ)
    for name, value in headers:
        field = name.upper().replace("-", "_")
        field = field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"
        is_repeated = field.startswith("HTTP_") and field in environ
        environ[field] = f"{environ[field]},{value}" if is_repeated else value
    return environ


def exchange_wsgi(app: Callable[..., Any], environ: dict[str, Any]) -> Response:
    """One request to a WSGI application, and what came back."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        if started:
            assert exc_info is not None
            if written:
                raise exc_info[1]
            started.clear()
        started.append((status, headers))
        return written.append

    try:
        said = app(environ, start_response)
        with contextlib.ExitStack() as after:
            if hasattr(said, "close"):
                after.callback(said.close)
            for chunk in said:
                assert started, "a body before its headers"
                written.append(chunk)
    except Exception as error:
        if written:
            raise
        return Response(500, [], b"", error)
    ((status, headers),) = started
    return Response(int(status[:3]), [(n.lower(), v) for n, v in headers], b"".join(written))


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S_MAX) -> None:
    """Look until *condition* holds; what it is about happens in another thread."""
    pause = threading.Event()
    for _ in range(round(timeout_s / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError(f"this never came true: {condition}")


async def claimed(engine: AsyncEngine, request: ClaimRequest) -> Record:
    """The claim of *request*, by a process that dies before it executes anything."""
    operation = await engine.begin(request, engine.policy)
    assert isinstance(operation, Operation)
    engine.attempts.heartbeat.stop_renewing(operation)
    return operation.claim


ADAPTERS: dict[str, type[AsgiApi | WsgiApi]] = {"asgi": AsgiApi, "wsgi": WsgiApi}
