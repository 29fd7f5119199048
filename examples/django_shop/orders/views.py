"""The views of the shop, each with its own policy."""

import json

from django.contrib.auth.decorators import login_required
from django.http import JsonResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from coatcheck.server.django import idempotent

from .models import Order


@csrf_exempt
def quote(request):
    return JsonResponse({"cents": 500}, status=201)


@csrf_exempt
@login_required
@idempotent(required=True, mode="transaction")
def place_order(request):
    item = json.loads(request.body)["item"]
    order = Order.objects.create(
        user=request.user, item=item, reference=request.coatcheck.reference
    )
    if item == "hat":
        return JsonResponse({"error": "hats are sold out"}, status=409)
    return JsonResponse({"number": order.pk, "item": item}, status=201)


@method_decorator(csrf_exempt, name="dispatch")
class Addresses(View):
    """The addresses of a user."""

    @idempotent(window="1h")
    def put(self, request, number):
        return JsonResponse({"address": number})

    @idempotent(methods=())  # never guarded
    def post(self, request, number):
        return JsonResponse({"found": [number]})
