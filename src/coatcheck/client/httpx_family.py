"""Clients and transports for httpx and httpx2, which have the same interface: one source for both.

The classes here are mixed with those of one library, which `library` names. Only the public
interface of the libraries is used, so that a new release does not break it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable
from types import ModuleType
from typing import Any, TypeVar, Unpack, cast

from coatcheck.client.body import BodyCopy, CopiedStream, copied, copied_async
from coatcheck.client.call import PORTS, Action, Actions, Exchange
from coatcheck.client.keys import key_in_body, key_out_of_body
from coatcheck.client.settings import BufferSettings, ClientSettings, Settings, settings_of
from coatcheck.core.client.send import EXTENSION, Answer, Lost, Send, is_body_read

R = TypeVar("R")  # the response of the library

_SETTINGS = tuple(ClientSettings.__annotations__)
# Marks a request whose retries are decided already: a transport below passes it on.
PASSED = "coatcheck.passed"
# The header with the key that a client has set: it is not the application's own.
PLACED = "coatcheck.placed"


class ClientOptions(ClientSettings, total=False):
    """What a client takes: our settings, and the options of the library's own client."""

    auth: Any
    params: Any
    headers: Any
    cookies: Any
    verify: Any
    cert: Any
    trust_env: bool
    http1: bool
    http2: bool
    proxy: Any
    mounts: Any
    timeout: Any
    follow_redirects: bool
    limits: Any
    max_redirects: int
    event_hooks: Any
    base_url: Any
    transport: Any
    default_encoding: Any


class _Base:
    """What the sync and the async client have in common."""

    library: ModuleType
    _coatcheck: Settings

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        given = cast("dict[str, Any]", options)
        ours = {name: given.pop(name) for name in _SETTINGS if name in given}
        cast("Any", super()).__init__(**given)
        self._coatcheck = settings_of(**ours)

    def _send_action(self, action: Action[Any], method: str, url: Any, **options: Any) -> Any:
        extensions = {**(options.pop("extensions", None) or {}), EXTENSION: action}
        return cast("Any", self).request(method, url, extensions=extensions, **options)

    def _begin(self, request: Any, options: dict[str, Any]) -> tuple[Action[Any], bool]:
        """The action of *request*, and whether redirects are followed."""
        follows = options.pop("follow_redirects", None)
        if not isinstance(follows, bool):
            follows = cast("Any", self).follow_redirects
        action = request.extensions.get(EXTENSION)
        return action if isinstance(action, Action) else Action(self._coatcheck), follows

    def _redirected(self, response: Any, history: list[Any], *, follows: bool) -> Any:
        """The request that *response* redirects to; None if it is the last response."""
        request = response.next_request
        response.history = list(history)
        if not follows or request is None:
            return None
        history.append(response)
        if len(history) > cast("Any", self).max_redirects:
            raise self.library.TooManyRedirects(
                "Exceeded maximum allowed redirects.", request=request
            )
        return request


class SyncClient(_Base, Actions[R]):
    """The part of a client for threads that is not the library's own."""

    def send(self, request: Any, **options: Any) -> R:
        """Send *request*, and again until there is a definite answer."""
        action, follows = self._begin(request, options)
        history: list[Any] = []
        while True:
            response = self._send_hop(Hop(self.library, action, request), options)
            request = self._redirected(response, history, follows=follows)
            if request is None:
                return response
            cast("Any", response).read()
            options["auth"] = None  # the library has copied the header, if it may be sent there

    def _send_hop(self, hop: Hop[R], options: dict[str, Any]) -> R:
        plain_send = cast("Any", super()).send
        if hop.needs_copy:
            hop.keep(copied(hop.request.stream))
        hop.place_key()

        def attempt(effect: Send) -> Answer | Lost:
            sent, auth = hop.prepared(effect, options)
            try:
                response = plain_send(sent, **auth, follow_redirects=False)
                if hop.is_read(response.status_code, effect):
                    response.read()
            except (self.library.TransportError, self.library.DecodingError) as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return hop.run(attempt)


class AsyncClient(_Base, Actions[Awaitable[R]]):
    """The part of a client for event loops that is not the library's own."""

    is_async = True

    async def send(self, request: Any, **options: Any) -> R:
        """Send *request*, and again until there is a definite answer."""
        action, follows = self._begin(request, options)
        history: list[Any] = []
        while True:
            response = await self._send_hop(Hop(self.library, action, request), options)
            request = self._redirected(response, history, follows=follows)
            if request is None:
                return response
            await cast("Any", response).aread()
            options["auth"] = None  # the library has copied the header, if it may be sent there

    async def _send_hop(self, hop: Hop[R], options: dict[str, Any]) -> R:
        plain_send = cast("Any", super()).send
        if hop.needs_copy:
            hop.keep(await copied_async(hop.request.stream))
        hop.place_key()

        async def attempt(effect: Send) -> Answer | Lost:
            sent, auth = hop.prepared(effect, options)
            try:
                response = await plain_send(sent, **auth, follow_redirects=False)
                if hop.is_read(response.status_code, effect):
                    await response.aread()
            except (self.library.TransportError, self.library.DecodingError) as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return await hop.run_async(attempt)


