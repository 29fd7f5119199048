"""`requests.Session` with one key for each action and safe retries: drop-in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack
from urllib.parse import urljoin, urlsplit

from coatcheck.errors import MissingExtra

try:
    import requests
    import requests.exceptions
    import urllib3.exceptions
except ImportError as error:
    raise MissingExtra("requests", "requests") from error

from coatcheck.client.body import BodyCopy, BodyReader, copied
from coatcheck.client.call import PORTS, Action, Actions, Exchange
from coatcheck.client.keys import key_in_body, key_out_of_body
from coatcheck.client.settings import ClientSettings, settings_of
from coatcheck.core.client.send import Answer, Lost, Send, is_body_read

_HALF = (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)
# The options of `Session.request` that belong to the sending and not to the request.
_OF_SENDING = ("proxies", "stream", "verify", "cert", "timeout", "allow_redirects")


class Session(Actions[requests.Response], requests.Session):
    """`requests.Session` that sends a request until there is a definite answer."""

    __attrs__ = [*requests.Session.__attrs__, "_coatcheck"]  # noqa: RUF012 - what is pickled

    def __init__(self, **settings: Unpack[ClientSettings]) -> None:
        super().__init__()
        self._coatcheck = settings_of(**settings)

    def _send_action(
        self, action: Action[requests.Response], method: str, url: str, **options: Any
    ) -> requests.Response:
        sending = {name: options.pop(name) for name in _OF_SENDING if name in options}
        prepared = self.prepare_request(requests.Request(method.upper(), url, **options))
        merged = self.merge_environment_settings(
            prepared.url or url,
            sending.get("proxies") or {},
            sending.get("stream"),
            sending.get("verify"),
            sending.get("cert"),
        )
        return self._send_call(action, prepared, {**sending, **merged})

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send *request*, and again until there is a definite answer."""
        return self._send_call(Action(self._coatcheck), request, options)

    def _send_call(
        self, action: Action[Any], request: requests.PreparedRequest, options: dict[str, Any]
    ) -> requests.Response:
        follows = options.pop("allow_redirects", True)
        history: list[requests.Response] = []
        while True:
            response = self._send_hop(Hop(action, request), options)
            response.history = list(history)
            if not follows or response.next is None:
                return response
            history.append(response)
            if len(history) > self.max_redirects:
                raise requests.TooManyRedirects(
                    f"Exceeded {self.max_redirects} redirects.", response=response
                )
            response.close()
            request = response.next

    def _send_hop(self, hop: Hop, options: dict[str, Any]) -> requests.Response:
        plain_send = super().send
        hop.freeze()
        timeout = options.get("timeout")

        def attempt(effect: Send) -> Answer | Lost:
            sent = hop.prepared(effect)
            limited = {**options, "timeout": hop.limited(timeout, effect.time_left_s)}
            try:
                response = plain_send(sent, **limited, allow_redirects=False)
                if hop.is_read(response.status_code, effect):
                    _ = response.content  # read, so that its connection is free again
            except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL) as error:
                raise hop.unsendable(error) from None
            except (requests.ConnectionError, requests.Timeout) as error:
                return hop.lost(error, may_have_arrived=not _is_not_sent(error))
            except _HALF as error:  # the response broke off, or is damaged
                return hop.lost(error)
            if hop.is_repeatable and _is_cut_off(response):
                response.close()
                words = "the connection ended within the headers of the response"
                return hop.lost(requests.ConnectionError(words, response=response))
            return hop.noted(response, effect)

        return hop.run(attempt)


