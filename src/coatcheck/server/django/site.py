"""The site: the engines and middlewares of this process, made once from the settings.

Every handler of Django's uses the same ones: that of the server, and those of test clients. Nothing
is opened before the first guarded request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asgiref.sync import async_to_sync

from coatcheck.core.callables import is_async_function
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.server.asgi import IdempotencyMiddleware as AsgiMiddleware
from coatcheck.server.django.callers import user_of_request, user_of_request_async
from coatcheck.server.django.exchange import (
    NativeRequest,
    NativeResponse,
    Turn,
    asgi_app,
    wsgi_app,
)
from coatcheck.server.django.refusals import rendered
from coatcheck.server.django.routes import DjangoRoutes
from coatcheck.server.django.settings import Configuration, read_settings
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from coatcheck.stores import AsyncStore, ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore


class Site:
    """What guards a project: an engine for threads and, under ASGI, one for event loops."""

    def __init__(self, configuration: Configuration, engine: Engine | None = None) -> None:
        self._configuration = configuration
        self.engine = engine or Engine(
            configuration.store, transactions=configuration.transactions, **configuration.engine
        )
        self.status_path = self.engine.policy.status_path
        given = configuration.middleware
        caller = given.get("caller", user_of_request)
        if is_async_function(caller):
            caller = async_to_sync(caller)
        self._routes: DjangoRoutes
        self.wsgi = WsgiMiddleware(
            wsgi_app, engine=self.engine, routes=self._new_routes, **{**given, "caller": caller}
        )
        self.wsgi.guard.render = rendered
        self._mutex = threading.Lock()
        self._asgi: AsgiMiddleware | None = None

    def _new_routes(self, *args: Any) -> DjangoRoutes:
        self._routes = DjangoRoutes(*args)
        return self._routes

    def open_async(self) -> AsgiMiddleware:
        """The middleware for event loops; made at the first call."""
        with self._mutex:
            if self._asgi is None:
                self._asgi = self._new_asgi()
            return self._asgi

    def _new_asgi(self) -> AsgiMiddleware:
        configuration, given = self._configuration, self._configuration.store
        store: str | AsyncStore
        if isinstance(given, str):
            store = given
        else:  # the same one
            store = (
                AsyncMemoryStore(given) if isinstance(given, MemoryStore) else ThreadedStore(given)
            )
        engine = AsyncEngine(store, **configuration.engine)
        settings = {"caller": user_of_request_async, **configuration.middleware}
        made = AsgiMiddleware(asgi_app, engine=engine, routes=DjangoRoutes, **settings)
        made.guard.render = rendered
        return made

    def let_pass(self) -> None:
        """Note that the present request has a safe method."""
        self._routes.let_pass({})

    def is_in_transaction_mode(self, request: NativeRequest) -> bool:
        """The policy of *request* is in transaction mode."""
        policy = self._routes.match(request, request.method).policy
        return policy is not None and policy.mode == "transaction"

    def serve(
        self, request: NativeRequest, get_response: Callable[[NativeRequest], Any]
    ) -> NativeResponse:
        """Serve a request in its thread."""
        turn = Turn(request, get_response)
        return turn.answer(self.wsgi(turn.environ(), turn.start))

    async def serve_async(
        self, request: NativeRequest, get_response: Callable[[NativeRequest], Any]
    ) -> NativeResponse:
        """Serve a request on an event loop."""
        turn = Turn(request, get_response)
        await self.open_async()(turn.scope(), turn.receive, turn.send)
        return turn.answer_async()

    def close(self) -> None:
        """Close the engines."""
        self.engine.close()
        if self._asgi is not None:
            closing = threading.Thread(target=asyncio.run, args=(self._asgi.engine.close(),))
            closing.start()  # in a thread: an event loop may run in this one
            closing.join()


_mutex = threading.Lock()
_sites: list[Site] = []


def current_site() -> Site:
    """The site of this process; made from the settings at the first call."""
    with suppress(IndexError):  # for nearly every call, without a lock
        return _sites[0]
    with _mutex:
        if not _sites:
            _sites.append(Site(read_settings()))
        return _sites[0]


def get_engine() -> Engine:
    """
    The engine of this process, for functions and for workers.

    It has the store and the policy of `settings.COATCHECK`: `get_engine().run(…)` guards a
    function, and `get_engine().run_deferred(token, …)` does work that a view has deferred.
    """
    return current_site().engine


def forget_site() -> None:
    """Close the site, because its settings have changed; the next handler makes another one."""
    with _mutex:
        while _sites:
            _sites.pop().close()