class _BaseTransport:
    """What the transports have in common: they retry beneath a client that is not ours."""

    library: ModuleType

    def __init__(self, wrapped: Any = None, **settings: Unpack[BufferSettings]) -> None:
        self._wrapped = self._default() if wrapped is None else wrapped
        self._coatcheck = settings_of(**settings)

    def _default(self) -> Any:
        raise NotImplementedError

    def _hop(self, request: Any) -> Hop[Any]:
        # The library copies the extensions to a redirected request, which so has the same key.
        action = request.extensions.setdefault(EXTENSION, Action(self._coatcheck))
        action.restart()  # it may as well be a request that the application sends again
        return Hop(self.library, action, request, of_client=False)


class SyncTransport(_BaseTransport):
    """A transport for threads that sends requests until there is a definite answer."""

    def _default(self) -> Any:
        return self.library.HTTPTransport()

    def handle_request(self, request: Any) -> Any:
        """Send *request*, and again until there is a definite answer."""
        if PASSED in request.extensions:
            return self._wrapped.handle_request(request)
        hop = self._hop(request)
        if hop.needs_copy:
            hop.keep(copied(request.stream))
        hop.place_key()

        def attempt(effect: Send) -> Answer | Lost:
            sent, _ = hop.prepared(effect, {})
            try:
                response = self._wrapped.handle_request(sent)
                if hop.is_buffered(response, effect):
                    raw = b"".join(response.stream)
                    response.stream.close()
                    response = hop.rebuilt(response, raw)
            except self.library.TransportError as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return hop.run(attempt)

    def close(self) -> None:
        """Close the transport below."""
        self._wrapped.close()


class AsyncTransport(_BaseTransport):
    """A transport for event loops that sends requests until there is a definite answer."""

    def _default(self) -> Any:
        return self.library.AsyncHTTPTransport()

    async def handle_async_request(self, request: Any) -> Any:
        """Send *request*, and again until there is a definite answer."""
        if PASSED in request.extensions:
            return await self._wrapped.handle_async_request(request)
        hop = self._hop(request)
        if hop.needs_copy:
            hop.keep(await copied_async(request.stream))
        hop.place_key()

        async def attempt(effect: Send) -> Answer | Lost:
            sent, _ = hop.prepared(effect, {})
            try:
                response = await self._wrapped.handle_async_request(sent)
                if hop.is_buffered(response, effect):
                    raw = b"".join([chunk async for chunk in response.stream])
                    await response.stream.aclose()
                    response = hop.rebuilt(response, raw)
            except self.library.TransportError as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return await hop.run_async(attempt)

    async def aclose(self) -> None:
        """Close the transport below."""
        await self._wrapped.aclose()


