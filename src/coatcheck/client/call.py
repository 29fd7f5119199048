"""Calls and actions: the state of one call, the same for every HTTP library.

A library builds an `Exchange` for each request, and gives `run` a function that performs one
attempt. A redirect is the next exchange of the same action: it has the same key, unless it leads
to another origin, which gets none.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from coatcheck.client.keys import checked_key, header_value, key_in_header, key_of_reference
from coatcheck.client.settings import Settings
from coatcheck.core.client.retry_policy import RetryPolicy
from coatcheck.core.client.send import (
    Answer,
    Lost,
    Order,
    Reply,
    Result,
    Send,
    Sleep,
    answer_of,
    send,
)
from coatcheck.core.flow import Effect, run, run_async
from coatcheck.core.key import redacted
from coatcheck.core.policy import SAFE_METHODS
from coatcheck.errors import Misconfigured

# Where a response has its `Result`: in the extensions of httpx, as an attribute elsewhere.
EXTENSION = "coatcheck"

# Where a URL names none.
PORTS = {"http": 80, "https": 443}

T = TypeVar("T")


class Action(Generic[T]):
    """
    One action of the application: one request, however often it is sent.

    *key* is the key of all its attempts, *attempts* their number so far, *result* what came of it,
    and *was_replayed* whether the server answered from its record.
    """

    def __init__(
        self,
        settings: Settings,
        sender: Callable[..., T] | None = None,
        *,
        key: str | None = None,
        reference: str | None = None,
        send_key: bool = True,
        retry: RetryPolicy | None = None,
    ) -> None:
        if (key is not None) + (reference is not None) + (not send_key) > 1:
            raise Misconfigured("an action takes one of key=, reference= and send_key=False")
        self.key: str | None = None if key is None else checked_key(key, settings.preset)
        self.attempts = 0
        self.result: Result | None = None
        self.settings = settings
        self.policy = settings.retry if retry is None else retry
        self._sender = sender
        self._sends_key = send_key
        self._target: tuple[str, str] | None = None
        self._first_url: Any = None
        if reference is not None:
            self.key = key_of_reference(reference)
        elif sender is not None and send_key and key is None:
            self.key = settings.new_key()

    @property
    def was_replayed(self) -> bool:
        """Whether the last answer is one that the server had stored."""
        return self.result is not None and self.result.was_replayed

    def request(self, method: str, url: object, **options: Any) -> T:
        """Send the request of this action, with the *options* of the HTTP library."""
        target = (method.upper(), str(url))
        if self._target not in (None, target):
            assert self._target is not None
            raise Misconfigured(
                f"this action is {' '.join(self._target)}; begin another action for "
                f"{' '.join(target)}"
            )
        self._target = target
        self._first_url = None
        assert self._sender is not None
        return self._sender(self, method, url, **options)

    def get(self, url: object, **options: Any) -> T:
        """Send a GET."""
        return self.request("GET", url, **options)

    def post(self, url: object, **options: Any) -> T:
        """Send a POST."""
        return self.request("POST", url, **options)

    def put(self, url: object, **options: Any) -> T:
        """Send a PUT."""
        return self.request("PUT", url, **options)

    def patch(self, url: object, **options: Any) -> T:
        """Send a PATCH."""
        return self.request("PATCH", url, **options)

    def delete(self, url: object, **options: Any) -> T:
        """Send a DELETE."""
        return self.request("DELETE", url, **options)

    def __enter__(self) -> Action[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    async def __aenter__(self) -> Action[T]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    @property
    def is_first(self) -> bool:
        """Whether the next request is the first, and not one after a redirect."""
        return self._first_url is None

    def key_for(
        self, method: str, url: Any, given: str | None, origin_of: Callable[[Any], str]
    ) -> str | None:
        """The key of the next request; *given* is the header that the application has set."""
        if self._first_url is None:
            self._first_url = url
        elif origin_of(url) != origin_of(self._first_url):
            return None
        if given is not None and self.key is None:
            self.key = key_in_header(given)
        carries = method not in SAFE_METHODS and (
            self.key is not None or method in self.settings.preset.methods
        )
        if not carries or not self._sends_key:
            return None
        if self.key is None:
            self.key = self.settings.new_key()
        return self.key


class Exchange(Generic[T]):
    """All attempts of one request at one address; *response* or *error* is the last result."""

    def __init__(self, action: Action[Any], method: str, url: Any, given: str | None) -> None:
        self.action = action
        self.settings = action.settings
        self.key = action.key_for(method, url, given, self.origin_of)
        self.is_own_key = given is not None and key_in_header(given) == self.key
        self.order = Order(method, self.key, action.policy, self.settings.preset)
        self.response: T | None = None
        self.error: BaseException | None = None

    @staticmethod
    def origin_of(url: Any) -> str:
        """The scheme, host and port of a URL of the library."""
        raise NotImplementedError

    def use_key(self, key: str) -> None:
        """Use *key*, which the application has put into the body, instead of a new one."""
        self.key = self.action.key = key
        self.order = self.order._replace(key=key)

    @property
    def is_repeatable(self) -> bool:
        """Whether the request may be sent more than once."""
        return (
            self.order.policy.attempts_max > 1
            and (self.key is not None or self.order.method in self.order.policy.methods_without_key)
        )  # fmt: skip

    def header(self, key: str | None) -> tuple[str, str | None]:
        """The name of the header with the key, and its value; None if there is to be no header."""
        preset = self.settings.preset
        name = preset.key_header or ""
        return name, header_value(key, preset) if name and key is not None else None

    def timeout_s(self, time_left_s: float) -> float:
        """How long the next attempt may take."""
        timeout_s = self.order.policy.timeout_s
        return time_left_s if timeout_s is None else min(timeout_s, time_left_s)

    def run(self, attempt: Callable[[Send], Answer | Lost]) -> T:
        """Send the request, with *attempt*, until there is a result; returns the response."""
        clock = self.settings.clock

        def perform(effect: Effect[Any]) -> Any:
            if isinstance(effect, Send):
                self._count(effect)
                return Reply(attempt(effect), clock.monotonic_s(), clock.random())
            if isinstance(effect, Sleep):
                clock.sleep(effect.seconds)
                return clock.monotonic_s()
            return self.settings.new_key()

        flow = send(self.order, self.settings.budget, clock.monotonic_s())
        return self._ended(run(flow, perform))

    async def run_async(self, attempt: Callable[[Send], Awaitable[Answer | Lost]]) -> T:
        """The same, on an event loop."""
        clock = self.settings.clock

        async def perform(effect: Effect[Any]) -> Any:
            if isinstance(effect, Send):
                self._count(effect)
                return Reply(await attempt(effect), clock.monotonic_s(), clock.random())
            if isinstance(effect, Sleep):
                await clock.async_sleep(effect.seconds)
                return clock.monotonic_s()
            return self.settings.new_key()

        flow = send(self.order, self.settings.budget, clock.monotonic_s())
        return self._ended(await run_async(flow, perform))

    def _count(self, effect: Send) -> None:
        if effect.poll is None:
            self.action.attempts += 1
        self.response = self.error = None

    def answered(
        self, response: T, status: int, header: Callable[[str], str | None], body: bytes = b""
    ) -> Answer:
        """Note *response*, and reduce it to what decides about a retry."""
        self.response = response
        clock, preset = self.settings.clock, self.settings.preset
        return answer_of(status, header, body, preset=preset, wall_s=clock.wall_s())

    def lost(self, error: BaseException, *, may_have_arrived: bool = True) -> Lost:
        """Note *error*; raises it again if no retry can help."""
        if _is_certificate_wrong(error):
            raise error
        self.error = error
        return Lost(may_have_arrived)

    def _ended(self, result: Result) -> T:
        self.action.result = result
        self.action.key = result.key or self.action.key
        if self.error is None:
            assert self.response is not None
            extensions = getattr(self.response, "extensions", None)
            if isinstance(extensions, dict):
                extensions[EXTENSION] = result
            else:
                setattr(self.response, EXTENSION, result)
            return self.response
        setattr(self.error, EXTENSION, result)
        self.error.add_note(_note(result))
        raise self.error


def result_of(thing: object) -> Result | None:
    """What came of the call that returned the response, or raised the error, *thing*."""
    extensions = getattr(thing, "extensions", None)
    found = extensions.get(EXTENSION) if isinstance(extensions, dict) else None
    found = getattr(thing, EXTENSION, None) if found is None else found
    return found if isinstance(found, Result) else None


_REASONS = {
    "attempts": "all attempts are used",
    "deadline": "the deadline has come",
    "budget": "the retry budget is empty",
    "no-key": "a request without a key is not sent again",
}
_OUTCOMES = {
    "refused": "The server cannot have got the request.",
    "unknown": "The outcome is unknown: the request may have been executed.",
}


def _note(result: Result) -> str:
    times = "1 attempt" if result.attempts == 1 else f"{result.attempts} attempts"
    note = f"coatcheck gave up after {times}: {_REASONS[result.gave_up]}. "
    note += _OUTCOMES[result.outcome]
    if result.key is not None and result.outcome == "unknown":
        note += f" To find out, send it again with the same key, {redacted(result.key)}"
    return note


def _is_certificate_wrong(error: BaseException | None) -> bool:
    """The server's certificate was refused: it will be refused again."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