class Hop(Exchange[requests.Response]):
    """All attempts of one prepared request."""

    def __init__(self, action: Action[Any], request: requests.PreparedRequest) -> None:
        name = action.settings.preset.key_header
        self._is_first = action.is_first
        # A copy: the application may send its prepared request again, as another action.
        self.request = request.copy()
        self._copy: BodyCopy | None = None
        given: Any = None if name is None else request.headers.get(name)
        given = given.decode("latin-1") if isinstance(given, bytes) else given
        super().__init__(action, request.method or "", request.url or "", given)

    @staticmethod
    def origin_of(url: str) -> str:
        """The scheme, host and port of *url*."""
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port or PORTS.get(parts.scheme)}"

    def late(self, words: str) -> BaseException:
        """The error of the library for a request that is not sent in time."""
        return requests.ConnectTimeout(words, request=self.request)

    def freeze(self) -> None:
        """Copy a body that can be read only once, and put the key in its place."""
        body: Any = self.request.body
        member = self.settings.preset.key_member
        in_body = member is not None and self.key is not None
        if isinstance(body, BodyReader):  # after a redirect
            self._copy = body.copy
        elif not isinstance(body, (bytes, str, type(None))) and (self.is_repeatable or in_body):
            copy = copied(_chunks_of(body))
            if copy.is_small:
                self.request.body = copy.content()
            else:
                self._copy = copy
            # Otherwise a redirect would rewind the file that the copy was made of.
            setattr(self.request, "_body_position", None)  # noqa: B010 - no type has it
        self._body = self._content() if in_body else b""
        self._place_key(self.key)

    def _content(self) -> bytes:
        body = self.request.body
        if self._copy is not None:
            return self._copy.content()
        return body.encode() if isinstance(body, str) else body or b""

    def _place_key(self, key: str | None) -> None:
        preset, headers = self.settings.preset, self.request.headers
        name, value = self.header(key)
        if preset.key_member is not None and key is not None:
            body, found = key_in_body(self._body, preset.key_member, key)
            self.use_key(found)
            self._copy = None
            self._set_body(body)
        elif key is None and not self._is_first:
            headers.pop(name, None)
            sent = self.request.body
            if preset.key_member is not None and isinstance(sent, bytes):
                self._set_body(key_out_of_body(sent, preset.key_member, self.action.key or ""))
        elif value is not None and not (self.is_own_key and key == self.key):
            headers[name] = value

    def _set_body(self, body: bytes) -> None:
        self.request.body = body
        self.request.headers.pop("Transfer-Encoding", None)
        self.request.headers["Content-Length"] = str(len(body))

    def prepared(self, effect: Send) -> requests.PreparedRequest:
        """The request of the next attempt."""
        if effect.poll is not None:
            return self._poll(effect.poll)
        if effect.key is not None and effect.key != self.key:  # the key has expired
            self.is_own_key = False
            self._place_key(effect.key)
            self.key = effect.key
        if self._copy is not None:
            self.request.body = BodyReader(self._copy)  # type: ignore[assignment] # a file
        return self.request

    def _poll(self, location: str) -> requests.PreparedRequest:
        """The request that asks the address of an accepted operation."""
        url = urljoin(self.request.url or "", location)
        request = self.request.copy()
        request.method, request.url, request.body = "GET", url, None
        is_same = self.origin_of(url) == self.origin_of(self.request.url or "")
        hidden = ("content-", "transfer-", (self.settings.preset.key_header or "host").lower())
        for name in list(request.headers):
            if not is_same or name.lower().startswith(hidden):
                del request.headers[name]
        return request

    def limited(self, timeout: Any, time_left_s: float) -> Any:
        """*timeout*, in any of its forms, and no longer than the time that is left."""
        limit_s = self.timeout_s(time_left_s)
        if isinstance(timeout, tuple):
            return tuple(limit_s if part is None else min(part, limit_s) for part in timeout)
        if timeout is None or isinstance(timeout, (int, float)):
            return limit_s if timeout is None else min(timeout, limit_s)
        return timeout  # an object of urllib3

    def noted(self, response: requests.Response, effect: Send) -> Answer:
        """Note *response*, and reduce it to what decides about a retry."""
        status, headers, body = response.status_code, response.headers, b""
        if is_body_read(status, headers.get("Content-Type"), is_poll=effect.poll is not None):
            body = response.content
        return self.answered(response, status, headers.get, body)


def _chunks_of(body: Any) -> Iterable[bytes]:
    if not hasattr(body, "read"):
        return (chunk.encode() if isinstance(chunk, str) else chunk for chunk in body)
    parts = iter(lambda: body.read(64 * 1024), type(body.read(0))())
    return (part.encode() if isinstance(part, str) else part for part in parts)


def _is_not_sent(error: BaseException) -> bool:
    """No connection was made, so the server cannot have got the request."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return isinstance(reason, urllib3.exceptions.NewConnectionError)


def _is_cut_off(response: requests.Response) -> bool:
    """
    The headers may have been cut off by a lost connection.

    urllib3 takes the headers that came before the connection was lost as all of them, with an empty
    body. A server that really ends its body by closing the connection announces it.
    """
    if response.raw.version != 11 or response.status_code in {204, 304}:
        return False
    headers, request = response.headers, response.request
    is_ended = any(name in headers for name in ("Content-Length", "Transfer-Encoding"))
    is_announced = "close" in headers.get("Connection", "").lower()
    return not is_ended and not is_announced and request.method != "HEAD"
