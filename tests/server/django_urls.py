"""The URLs of the project of the tests: every path belongs to the laws."""

from django.urls import re_path

from tests.server.laws.django_api import view

urlpatterns = [re_path("", view)]
