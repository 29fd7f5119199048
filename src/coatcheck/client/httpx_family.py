"""Clients and transports for httpx and httpx2, which have the same interface: one source for both.

The classes here are mixed with those of one library, which `library` names. Only the public
interface of the libraries is used, so that a new release does not break it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable
from types import ModuleType
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, cast

from coatcheck.client.body import BodyCopy, CopiedStream, copied, copied_async
from coatcheck.client.call import EXTENSION, PORTS, Action, Exchange
from coatcheck.client.keys import key_in_body
from coatcheck.client.settings import Clock, Settings, settings_of
from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.core.client.send import Answer, Lost, Send, is_body_read

R = TypeVar("R")  # the response of the library

# Marks a request whose retries are decided already: a transport below passes it on.
PASSED = "coatcheck.passed"


class ClientOptions(TypedDict, total=False):
    """The options of the library's own client."""

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


class _Base(Generic[R]):
    """What the sync and the async client have in common."""

    library: ModuleType
    _coatcheck: Settings

    def __init__(
        self,
        *,
        retry: RetryPolicy | None = None,
        preset: Preset | str = "default",
        budget: RetryBudget | None = None,
        clock: Clock | None = None,
        key_version: Literal[4, 7] = 4,
        **options: Unpack[ClientOptions],
    ) -> None:
        cast("Any", super()).__init__(**options)
        self._coatcheck = settings_of(
            retry=retry, preset=preset, budget=budget, clock=clock, key_version=key_version
        )

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


class SyncClient(_Base[R]):
    """The part of a client for threads that is not the library's own."""

    def action(
        self,
        *,
        key: str | None = None,
        reference: str | None = None,
        send_key: bool = True,
        retry: RetryPolicy | None = None,
    ) -> Action[R]:
        """
        One action of the application, with a key of its own.

        Args:
            key: the key; by default a new one.
            reference: what the action is for, such as "order-17": the same reference always has the
                same key, in every process.
            send_key: False sends no key, for an API that does not take one.
            retry: another policy than that of the client.
        """
        return Action(
            self._coatcheck,
            self._send_action,
            key=key,
            reference=reference,
            send_key=send_key,
            retry=retry,
        )

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
                if response.status_code >= 400 or effect.poll is not None:
                    response.read()
            except self.library.TransportError as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return hop.run(attempt)


class AsyncClient(_Base[R]):
    """The part of a client for event loops that is not the library's own."""

    def action(
        self,
        *,
        key: str | None = None,
        reference: str | None = None,
        send_key: bool = True,
        retry: RetryPolicy | None = None,
    ) -> Action[Awaitable[R]]:
        """One action of the application, with a key of its own; see `Client.action`."""
        return Action(
            self._coatcheck,
            self._send_action,
            key=key,
            reference=reference,
            send_key=send_key,
            retry=retry,
        )

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
                if response.status_code >= 400 or effect.poll is not None:
                    await response.aread()
            except self.library.TransportError as error:
                return hop.failed(error)
            return hop.noted(response, effect)

        return await hop.run_async(attempt)


class _BaseTransport:
    """What the transports have in common: they retry beneath a client that is not ours."""

    library: ModuleType

    def __init__(
        self,
        wrapped: Any = None,
        *,
        retry: RetryPolicy | None = None,
        preset: Preset | str = "default",
        budget: RetryBudget | None = None,
        clock: Clock | None = None,
        key_version: Literal[4, 7] = 4,
        buffer: bool = True,
    ) -> None:
        self._wrapped = self._default() if wrapped is None else wrapped
        self._coatcheck = settings_of(
            retry=retry,
            preset=preset,
            budget=budget,
            clock=clock,
            key_version=key_version,
            buffer=buffer,
        )

    def _default(self) -> Any:
        raise NotImplementedError

    def _hop(self, request: Any) -> Hop[Any]:
        # The library copies the extensions to a redirected request, which so has the same key.
        action = request.extensions.setdefault(EXTENSION, Action(self._coatcheck))
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
        super().__init__(action, request.method, request.url, given)

    @staticmethod
    def origin_of(url: Any) -> str:
        """The scheme, host and port of *url*."""
        return f"{url.scheme}://{url.host}:{url.port or PORTS.get(url.scheme)}"

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
        elif self.key is None and self._key_name and not self._is_first:
            self.request.headers.pop(self._key_name, None)
        elif self.key is not None and not self.is_own_key:
            self._set_header(self.key)

    def _set_header(self, key: str) -> None:
        name, value = self.header(key)
        self.request.headers[name] = value

    def _place_member(self, key: str) -> None:
        member, original = self.settings.preset.key_member or "", self._original
        body, found = key_in_body(b"".join(original.stream), member, key)
        self.use_key(found)
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
        if response.status_code >= 400 or effect.poll is not None:
            return True
        kind = response.headers.get("Content-Type", "")
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
        if isinstance(error, (library.UnsupportedProtocol, library.LocalProtocolError)):
            raise error
        not_sent = (library.ConnectError, library.ConnectTimeout, library.PoolTimeout)
        return self.lost(error, may_have_arrived=not isinstance(error, not_sent))


def _value_of(headers: Any, name: str) -> str | None:
    """The header *name*; its `get` raises and catches an error where there is none, which costs."""
    return headers[name] if name in headers else None  # noqa: SIM401 - see above


@functools.cache
def _copied_stream(library: ModuleType) -> Any:
    bases = (CopiedStream, library.SyncByteStream, library.AsyncByteStream)
    return type("CopiedStream", bases, {})
