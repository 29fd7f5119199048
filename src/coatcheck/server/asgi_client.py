"""The client's side of a visit: answered once, now or with the word to ask later (L10).

A client is told to ask later when the handler says so (`operation.accept`), when its own patience
is at an end (`Prefer: respond-async`), or when the work was handed over. From then on it is not
there any more, for the visit that goes on; and whoever has awaited the visit is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from coatcheck.core.policy import Policy
from coatcheck.core.replay import Response
from coatcheck.engine import AsyncEngine
from coatcheck.engine.held import Held
from coatcheck.engine.resuming import hand_over_async
from coatcheck.server.asgi_input import App, Rewound, Send
from coatcheck.server.counter import Counter
from coatcheck.server.request import Request
from coatcheck.server.status import patience_of

# In this process, because an event loop alone does not keep a task alive.
_TELLING: set[asyncio.Task[None]] = set()


class Guard(Protocol):
    """What a visit needs of the middleware that it comes through."""

    app: App
    engine: AsyncEngine
    counter: Counter


class ClientSide(Rewound):
    """Whoever waits for the answer of one guarded request, and has said all of it already."""

    # Slots, and no defaults in the class: the interpreter is quick at nothing else.
    __slots__ = (
        *("_client_send", "_done", "_held", "_is_accepted", "_is_handed_over", "_is_settled"),
        *("_loop", "_patience_s", "_patient", "_policy", "_request", "_timer", "guard"),
    )

    _held: Held
    _loop: asyncio.AbstractEventLoop

    def __init__(self, guard: Guard, request: Request, send: Send, policy: Policy) -> None:
        self._body = request.body
        self._messages = None
        self.guard = guard
        self._request = request
        self._client_send = send
        self._policy = self._patient = policy
        self._patience_s: int | None = None
        if policy.in_flight == "202":
            self._patience_s, self._patient = patience_of(request, policy)
        # Whether the end of the claim is being written, with an answer that follows it.
        self._is_settled = False
        # Whether the client was told to ask later, and whether somebody else finds the answer.
        self._is_accepted = False
        self._is_handed_over = False
        self._done: asyncio.Future[None] | None = None  # awaited by whoever began the visit
        self._timer: asyncio.TimerHandle | None = None

    async def _respond(self, response: Response) -> None:
        """Answer the client, unless it was told to ask later."""
        if not self._is_accepted:
            await respond(self._client_send, response)

    async def _be_patient(self, left_s: float) -> None:
        """Do as the client prefers: tell it to ask later if there is no answer by then."""
        if left_s == 0:
            await self._accept()
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._lose_patience)

    def _lose_patience(self) -> None:
        self._timer = None
        telling = asyncio.get_running_loop().create_task(self._accept())
        _TELLING.add(telling)
        telling.add_done_callback(_TELLING.discard)

    def _stop_waiting(self) -> None:
        """The visit is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- for the handler ----------------------------------------------------------------------

    def accept(self) -> Any:  # noqa: ANN401 - None, awaited where that has to be
        """Tell the client to ask later; from the event loop to be awaited, from a thread not."""
        return self._from_anywhere(self._accept())

    def hand_over(self, lease_ms: int | None) -> Any:  # noqa: ANN401 - the text, awaited as above
        """Let somebody else find the answer."""
        return self._from_anywhere(self._hand_over(lease_ms or self._policy.lease_ms))

    def _from_anywhere(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - its result
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:  # a thread in which a framework runs handlers that may block
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        if running is self._loop:
            return coroutine
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _accept(self) -> None:
        """Answer 202, and go on without the client; nothing if its answer is on its way."""
        if self._is_settled or self._is_accepted:
            return
        accepted = self._accepted()
        self._is_accepted = True
        try:
            with suppress(OSError):  # it is gone already
                await respond(self._client_send, accepted)
        finally:
            if self._done is not None and not self._done.done():
                self._done.set_result(None)

    def _accepted(self) -> Response:
        return self.guard.counter.accepted(self._held.claim, self._policy, self._request)

    async def _hand_over(self, lease_ms: int) -> str:
        text = await hand_over_async(self.guard.engine, self._held, lease_ms)
        self._is_handed_over = True
        return text


async def respond(send: Send, response: Response) -> None:
    """Send *response*."""
    status, headers, body = response
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
