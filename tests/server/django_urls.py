"""The URLs of the project of the tests: every path belongs to the laws."""

from django.urls import path, re_path

from tests.server.laws.django_api import view

# The first two have a route of their own, because the template of a route is its label.
urlpatterns = [path("orders", view), path("refunds", view), re_path("", view)]
