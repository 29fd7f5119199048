"""In front: whether anybody between the client and us may cancel the request.

Uvicorn does not when a client hangs up, and neither does what Starlette and FastAPI put before
every middleware. Where nobody else awaits us, a visit can run where it is. Anybody else may be a
timeout or a group of tasks, and then a visit needs a task of its own to outlive them (L11).
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

# Servers that let a request go on when its client has gone. By module and name, as all below.
_SERVERS = frozenset(
    {
        ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle.run_asgi"),
        ("uvicorn.protocols.http.h11_impl", "RequestResponseCycle.run_asgi"),
    }
)
# Who awaits us and does no more. Who is not here is taken to cancel: that costs a task.
_HARMLESS = frozenset(
    {
        ("uvicorn.middleware.proxy_headers", "ProxyHeadersMiddleware.__call__"),
        ("starlette.applications", "Starlette.__call__"),
        ("starlette.middleware.errors", "ServerErrorMiddleware.__call__"),
        ("fastapi.applications", "FastAPI.__call__"),
        ("fastapi.telemetry._asgi", "ExceptionTelemetryMiddleware.__call__"),
        ("coatcheck.server.asgi", "IdempotencyMiddleware.__call__"),
        ("coatcheck.server.asgi", "IdempotencyMiddleware._guard"),
        ("coatcheck.server.asgi", "IdempotencyMiddleware._serve"),
        ("coatcheck.server.asgi_visit", "Visit.serve"),
    }
)
# `may_be_cancelled` itself, `Visit.serve` and the middleware's three steps before it: us.
_OUR_FRAMES = 5

# The code of those that were met, by its id, because comparing code takes longer than all the
# rest: whether it only awaits us. Kept with the code itself, so that no other gets its id.
_only_awaits: dict[int, bool] = {}
_met: list[CodeType] = []


def may_be_cancelled() -> bool:
    """Somebody who awaits `Visit.serve` may cancel it while the process lives on."""
    # A frame, until there is none: that ends in an error. To look at one takes a while.
    frame: Any = sys._getframe(_OUR_FRAMES)  # noqa: SLF001 - as `inspect` does it
    try:
        while _only_awaits[id(frame.f_code)]:
            frame = frame.f_back
    except KeyError:
        return _may_be_cancelled_by(frame)
    except AttributeError:  # nobody is left to ask
        return True
    return False


def _may_be_cancelled_by(frame: FrameType | None) -> bool:
    """The same, of somebody who was not met before."""
    while frame is not None:
        name = (frame.f_globals.get("__name__"), frame.f_code.co_qualname)
        is_server = name in _SERVERS
        if not is_server and name not in _HARMLESS:
            return True
        _met.append(frame.f_code)
        _only_awaits[id(frame.f_code)] = not is_server
        if is_server:
            return False
        frame = frame.f_back
    return True
