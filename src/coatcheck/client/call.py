"""Calls and actions: the state of one call, the same for every HTTP library.

A library builds an `Exchange` for each request, and gives `run` a function that performs one
attempt. A redirect is the next exchange of the same action: it has the same key, unless it leads
to another origin, which gets none.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from coatcheck.client.keys import (
    checked_key,
    header_value,
    is_blank,
    key_in_header,
    key_of_reference,
)
from coatcheck.client.settings import Settings, checked_policy
from coatcheck.core.client.retry_policy import RetryPolicy
from coatcheck.core.client.send import (
    EXTENSION,
    Answer,
    GaveUp,
    Lost,
    Order,
    Outcome,
    Reply,
    Result,
    Send,
    Sleep,
    answer_of,
    may_have_run_after,
    send,
)
from coatcheck.core.flow import Effect, Flow, run, run_async
from coatcheck.core.key import redacted
from coatcheck.core.policy import SAFE_METHODS
from coatcheck.errors import Misconfigured

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
        self.may_have_run = False
        self.settings = settings
        self.policy = settings.retry if retry is None else checked_policy(retry, settings.preset)
        self._sender = sender
        self._sends_key = send_key
        self._target: tuple[str, str] | None = None
        self._first_url: Any = None
        self._started_s: float | None = None
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
        self.restart()
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

    def restart(self) -> None:
        """The next request has the whole deadline."""
        self._started_s = None

    def spent_s(self, now_s: float) -> float:
        """How long this call has taken, with the requests that were redirected."""
        if self._started_s is None:
            self._started_s = now_s
        return now_s - self._started_s

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
        if is_blank(self.key):
            raise Misconfigured(
                f"the key is blank in the header {self.settings.preset.key_header}; leave the "
                "header out, and the client sets it"
            )
        return self.key


class Actions(Generic[T]):
    """What every client has: actions of the application, each with a key of its own."""

    is_async: ClassVar[bool] = False  # whether requests are awaited

    _coatcheck: Settings

    def action(
        self,
        *,
        key: str | None = None,
        reference: str | None = None,
        send_key: bool = True,
        retry: RetryPolicy | None = None,
    ) -> Action[T]:
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

    def _send_action(self, action: Action[T], method: str, url: Any, **options: Any) -> T:
        raise NotImplementedError


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

    def is_read(self, status: int, effect: Send) -> bool:
        """Whether the client itself reads the whole response, so that its connection is free."""
        is_followed = status == 202 and self.order.policy.follow_accepted
        return status >= 400 or effect.poll is not None or is_followed

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

        return self._ended(run(self._flow(clock.monotonic_s()), perform))

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

        return self._ended(await run_async(self._flow(clock.monotonic_s()), perform))

    def _flow(self, now_s: float) -> Flow[Result]:
        spent_s, order = self.action.spent_s(now_s), self.order
        if spent_s > 0:  # after a redirect
            if spent_s >= order.policy.deadline_s:
                error = self.late("the deadline came before the redirect was followed")
                raise self._without_answer(error, "deadline")
            order = order._replace(spent_s=spent_s, may_have_run=self.action.may_have_run)
        return send(order, self.settings.budget, now_s)

    def late(self, words: str) -> BaseException:
        """The error of the library for a request that is not sent in time."""
        raise NotImplementedError

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
        answer = answer_of(status, header, body, preset=preset, wall_s=clock.wall_s())
        if status >= 400 and may_have_run_after(answer):
            self.action.may_have_run = True
        return answer

    def lost(self, error: BaseException, *, may_have_arrived: bool = True) -> Lost:
        """Note *error*; raises it again if no retry can help."""
        if _is_certificate_wrong(error):
            raise self.unsendable(error)
        self.error = error
        if may_have_arrived:
            self.action.may_have_run = True
        return Lost(may_have_arrived)

    def unsendable(self, error: BaseException) -> BaseException:
        """*error*, with its result: this attempt did not reach the server, and none would."""
        return self._without_answer(error, "cannot-send")

    def _without_answer(self, error: BaseException, gave_up: GaveUp) -> BaseException:
        outcome: Outcome = "unknown" if self.action.may_have_run else "refused"
        attempts, key = self.action.attempts, self.key
        result = Result(outcome, attempts, was_replayed=False, key=key, gave_up=gave_up)
        self._set_result(error, result)
        return error

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
        self._set_result(self.error, result)
        raise self.error

    def _set_result(self, error: BaseException, result: Result) -> None:
        self.action.result = result
        setattr(error, EXTENSION, result)
        error.add_note(_note(result))


_REASONS = {
    "attempts": "all attempts are used",
    "deadline": "the deadline has come",
    "budget": "the retry budget is empty",
    "no-key": "a request without a key is not sent again",
    "cannot-send": "another attempt would fail in the same way",
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
