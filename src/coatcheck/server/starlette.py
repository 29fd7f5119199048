"""Starlette: a route's policy beside the route.

    @idempotent(required=True, window="72h")
    async def charge(request): ...

The operation of a request is `current_async_operation()`, in a sync endpoint
`current_operation()`, or `request.scope["coatcheck.operation"]`.
"""

from coatcheck.operation import current_async_operation, current_operation
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.routes import idempotent

__all__ = ["IdempotencyMiddleware", "current_async_operation", "current_operation", "idempotent"]
