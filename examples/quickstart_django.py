import json

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

from coatcheck.server.wsgi import IdempotencyMiddleware

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="for this page only")
orders = []


def place(request):
    orders.append(json.loads(request.body))
    return JsonResponse({"number": len(orders), **orders[-1]}, status=201)


urlpatterns = [path("orders", place)]
application = IdempotencyMiddleware(get_wsgi_application(), store="sqlite:///orders.db")