class Hop(Exchange[R]):
    """All attempts of one request of the library, at one address."""

    def __init__(
        self, library: ModuleType, action: Action[Any], request: Any, *, of_client: bool = True
    ) -> None:
        self._of_client = of_client
        name = action.settings.preset.key_header
        self._is_first = action.is_first
        self.request = request
        self._library = library
        self._key_name = name or ""
        self._timeouts: dict[str, float | None] | None = request.extensions.get("timeout")
        given = None if name is None else _value_of(request.headers, name)
        if given is not None and of_client and self._is_first:
            # The application sends a request again: that is another action.
            given = None if request.extensions.get(PLACED) == given else given
        super().__init__(action, request.method, request.url, given)

    @staticmethod
    def origin_of(url: Any) -> str:
        """The scheme, host and port of *url*."""
        return f"{url.scheme}://{url.host}:{url.port or PORTS.get(url.scheme)}"

    def late(self, words: str) -> BaseException:
        """The error of the library for a request that is not sent in time."""
        error: BaseException = self._library.ConnectTimeout(words, request=self.request)
        return error

    @property
    def needs_copy(self) -> bool:
        """Whether the body has to be copied, because it can be read only once."""
        if isinstance(self.request.stream, self._library.ByteStream):
            return False
        return self.is_repeatable or (self.key is not None and not self._key_name)

    def keep(self, copy: BodyCopy) -> None:
        """Send the body from *copy*."""
        if copy.is_small:
            self.request.stream = self._library.ByteStream(copy.content())
        else:
            self.request.stream = _copied_stream(self._library)(copy)

    def place_key(self) -> None:
        """Put the key where the API wants it; a redirect to another origin gets none."""
        member = self.settings.preset.key_member
        if member is not None and self.key is not None:
            self._original = self.request
            self._place_member(self.key)
        elif self.key is None and not self._is_first:
            self._remove_key()
        elif self.key is not None and not self.is_own_key:
            self._set_header(self.key)

    def _remove_key(self) -> None:
        """Another origin, or a page after the action, does not get the key."""
        member = self.settings.preset.key_member
        if member is None:
            self.request.headers.pop(self._key_name, None)
        elif isinstance(self.request.stream, self._library.ByteStream):
            body = b"".join(self.request.stream)
            bare = key_out_of_body(body, member, self.action.key or "")
            if bare != body:
                self._set_body(self.request, bare)

    def _set_header(self, key: str) -> None:
        name, value = self.header(key)
        self.request.headers[name] = value
        if self._of_client:
            self.request.extensions[PLACED] = value

    def _place_member(self, key: str) -> None:
        member, original = self.settings.preset.key_member or "", self._original
        body, found = key_in_body(b"".join(original.stream), member, key)
        self.use_key(found)
        self._set_body(original, body)

    def _set_body(self, original: Any, body: bytes) -> None:
        headers = original.headers.copy()
        for name in ("Content-Length", "Transfer-Encoding"):
            headers.pop(name, None)
        self.request = self._library.Request(
            original.method,
            original.url,
            headers=headers,
            content=body,
            extensions=original.extensions,
        )

    def prepared(self, effect: Send, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The request of the next attempt, and the options to send it with."""
        if effect.poll is not None:
            return self._poll(effect), {**options, "auth": None} if options else options
        if effect.key != self.key and effect.key is not None:  # the key has expired
            self.key = effect.key
            if self._key_name:
                self._set_header(effect.key)
            else:
                self._place_member(effect.key)
        self._limit(self.request, effect.time_left_s)
        return self.request, options

    def _poll(self, effect: Send) -> Any:
        """The request that asks the address of an accepted operation."""
        url = self.request.url.join(effect.poll)
        is_same = self.origin_of(url) == self.origin_of(self.request.url)
        headers = self.request.headers.copy()
        of_body = [name for name in headers if name.startswith(("content-", "transfer-"))]
        for name in (*of_body, self._key_name or "host", "host"):
            headers.pop(name, None)
        request = self._library.Request("GET", url, headers=headers if is_same else None)
        self._limit(request, effect.time_left_s)
        return request

    def _limit(self, request: Any, time_left_s: float) -> None:
        extensions = request.extensions
        if self._of_client:
            extensions[PASSED] = True
        if self._timeouts is None:  # the library sets its own
            return
        limit_s = self.timeout_s(time_left_s)
        extensions["timeout"] = {
            name: limit_s if value is None or value > limit_s else value
            for name, value in self._timeouts.items()
        }

    def is_buffered(self, response: Any, effect: Send) -> bool:
        """Whether the transport reads the whole *response*."""
        if self.is_read(response.status_code, effect):
            return True
        kind = response.headers.get("Content-Type", "").lower()
        is_stream = kind.startswith("text/event-stream")
        return self.settings.buffer and self.key is not None and not is_stream

    def rebuilt(self, response: Any, raw: bytes) -> Any:
        """*response* with the body *raw*, as it came."""
        return self._library.Response(
            response.status_code,
            headers=response.headers,
            stream=self._library.ByteStream(raw),
            extensions=response.extensions,
        )

    def noted(self, response: Any, effect: Send) -> Answer:
        """Note *response*, and reduce it to what decides about a retry."""
        status, headers, body = response.status_code, response.headers, b""
        is_poll = effect.poll is not None
        if (status >= 400 or is_poll) and is_body_read(
            status, headers.get("Content-Type"), is_poll=is_poll
        ):
            body = self._content(response)
        return self.answered(response, status, functools.partial(_value_of, headers), body)

    def _content(self, response: Any) -> bytes:
        if not isinstance(response.stream, self._library.ByteStream):
            return bytes(response.content)  # read by a client
        try:  # by a transport: the response itself is left as it came
            copy = self._library.Response(
                200, headers=response.headers, content=b"".join(response.stream)
            )
            return bytes(copy.content)
        except self._library.DecodingError:
            return b""

    def failed(self, error: BaseException) -> Lost:
        """Note *error*; raises it again if a retry cannot help."""
        library = self._library
        if isinstance(error, library.UnsupportedProtocol):
            raise self.unsendable(error)
        if isinstance(error, library.LocalProtocolError):  # perhaps in the middle of the body
            self.action.may_have_run = True
            raise self.unsendable(error)
        not_sent = (library.ConnectError, library.ConnectTimeout, library.PoolTimeout)
        return self.lost(error, may_have_arrived=not isinstance(error, not_sent))


def _value_of(headers: Any, name: str) -> str | None:
    """The header *name*; looked for in the raw ones, because those of the library decode first."""
    wanted = name.lower().encode()
    found = [value for key, value in headers.raw if key.lower() == wanted]
    return ", ".join(value.decode("latin-1") for value in found) if found else None


@functools.cache
def _copied_stream(library: ModuleType) -> Any:
    bases = (CopiedStream, library.SyncByteStream, library.AsyncByteStream)
    return type("CopiedStream", bases, {})
