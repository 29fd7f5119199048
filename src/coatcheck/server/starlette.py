"""Starlette: a route's policy beside the route.

    @idempotent(required=True, window="72h")
    async def charge(request): ...

    payments = idempotent_router(Mount("/payments", routes=[...]), required=True)

The operation of a request is `current_async_operation()`, in a sync endpoint
`current_operation()`, or `request.scope["coatcheck.operation"]`.
"""

from coatcheck.operation import current_async_operation, current_operation
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.routes import idempotent
from coatcheck.server.starlette_routes import idempotent_router

__all__ = [
    "IdempotencyMiddleware",
    "current_async_operation",
    "current_operation",
    "idempotent",
    "idempotent_router",
]
