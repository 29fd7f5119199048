"""`aiohttp` with one key for each action and safe retries: a session, and a middleware.

The session is not a subclass, because aiohttp discourages those; it has the same methods. The
middleware is for a session of the application's own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Self, Unpack

from coatcheck.errors import MissingExtra

try:
    import aiohttp
    from aiohttp import abc, payload
    from yarl import URL
except ImportError as error:
    raise MissingExtra("aiohttp", "aiohttp") from error

from coatcheck.client.body import BodyCopy
from coatcheck.client.call import Action, Actions, Exchange
from coatcheck.client.keys import key_in_body, key_out_of_body
from coatcheck.client.settings import BufferSettings, Clock, settings_of
from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.core.client.send import Answer, Lost, Send, is_body_read


class ClientSession(Actions[Any]):
    """`aiohttp.ClientSession` that sends a request until there is a definite answer."""

    is_async = True

    # The settings are spelled out: aiohttp has too many options of its own to list them all.
    def __init__(
        self,
        *arguments: Any,
        retry: RetryPolicy | None = None,
        preset: Preset | str = "default",
        budget: RetryBudget | None = None,
        clock: Clock | None = None,
        key_version: Literal[4, 7] = 4,
        buffer: bool = True,
        **options: Any,
    ) -> None:
        self._coatcheck = settings_of(
            retry=retry,
            preset=preset,
            budget=budget,
            clock=clock,
            key_version=key_version,
            buffer=buffer,
        )
        self._middlewares = tuple(options.get("middlewares", ()))
        # The session that sends; for functions that ask for a session of aiohttp itself.
        self.session = aiohttp.ClientSession(*arguments, **options)

    def request(self, method: str, url: Any, **options: Any) -> Any:
        """Send a request: `async with session.request(…) as response`, or `await` it."""
        return self._send_action(Action(self._coatcheck), method, url, **options)

    def get(self, url: Any, **options: Any) -> Any:
        """Send a GET."""
        return self.request("GET", url, **options)

    def head(self, url: Any, **options: Any) -> Any:
        """Send a HEAD."""
        return self.request("HEAD", url, **{"allow_redirects": False, **options})

    def options(self, url: Any, **options: Any) -> Any:
        """Send an OPTIONS."""
        return self.request("OPTIONS", url, **options)

    def post(self, url: Any, **options: Any) -> Any:
        """Send a POST."""
        return self.request("POST", url, **options)

    def put(self, url: Any, **options: Any) -> Any:
        """Send a PUT."""
        return self.request("PUT", url, **options)

    def patch(self, url: Any, **options: Any) -> Any:
        """Send a PATCH."""
        return self.request("PATCH", url, **options)

    def delete(self, url: Any, **options: Any) -> Any:
        """Send a DELETE."""
        return self.request("DELETE", url, **options)

    def _send_action(self, action: Action[Any], method: str, url: Any, **options: Any) -> Any:
        own = options.pop("middlewares", None)
        middlewares = (_Call(action), *(self._middlewares if own is None else own))
        return self.session.request(method, url, middlewares=middlewares, **options)

    async def __aenter__(self) -> Self:
        await self.session.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    def __getattr__(self, name: str) -> Any:
        if name == "session":  # not set yet: `__init__` has failed
            raise AttributeError(name)
        return getattr(self.session, name)


class Middleware:
    """
    Safe retries for a session of the application's own: `middlewares=(Middleware(),)`.

    Each redirect to follow gets a key of its own, and aiohttp repeats a failed GET once more by
    itself. `ClientSession` has neither limit.
    """

    def __init__(self, **settings: Unpack[BufferSettings]) -> None:
        self._coatcheck = settings_of(**settings)

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send *request*, and again until there is a definite answer."""
        return await _Call(Action(self._coatcheck))(request, handler)


class _Call:
    """The middleware of one call: called for the request, and for each redirect."""

    def __init__(self, action: Action[Any]) -> None:
        self._action = action
        self._error: BaseException | None = None

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if self._error is not None:  # aiohttp sends a GET again by itself; this call has ended
            raise self._error
        hop = Hop(self._action, request)
        await hop.freeze()

        async def attempt(effect: Send) -> Answer | Lost:
            try:
                async with asyncio.timeout(hop.timeout_s(effect.time_left_s)):
                    if effect.poll is not None:
                        response = await hop.polled(effect.poll)
                    else:
                        response = await handler(await hop.prepared(effect))
                    return await hop.noted(response, effect)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as e:
                not_sent = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
                return hop.lost(e, may_have_arrived=not isinstance(e, not_sent))

        try:
            return await hop.run_async(attempt)
        finally:
            self._error = hop.error


