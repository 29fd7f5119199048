"""Django: an app, a middleware, and a policy beside each view.

    INSTALLED_APPS += ["coatcheck.server.django"]
    MIDDLEWARE += ["coatcheck.server.django.IdempotencyMiddleware"]  # after authentication
    COATCHECK = {"store": "default", "policy": "payments"}

    @idempotent(required=True, window="72h")
    def charge(request): ...

Read in this order: `middleware` (what Django calls), `exchange` (a request of Django's on its way
through the WSGI or ASGI middleware), `site` (the engines of the process), `routes` (the policy of
a view), `callers` (the user), `refusals`, `settings` and `databases` (`settings.COATCHECK`).
`checks`, `admin`, `openapi` and `management` are for those who run the project.
"""

from __future__ import annotations

from coatcheck.errors import MissingExtra

try:
    import django  # noqa: F401 - only whether it is installed
except ImportError as error:
    raise MissingExtra("django", "Django") from error

from coatcheck.server.django.exchange import current_operation
from coatcheck.server.django.middleware import IdempotencyMiddleware
from coatcheck.server.django.site import get_engine
from coatcheck.server.routes import idempotent

__all__ = ["IdempotencyMiddleware", "current_operation", "get_engine", "idempotent"]
