"""`assert_idempotent`: the same request twice, at once and after a lost answer has one effect."""

from __future__ import annotations

import inspect
import math
import numbers
import uuid
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from coatcheck.core.policy import Policy
from coatcheck.engine.runner import running_loop
from coatcheck.errors import Misconfigured
from coatcheck.testing.apps import (
    Answer,
    AsgiSender,
    Request,
    Sender,
    WsgiSender,
    interface_of,
    lifespan_of,
    run_on_new_loop,
    run_without_loop,
)

Effects: TypeAlias = Callable[[], Any]
Interface: TypeAlias = Literal["asgi", "wsgi"]

# 5: enough for a race to show, few enough for the limit of waiters and for a pool of connections.
AT_ONCE = 5
# What a duplicate may get while the first request runs: it is to be sent again later.
_LATER = (202, 409, 425, 429, 503)
# 1: one execution. Amounts of money as floats are not exact.
_EXACT = 1e-9


def assert_idempotent(
    app: Callable[..., Any],
    request: Request | Callable[[], Request],
    *,
    effects: Effects,
    at_once: int = AT_ONCE,
    same_answer: bool = True,
    key_header: str = "Idempotency-Key",
    lifespan: bool = True,
    interface: Interface | None = None,
) -> None:
    """
    Fail unless a request that is repeated with its key takes effect once.

    Sends *request* to *app* with a new key in three situations: twice; *at_once* times at the same
    time, and once more; and with a client that hangs up before the answer, and sends it again.
    After each the effects must be those of one request.

    Args:
        app: an ASGI or WSGI application.
        request: a request, or a function that returns another one for each situation.
        effects: returns a number, or a collection of which each effect adds to the length; async
            only with `assert_idempotent_async`.
        at_once: how many requests are sent at the same time.
        same_answer: also fail unless a repeated request gets the answer of the first.
        key_header: the header with the key.
        lifespan: start an ASGI application and shut it down, as a server does.
        interface: "asgi" or "wsgi", if *app* does not show it by itself.
    """
    __tracebackhide__ = True
    settings = _Settings(effects, at_once, key_header, same_answer=same_answer)
    check = _Check(request, settings)
    is_wsgi = interface_of(app, interface) == "wsgi"
    if running_loop() is not None and not is_wsgi:
        raise Misconfigured("in an async test, write: await assert_idempotent_async(…)")
    try:
        if is_wsgi:
            run_without_loop(check.run(WsgiSender(app)))
        else:
            run_on_new_loop(_check_asgi(app, check, lifespan=lifespan))
    except _Failed as failed:  # raised again here, so that pytest shows the line of the test
        raise AssertionError(failed.words) from failed.error


async def assert_idempotent_async(
    app: Callable[..., Any],
    request: Request | Callable[[], Request],
    *,
    effects: Effects,
    at_once: int = AT_ONCE,
    same_answer: bool = True,
    key_header: str = "Idempotency-Key",
    lifespan: bool = True,
) -> None:
    """`assert_idempotent` for an ASGI application, on the event loop of an async test."""
    __tracebackhide__ = True
    if running_loop() is None:
        raise Misconfigured(
            "coatcheck needs an event loop of asyncio; if anyio runs the test, define the fixture "
            '`anyio_backend`, and let it return "asyncio"'
        )
    settings = _Settings(effects, at_once, key_header, same_answer=same_answer)
    try:
        await _check_asgi(app, _Check(request, settings), lifespan=lifespan)
    except _Failed as failed:
        raise AssertionError(failed.words) from failed.error


async def _check_asgi(app: Callable[..., Any], check: _Check, *, lifespan: bool) -> None:
    if lifespan:
        async with lifespan_of(app) as state:
            await check.run(AsgiSender(app, state))
    else:
        await check.run(AsgiSender(app, {}))


class _Failed(Exception):
    """The check failed; *error*: what the application raised."""

    def __init__(self, words: str, answer: Answer) -> None:
        super().__init__(words)
        self.words = words
        self.error = answer.error


class _Settings:
    """The checked arguments."""

    def __init__(
        self, effects: Effects, at_once: int, key_header: str, *, same_answer: bool
    ) -> None:
        if not callable(effects):
            raise Misconfigured("effects must be a function that counts or returns the effects")
        if at_once < 2:
            raise Misconfigured(f"at_once is {at_once!r}; it must be a number of 2 or more")
        self.effects = effects
        self.at_once = at_once
        self.key_header = key_header
        self.same_answer = same_answer


class _Reading(NamedTuple):
    """What `effects()` returned, as a number; *items*: the same as a list, if it was one."""

    count: Any
    items: Sequence[object] = ()

    def added_since(self, before: _Reading) -> str:
        """The effects that are new, for the message."""
        new = self.items[before.count :] if self.items else ()
        return f"\n  added: {list(new)!r}" if new else ""


