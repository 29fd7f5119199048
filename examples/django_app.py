"""A Django site, guarded by one line of its `wsgi.py`.

Run it: gunicorn examples.django_app:application
"""

import json

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from coatcheck.server.wsgi import IdempotencyMiddleware

orders: list[dict[str, object]] = []


def create_order(request: HttpRequest) -> JsonResponse:
    """Take an order; each call of this function is an order that will be delivered."""
    order = {"number": len(orders) + 1, **json.loads(request.body)}
    orders.append(order)
    return JsonResponse(order, status=201)


urlpatterns = [path("orders", create_order)]

# A project has this in settings.py; only the last line belongs in wsgi.py.
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"])
application = IdempotencyMiddleware(get_wsgi_application(), store="sqlite:///orders.db")
