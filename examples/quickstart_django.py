import json

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    SECRET_KEY="for this page only",
    INSTALLED_APPS=["coatcheck.server.django"],
    MIDDLEWARE=["coatcheck.server.django.IdempotencyMiddleware"],
    COATCHECK={"store": "sqlite:///orders.db"},
)
orders = []


def place(request):
    orders.append(json.loads(request.body))
    return JsonResponse({"number": len(orders), **orders[-1]}, status=201)


urlpatterns = [path("orders", place)]
application = get_wsgi_application()
