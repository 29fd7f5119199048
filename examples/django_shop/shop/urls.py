"""The URLs of the shop."""

from django.contrib import admin
from django.urls import path
from orders.views import Addresses, place_order, quote

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders", place_order),
    path("quotes", quote),
    path("addresses/<int:number>", Addresses.as_view()),
]
