"""The guarded shop as its clients see it: requests sent through a middleware, as a server sends them.

`AsgiApi` and `WsgiApi` differ in how they call the middleware, and in nothing a law could see. They
hold the application and the middleware to their protocols while they do. `frameworks` has the same
for frameworks, with their test clients, and `hosts` sends the requests through real servers.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
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
from tests.support.http import (
    ORDER,
    AsgiExchange,
    Headers,
    Response,
    environ_of,
    exchange_wsgi,
    with_key,
)
from tests.support.times import WAIT_S_MAX, Clock, eventually

from .shop import Shop

# Handlers of one law that run at the same time, with room to spare.
THREADS = 64


class Workers:
    """Shared by all laws: a way to start threads, and an event loop that runs in one."""

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
            except BaseException as error:  # noqa: BLE001 - raised by the future
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
    app: Any  # the guarded application, for a server

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
        self.store = store
        self.shop = shop
        self.clock = clock
        self.workers = workers
        self._open({"clock": clock, **settings}, middleware)

    @abstractmethod
    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        """Make the engine and the middleware."""

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
        """The record of the operation with this *reference*."""
        parsed = parse_reference(reference)
        assert parsed is not None
        (record,) = self.store.find(Query(id_prefix=prefix_of(parsed))).records
        return record

    def records(self) -> list[Record]:
        return list(self.store.find(Query()).records)

    def waiters(self) -> int:
        """How many duplicates wait now."""
        return sum(len(line) for line in list(self.engine.attempts.waiters.waiting.values()))

    def with_error(self, response: Response) -> Response:
        """*response*, with what the handler raised, if a framework or server made a 500 of it."""
        errors = self.shop.errors
        if response.status != 500 or response.error is not None or not errors:
            return response
        return response._replace(error=errors.pop())

    def _request_of_post(self, key: str, path: str) -> Any:
        fields = {name.lower().encode(): value.encode() for name, value in with_key(key)}
        request = Request("POST", path, b"", fields, ORDER, {})
        policy = self.engine.policy
        return self.middleware.guard.claim_request(request, policy, key, None)


# --- ASGI -----------------------------------------------------------------------------------


class AsgiApi(Api):
    """Through the ASGI middleware, on an event loop in a thread of its own."""

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        is_memory = isinstance(self.store, MemoryStore)
        async_store = AsyncMemoryStore(self.store) if is_memory else ThreadedStore(self.store)
        self.engine: AsyncEngine = AsyncEngine(async_store, **settings)
        self.middleware = AsgiMiddleware(self.shop.asgi, engine=self.engine, **middleware)
        self.app = self.middleware

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        exchange = AsgiExchange(method, target, headers, body)
        return self.workers.start(exchange.run(self.middleware))

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        entered = len(self.shop.effects)
        running = self.start(method, target, headers, body)
        eventually(lambda: len(self.shop.effects) > entered)
        running.cancel()

    def run(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.workers.run(self.engine.run(key, _awaitable(function), *args, **kwargs))

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


# --- WSGI -----------------------------------------------------------------------------------


class WsgiApi(Api):
    """Through the WSGI middleware, in threads, with PEP 3333 watched on both of its sides."""

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        self.engine: Engine = Engine(self.store, **settings)
        self.middleware = WsgiMiddleware(
            validator(self.shop.wsgi), engine=self.engine, **middleware
        )
        self.app = validator(self.middleware)

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        environ = environ_of(method, target, headers, body)
        return self.workers.submit(exchange_wsgi, self.app, environ)

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        environ = environ_of(method, target, headers, body)

        def hang_up() -> None:
            said = self.app(environ, lambda *_: lambda _chunk: None)
            said.close()

        entered = len(self.shop.effects)
        self.workers.submit(hang_up)
        eventually(lambda: len(self.shop.effects) > entered)

    def run(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.engine.run(key, function, *args, **kwargs)

    def claim(self, key: str, path: str) -> Record:
        operation = self.engine.begin(self._request_of_post(key, path), self.engine.policy)
        assert isinstance(operation, Operation)
        self.engine.attempts.heartbeat.stop_renewing(operation)
        return operation.claim

    def close(self) -> None:
        self.engine.close()


async def claimed(engine: AsyncEngine, request: ClaimRequest) -> Record:
    """The claim of *request*, by a process that dies before it executes anything."""
    operation = await engine.begin(request, engine.policy)
    assert isinstance(operation, Operation)
    engine.attempts.heartbeat.stop_renewing(operation)
    return operation.claim


OpenApi = Callable[..., Api]
