"""Observe mode over ASGI: requests pass untouched, and what they would have got is reported."""

from __future__ import annotations

import logging
from typing import Protocol

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem
from coatcheck.operation import enter, leave
from coatcheck.server.asgi.request import App, AsgiScope, Message, Receive, Send, request_of
from coatcheck.server.body import MEMORY_BYTES_MAX
from coatcheck.server.observe import (
    NOT_OBSERVED,
    Observations,
    ObservedRequest,
    give_body,
    refusal_of_length,
    unclaimed_operation,
)
from coatcheck.server.request import fields_of
from coatcheck.server.routes import Unclaimed
from coatcheck.server.routes import found as note_found

logger = logging.getLogger("coatcheck")


class Middleware(Protocol):
    """What an observed ASGI request needs of its middleware."""

    app: App
    observations: Observations


async def serve_observed(
    middleware: Middleware,
    asgi_scope: AsgiScope,
    receive: Receive,
    send: Send,
    found: tuple[Policy, str | None],
) -> None:
    """Pass a request on, and observe it; *found*: its policy and the template of its route."""
    received: list[Message] = []
    observed = None
    try:
        observed = await _begin(middleware.observations, asgi_scope, receive, received, found)
    except Exception:  # whatever it is, the request runs
        logger.exception(NOT_OBSERVED)

    async def receive_again() -> Message:
        return received.pop(0) if received else await receive()

    if observed is None:
        if "coatcheck.operation" not in asgi_scope:
            attempts, policy = middleware.observations.attempts, found[0]
            label = f"{asgi_scope['method']} {found[1] or asgi_scope['path']}"
            # Its handler may ask for an operation, and must not fail then.
            note_found(Unclaimed(lambda: unclaimed_operation(attempts, label, policy)))
        await middleware.app(asgi_scope, receive_again, send)
        return

    async def watch(message: Message) -> None:
        if message["type"] == "http.response.start":
            observed.status = message["status"]
        await send(message)

    asgi_scope["coatcheck.operation"] = observed.operation
    entered, error = enter(observed.operation), None
    try:
        await middleware.app(asgi_scope, receive_again, watch)
    except BaseException as raised:
        error = raised
        raise
    finally:
        leave(entered)
        middleware.observations.end(observed, error)


async def _begin(
    observations: Observations,
    asgi_scope: AsgiScope,
    receive: Receive,
    received: list[Message],
    found: tuple[Policy, str | None],
) -> ObservedRequest | None:
    """Begin to observe a request; what was read of its body is added to *received*."""
    policy, template = found
    values = [value for name, value in asgi_scope["headers"] if name == policy.key_name]
    guard = observations.guard
    key = guard.key_of(values, policy)
    if "coatcheck.operation" in asgi_scope or (key is None and not guard.has_natural_keys):
        return None
    fields = fields_of(asgi_scope["headers"])
    request = request_of(asgi_scope, fields, b"")
    declared = fields.get(b"content-length", b"")
    length = int(declared[:20]) if declared.isdigit() else None
    checked = refusal_of_length(length, policy) or key
    if isinstance(checked, Problem):
        observations.would_refuse(checked, request, template)
        return None
    key = checked
    body = None
    if length is None or length <= MEMORY_BYTES_MAX:
        body = await _small_body(receive, received)
    if not give_body(observations, request, found, key, body=body, length=length):
        return None
    if guard.caller is not None:
        try:
            await guard.identify_on_loop(request)
        except Exception as error:  # noqa: BLE001 - a refusal, or raised again
            observations.would_refuse_caller(error, request, found)
            return None
    return observations.begin(request, policy, template, key)


async def _small_body(receive: Receive, received: list[Message]) -> bytes | None:
    """The whole body; None if it is too large to be read in advance, or the client left."""
    size = 0
    while size <= MEMORY_BYTES_MAX:
        message = await receive()
        received.append(message)
        if message["type"] != "http.request":
            return None
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(one.get("body", b"") for one in received)
    return None