class Hop(Exchange[aiohttp.ClientResponse]):
    """All attempts of one request of aiohttp."""

    def __init__(self, action: Action[Any], request: aiohttp.ClientRequest) -> None:
        name = action.settings.preset.key_header
        self._is_first = action.is_first
        self.request = request
        given = None if name is None else request.headers.get(name)
        super().__init__(action, request.method, request.url, given)

    @staticmethod
    def origin_of(url: URL) -> str:
        """The scheme, host and port of *url*."""
        return str(url.origin())

    def late(self, words: str) -> BaseException:
        """The error of the library for a request that is not sent in time."""
        return aiohttp.ConnectionTimeoutError(words)

    async def freeze(self) -> None:
        """Copy a body that can be read only once, and put the key in its place."""
        body = self.request.body
        in_body = self.settings.preset.key_member is not None and self.key is not None
        self._body = b""
        if isinstance(body, payload.Payload) and (self.is_repeatable or in_body):
            if not isinstance(body, (payload.BytesPayload, _CopiedBody)):
                writer = _Writer()
                await body.write(writer)
                copy = writer.copy
                content = copy.content() if copy.is_small else _CopiedBody(copy)
                await self.request.update_body(content)
                self._body = copy.content() if in_body else b""
            elif in_body:
                self._body = await body.as_bytes()
        await self._place_key(self.key)

    async def _place_key(self, key: str | None) -> None:
        member, headers = self.settings.preset.key_member, self.request.headers
        name, value = self.header(key)
        if member is not None and key is not None:
            body, found = key_in_body(self._body, member, key)
            self.use_key(found)
            await self.request.update_body(body)
        elif key is None and not self._is_first:
            headers.pop(name, None)
            sent = self.request.body
            if member is not None and isinstance(sent, payload.BytesPayload):
                bare = key_out_of_body(await sent.as_bytes(), member, self.action.key or "")
                await self.request.update_body(bare)
        elif value is not None and not (self.is_own_key and key == self.key):
            headers[name] = value

    async def prepared(self, effect: Send) -> aiohttp.ClientRequest:
        """The request of the next attempt."""
        if effect.key is not None and effect.key != self.key:  # the key has expired
            self.is_own_key = False
            await self._place_key(effect.key)
            self.key = effect.key
        return self.request

    async def polled(self, location: str) -> aiohttp.ClientResponse:
        """The response of the address of an accepted operation."""
        request = self.request
        url = request.url.join(URL(location))
        hidden = ("content-", "transfer-", (self.settings.preset.key_header or "host").lower())
        headers = {
            name: value
            for name, value in request.headers.items()
            if url.origin() == request.url.origin() and not name.lower().startswith(hidden)
        }
        return await request.session.get(url, headers=headers, middlewares=())

    async def noted(self, response: aiohttp.ClientResponse, effect: Send) -> Answer:
        """Read *response* where that is needed, and reduce it to what decides about a retry."""
        status, kind, body = response.status, response.headers.get("Content-Type"), b""
        is_stream = (kind or "").lower().startswith("text/event-stream")
        is_polled = effect.poll is not None
        if self.is_read(status, effect) or (
            self.settings.buffer and self.key is not None and not is_stream
        ):
            body = await response.read()
        if not is_body_read(status, kind, is_poll=is_polled):
            body = b""
        return self.answered(response, status, response.headers.get, body)


class _Writer(abc.AbstractStreamWriter):
    """Takes what a body writes, instead of the network."""

    def __init__(self) -> None:
        self.copy = BodyCopy()

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.copy.add(chunk)

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.copy.add(chunk)

    async def drain(self) -> None:
        """There is nothing to wait for."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """The copy is not compressed; each attempt compresses it."""

    def enable_chunking(self) -> None:
        """The copy has no chunks."""

    async def write_headers(self, status_line: str, headers: Any) -> None:
        """The copy has no headers."""


class _CopiedBody(payload.Payload):
    """A body that is copied to a file, which is closed when nothing refers to the copy."""

    @property
    def autoclose(self) -> bool:
        return True

    def __init__(self, copy: BodyCopy) -> None:
        super().__init__(copy)
        self._copy = copy
        self._size = copy.bytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._copy.content().decode(encoding, errors)

    async def write(self, writer: abc.AbstractStreamWriter) -> None:
        for chunk in self._copy.chunks():
            await writer.write(chunk)
