"""In front: whether anybody between the client and us may cancel the request.

Uvicorn does not when a client hangs up, and neither does what Starlette and FastAPI put before
every middleware. Where nobody else awaits us, a visit can run where it is. Anybody else may be a
timeout or a group of tasks, and then a visit needs a task of its own to outlive them (L11).
"""

from __future__ import annotations

import inspect
from types import CodeType, FrameType

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

# The code of those that were met, by its id: comparing code takes longer than all the rest.
_harmless_met: dict[int, CodeType] = {}


def may_be_cancelled() -> bool:
    """Somebody who awaits the caller may cancel it while the process lives on."""
    frame = inspect.currentframe()
    met = _harmless_met
    while frame is not None:
        frame = frame.f_back
        if frame is not None and id(frame.f_code) not in met:
            name = _name_of(frame)
            if name not in _HARMLESS:
                return name not in _SERVERS
            met[id(frame.f_code)] = frame.f_code
    return True


def _name_of(frame: FrameType) -> tuple[object, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_qualname
