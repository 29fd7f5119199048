"""The views of a Django project, with marks wherever they may be; each call is noted in `CALLS`."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from drf_spectacular.views import SpectacularAPIView
from rest_framework import serializers
from rest_framework.authentication import TokenAuthentication
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import APIException
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from coatcheck.server.django import current_operation, idempotent

CALLS: list[Any] = []
HOOKS: list[bool] = []


def called(request: Any) -> int:
    CALLS.append(request.path)
    return len(CALLS)


def plain(request: HttpRequest) -> JsonResponse:
    operation = request.coatcheck
    assert operation is current_operation()
    reference = None if operation is None else operation.reference
    answer = {"number": called(request), "reference": reference}
    return JsonResponse(answer, status=201)


@idempotent(required=True)
def function(request: HttpRequest) -> JsonResponse:
    return plain(request)


@login_required
@idempotent(required=True)
def members(request: HttpRequest) -> JsonResponse:
    return plain(request)


@idempotent(lease="1h")
def contradiction(request: HttpRequest) -> JsonResponse:
    """Its lease may be longer than the window of the project."""
    return plain(request)


@idempotent(required=True)
async def coroutine(request: HttpRequest) -> JsonResponse:
    return plain(request)


@idempotent(required=True)
class OnClass(View):
    def post(self, request: HttpRequest) -> JsonResponse:
        return plain(request)


class OnMethod(View):
    @idempotent(required=True)
    def post(self, request: HttpRequest) -> JsonResponse:
        return plain(request)

    def put(self, request: HttpRequest) -> JsonResponse:
        return plain(request)


class OnAsyncMethod(View):
    @idempotent(required=True)
    async def post(self, request: HttpRequest) -> JsonResponse:
        return plain(request)


@method_decorator(idempotent(required=True), name="dispatch")
class OnDispatch(View):
    def post(self, request: HttpRequest) -> JsonResponse:
        return plain(request)


@method_decorator(idempotent(required=True), name="post")
class DecoratedMethod(View):
    def post(self, request: HttpRequest) -> JsonResponse:
        return plain(request)


# --- the Django REST framework ---------------------------------------------------------------


class Order(serializers.Serializer):
    item = serializers.CharField(max_length=10)


@api_view(["POST"])
@idempotent(required=True)
def under_api_view(request: Request) -> Response:
    return Response({"number": called(request)}, status=201)


@idempotent(required=True)
@api_view(["POST"])
def over_api_view(request: Request) -> Response:
    return Response({"number": called(request)}, status=201)


class ModelOfCreate:
    """A mixin, as those of DRF are."""

    def create(self, request: Request) -> Response:
        called(request)
        order = Order(data=request.data)
        order.is_valid(raise_exception=True)
        return Response({"number": len(CALLS)}, status=201)


class Orders(ViewSet):
    serializer_class = Order

    @idempotent(required=True)
    def create(self, request: Request) -> Response:
        called(request)
        order = Order(data=request.data)
        order.is_valid(raise_exception=True)
        return Response({"number": len(CALLS), **order.data}, status=201)

    def update(self, request: Request, pk: str) -> Response:
        return Response({"number": called(request)})

    @action(detail=True, methods=["post"])
    @idempotent(required=True)
    def pay(self, request: Request, pk: str) -> Response:
        return Response({"number": called(request)}, status=201)

    @idempotent(required=True)
    @action(detail=True, methods=["post"])
    def ship(self, request: Request, pk: str) -> Response:
        return Response({"number": called(request)}, status=201)


@idempotent(required=True)
class MarkedOrders(ModelOfCreate, ViewSet):
    """Its handlers are inherited, its own, and an action."""

    serializer_class = Order

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, pk: str) -> Response:
        return Response({"number": called(request)}, status=201)


@method_decorator(idempotent(required=True), name="create")
class DecoratedOrders(ModelOfCreate, ViewSet):
    serializer_class = Order


class TooPoor(APIException):
    status_code = 402


class Restricted(APIView):
    authentication_classes = (TokenAuthentication,)
    permission_classes = (IsAuthenticated,)

    @idempotent(required=True)
    def post(self, request: Request) -> Response:
        return Response({"number": called(request)}, status=201)


class Refusing(APIView):
    @idempotent(required=True)
    def post(self, request: Request) -> Response:
        called(request)
        if "fail" in request.query_params:
            raise ValueError("of the view")
        raise TooPoor


# --- bodies ----------------------------------------------------------------------------------


def stream(request: HttpRequest) -> StreamingHttpResponse:
    called(request)
    size = int(request.GET["size"])
    chunks = [b"%d," % len(CALLS), b"x" * size, b"the end"]
    if hasattr(request, "scope"):
        return StreamingHttpResponse(_one_by_one(chunks), content_type="text/plain")
    return StreamingHttpResponse(chunks, content_type="text/plain")


async def _one_by_one(chunks: list[bytes]) -> Any:
    for chunk in chunks:
        yield chunk


def upload(request: HttpRequest) -> JsonResponse:
    called(request)
    answer = {"size": request.FILES["file"].size, "item": request.POST["item"]}
    response = JsonResponse(answer, status=201)
    response.set_cookie("seen", "1")
    return response


def fails(request: HttpRequest) -> JsonResponse:
    called(request)
    raise ValueError("of the view")


async def accepted(request: HttpRequest) -> JsonResponse:
    """Answer 202, and go on; over ASGI only."""
    await request.coatcheck.accept()
    called(request)
    return JsonResponse({"number": len(CALLS)}, status=201)


def deferred(request: HttpRequest) -> HttpResponse:
    """Leave the work to a worker."""
    CALLS.append(request.coatcheck.defer())
    return HttpResponse(status=202)


# --- transactions ----------------------------------------------------------------------------


def database() -> Any:
    return connections[settings.COATCHECK["store"]]


def write(request: HttpRequest) -> None:
    called(request)
    with database().cursor() as cursor:
        cursor.execute("insert into orders values (%s)", (json.loads(request.body)["number"],))
        for other in json.loads(request.body).get("others", ()):
            with connections[other].cursor() as beside:
                beside.execute("insert into orders values (1)")
    using = database().alias
    transaction.on_commit(lambda: HOOKS.append(database().in_atomic_block), using=using)


def answer(request: HttpRequest) -> HttpResponse:
    """Write a row, and end as the path says."""
    write(request)
    match request.path.rpartition("/")[2]:
        case "missing":
            raise Http404
        case "denied":
            raise PermissionDenied
        case "failed":
            raise ValueError("of the view")
        case "declined" | "kept":
            return JsonResponse({}, status=402)
        case "inner":
            with transaction.atomic(using=database().alias):
                return JsonResponse({}, status=201)
    return JsonResponse({}, status=201)


class Poor(APIView):
    @idempotent(mode="transaction")
    def post(self, request: Request) -> Response:
        write(request._request)
        raise TooPoor


in_transaction = idempotent(mode="transaction")(answer)
kept = idempotent(mode="transaction", commit="kept")(answer)


@idempotent(mode="transaction")
async def async_in_transaction(request: HttpRequest) -> HttpResponse:
    from asgiref.sync import sync_to_async

    return await sync_to_async(answer)(request)


ENDS = ("placed", "missing", "denied", "failed", "declined", "inner")

router = DefaultRouter()
router.register("orders", Orders, basename="orders")
router.register("marked", MarkedOrders, basename="marked")
router.register("decorated", DecoratedOrders, basename="decorated")

urlpatterns = [
    path("admin/", admin.site.urls),
    path("schema", SpectacularAPIView.as_view()),
    path("plain", plain),
    path("function", function),
    path("members", members),
    path("contradiction", contradiction),
    path("coroutine", coroutine),
    path("on-class", OnClass.as_view()),
    path("on-method", OnMethod.as_view()),
    path("on-async-method", OnAsyncMethod.as_view()),
    path("on-dispatch", OnDispatch.as_view()),
    path("decorated-method", DecoratedMethod.as_view()),
    path("under-api-view", under_api_view),
    path("over-api-view", over_api_view),
    path("restricted", Restricted.as_view()),
    path("refusing", Refusing.as_view()),
    path("stream", stream),
    path("upload", upload),
    path("fails", fails),
    path("accepted", accepted),
    path("deferred", deferred),
    path("tx/poor", Poor.as_view()),
    path("tx/kept", kept),
    path("tx/async", async_in_transaction),
    *(path(f"tx/{end}", in_transaction) for end in ENDS),
    path("", include(router.urls)),
]
