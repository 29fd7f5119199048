"""FastAPI: a route's policy beside the route, and the operation as a parameter.

@app.post("/charges", status_code=201)
@idempotent(required=True, window="72h")
async def charge(body: Charge, operation: CurrentOperation): ...

payments = idempotent_router(APIRouter(prefix="/payments"), required=True)
"""

from __future__ import annotations

from typing import Annotated

from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.operation import AsyncOperation, Operation, current_operation
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.routes import idempotent, unclaimed_operation_of_request
from coatcheck.server.starlette_routes import extend_openapi, idempotent_router

try:
    from fastapi import Depends
except ImportError as error:
    raise MissingExtra("fastapi", "FastAPI") from error

__all__ = [
    "CurrentOperation",
    "CurrentSyncOperation",
    "IdempotencyMiddleware",
    "OptionalOperation",
    "extend_openapi",
    "idempotent",
    "idempotent_router",
]


async def _operation() -> Operation:
    operation = current_operation() or unclaimed_operation_of_request()
    if operation is None:
        raise Misconfigured(
            "this route asks for its operation, but the request is not guarded: add the "
            "IdempotencyMiddleware; and if the request has no key, write "
            "@idempotent(required=True), or ask for OptionalOperation"
        )
    return operation


async def _optional_operation() -> Operation | None:
    return current_operation()


# The operation of the request, as a parameter of an async endpoint: `operation: CurrentOperation`.
# On a request that is not guarded it raises `Misconfigured`, so make the key required there.
CurrentOperation = Annotated[AsyncOperation, Depends(_operation)]

# The same for an endpoint that is no coroutine function.
CurrentSyncOperation = Annotated[Operation, Depends(_operation)]

# The operation of the request, or None if it has no key: for routes whose key is optional.
OptionalOperation = Annotated[AsyncOperation | None, Depends(_optional_operation)]