class _Check:
    """The situations, each with a key of its own."""

    def __init__(self, request: Request | Callable[[], Request], settings: _Settings) -> None:
        self._given = request
        self._settings = settings

    async def run(self, sender: Sender) -> None:
        """Check one situation after the other."""
        one, first = await self._sent_twice(sender)
        await self._sent_at_once(sender, one)
        await self._sent_after_a_lost_answer(sender, one, first)

    async def _sent_twice(self, sender: Sender) -> tuple[Any, Answer]:
        """Returns the amount that one request adds, and its answer."""
        request, before = self._request(), await self._read()
        first = await sender.send(request)
        after = await self._read()
        if _is_same(after.count, before.count):
            _fail(
                f"{request} had no effect, so nothing can be said of a repeated one: effects() "
                f"counted {before.count} before and after it, and the answer was {first}",
                first,
            )
        again = await sender.send(request)
        situation = "sent twice with one key"
        one = after.count - before.count
        await self._compare(request, situation, before, one, again)
        self._compare_answers(request, situation, first, again)
        return one, first

    async def _sent_at_once(self, sender: Sender, one: Any) -> None:  # noqa: ANN401 - a number
        request, before = self._request(), await self._read()
        answers = await sender.send_at_once(request, self._settings.at_once)
        situation = f"sent {self._settings.at_once} times at once with one key"
        await self._compare(request, situation, before, one, answers[0])
        final = await sender.send(request)
        situation = f"{situation}, and once more"
        await self._compare(request, situation, before, one, final)
        for answer in answers:
            if answer.status not in _LATER:
                self._compare_answers(request, situation, answer, final)

    async def _sent_after_a_lost_answer(self, sender: Sender, one: Any, first: Answer) -> None:  # noqa: ANN401 - a number
        request, before = self._request(), await self._read()
        await sender.send_and_hang_up(request)
        again = await sender.send(request)
        situation = "sent again with its key because the answer was lost"
        await self._compare(request, situation, before, one, again)
        if self._settings.same_answer and again.status != first.status:
            _fail(
                f"{request} is not idempotent: {situation}, it got {again}, and another request "
                f"got {first}",
                again,
            )

    async def _compare(
        self,
        request: Request,
        situation: str,
        before: _Reading,
        one: Any,  # noqa: ANN401 - a number
        answer: Answer,
    ) -> None:
        after = await self._read()
        found = after.count - before.count
        if _is_same(found, one):
            return
        _fail(
            f"{request} is not idempotent: {situation}, it took effect {_times(found, one)} "
            f"instead of once\n  effects() counted {before.count} before and {after.count} after; "
            f"one request makes a difference of {one}{after.added_since(before)}\n"
            f"  the answer was {answer}{_hint(request, answer)}",
            answer,
        )

    def _compare_answers(
        self, request: Request, situation: str, first: Answer, again: Answer
    ) -> None:
        if self._settings.same_answer and first[:2] != again[:2]:
            _fail(
                f"{request} took effect once, but its answers differ: {situation}, it got {first} "
                f"and then {again}",
                again,
            )

    def _request(self) -> Request:
        request = self._given() if callable(self._given) else self._given
        if not isinstance(request, Request):
            raise Misconfigured(
                f"request is {request!r}; it must be a coatcheck.testing.Request, or a function "
                "that returns one"
            )
        return request.with_header(self._settings.key_header, str(uuid.uuid4()))

    async def _read(self) -> _Reading:
        value = self._settings.effects()
        if inspect.isawaitable(value):
            value = await _awaited(value)
        if isinstance(value, numbers.Number):
            return _Reading(value)
        if isinstance(value, Sized):
            items = list(value) if isinstance(value, Sequence) else ()
            return _Reading(len(value), items)
        raise Misconfigured(
            f"effects() returned {value!r}; it must return a number or a collection"
        )


async def _awaited(value: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever `effects` returns
    return await value


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401 - numbers of any kind
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=_EXACT, abs_tol=_EXACT)
    return bool(one == other)


def _times(found: Any, one: Any) -> str:  # noqa: ANN401 - numbers of any kind
    ratio = found / one
    return f"{ratio:.0f} times" if _is_same(float(ratio), float(round(ratio))) else f"{found} times"


def _hint(request: Request, answer: Answer) -> str:
    """The usual reason why a request is doubled."""
    header = Policy().reference_header
    if header.lower() in answer.headers:
        return ""
    return (
        f"\n  the answer has no {header}: if the application has the middleware of coatcheck, that "
        f"guards no {request.method} request to this path"
    )


def _fail(words: str, answer: Answer) -> NoReturn:
    raise _Failed(words, answer)
