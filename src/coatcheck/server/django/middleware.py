"""The middleware: what Django calls for each request, under WSGI and under ASGI.

It stands after authentication, so that `request.user` is the caller. A guarded request passes
through the WSGI middleware in a thread, or through the ASGI middleware on an event loop. A
connection of Django belongs to a thread, so transaction mode always runs in the request's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from coatcheck.core.policy import SAFE_METHODS
from coatcheck.server.django.exchange import NativeRequest
from coatcheck.server.django.site import Site, current_site
from coatcheck.server.routes import note_raised

logger = logging.getLogger("coatcheck")

# An event loop alone does not keep a task alive.
_RUNNING: set[asyncio.Task[HttpResponseBase]] = set()


class IdempotencyMiddleware:
    """
    Guards the views of a Django project; `settings.COATCHECK` configures it.

    Args:
        get_response: the rest of the project.
        site: replaces the site of the settings, for tests.
    """

    sync_capable = True
    async_capable = True

    def __init__(
        self,
        get_response: Callable[[HttpRequest], Any],
        *,
        site: Site | None = None,
    ) -> None:
        self._get_response = get_response
        self._given_site = site
        self._is_async = iscoroutinefunction(get_response)
        opened = self._site  # a mistake in the settings stops the start
        if self._is_async:
            markcoroutinefunction(self)
            opened.open_async()

    @property
    def _site(self) -> Site:
        """The site of the present settings: a test may change them while its client lives."""
        return self._given_site or current_site()

    def __call__(
        self, request: HttpRequest
    ) -> HttpResponseBase | Coroutine[Any, Any, HttpResponseBase]:
        """Serve one request; under ASGI it is awaited."""
        if self._is_async:
            return self._serve_async(request)
        if self._passes(request):
            response: HttpResponseBase = self._get_response(request)
            return response
        return self._site.serve(request, self._get_response)

    async def _serve_async(self, request: HttpRequest) -> HttpResponseBase:
        if self._passes(request):
            response: HttpResponseBase = await self._get_response(request)
            return response
        if self._site.is_in_transaction_mode(request):
            serve = sync_to_async(self._site.serve, thread_sensitive=True)
            return await _detached(serve(request, async_to_sync(self._get_response)))
        return await self._site.serve_async(request, self._get_response)

    def _passes(self, request: HttpRequest) -> bool:
        """Nothing has to be done for *request*: its method is safe, and it does not poll."""
        native: NativeRequest = request
        native.coatcheck = None
        if request.method not in SAFE_METHODS:
            return False
        self._site.let_pass()
        return self._site.status_path not in request.path_info

    def process_exception(self, request: HttpRequest, exception: Exception) -> None:
        """Note what the view raised; Django makes a response of it before we get to see it."""
        del request
        note_raised(exception)


async def _detached(work: Awaitable[HttpResponseBase]) -> HttpResponseBase:
    """Await *work* in a task of its own: it goes on if the client hangs up."""

    async def run() -> HttpResponseBase:
        return await work

    task = asyncio.get_running_loop().create_task(run())
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[HttpResponseBase]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error(
            "coatcheck: a request failed after its client had hung up", exc_info=task.exception()
        )
