"""Detaching: whether a request must run in a task of its own, because it may be cancelled.

Uvicorn does not cancel a request when its client hangs up, and neither does what Starlette and
FastAPI put before every middleware. If only these await us, an exchange can run where it is. Any
other caller may be a timeout or a task group that cancels; then an exchange needs a task of its
own, so that it ends in spite of that.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

# Servers that do not cancel a request when its client hangs up; by module and qualified name.
_SERVERS = frozenset(
    {
        ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle.run_asgi"),
        ("uvicorn.protocols.http.h11_impl", "RequestResponseCycle.run_asgi"),
    }
)
# Functions that only await us. Any other is assumed to cancel, which costs a task.
_HARMLESS = frozenset(
    {
        ("uvicorn.middleware.proxy_headers", "ProxyHeadersMiddleware.__call__"),
        ("starlette.applications", "Starlette.__call__"),
        ("starlette.middleware.errors", "ServerErrorMiddleware.__call__"),
        ("fastapi.applications", "FastAPI.__call__"),
        ("fastapi.telemetry._asgi", "ExceptionTelemetryMiddleware.__call__"),
        ("coatcheck.server.asgi", "IdempotencyMiddleware.__call__"),
    }
)
# Our own: `may_be_cancelled` and `IdempotencyMiddleware.__call__`.
_OUR_FRAMES = 2

# Whether a code object only awaits us, by its id: comparing code objects takes longer than
# everything else here. The objects are kept, so that no other gets the same id.
_only_awaits: dict[int, bool] = {}
_met: list[CodeType] = []


def may_be_cancelled() -> bool:
    """A caller of the middleware may cancel it while the process lives on."""
    # A frame, until there is none, which ends in an AttributeError.
    frame: Any = sys._getframe(_OUR_FRAMES)  # noqa: SLF001 - as `inspect` does it
    try:
        while _only_awaits[id(frame.f_code)]:
            frame = frame.f_back
    except KeyError:
        return _may_be_cancelled_by(frame)
    except AttributeError:  # no caller is left, and no server was among them
        return True
    return False


def _may_be_cancelled_by(frame: FrameType | None) -> bool:
    """The same, for a caller that was not seen before."""
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
