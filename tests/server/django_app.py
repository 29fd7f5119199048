"""A guarded Django project for real servers; its effects are lines in a file and rows in a table.

`python -m tests.server.django_app FD` is `manage.py runserver`, on a listening socket of the test's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

from django.conf import settings

from tests.support.django_project import project_settings
from tests.support.times import WAIT_S_MAX

DIRECTORY = Path(os.environ["SHOP_DIRECTORY"])
DATABASE = DIRECTORY / "orders.db"

if not settings.configured:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(DATABASE)}
    middleware = ["coatcheck.server.django.IdempotencyMiddleware"]
    settings.configure(
        **project_settings(
            database,
            ROOT_URLCONF="tests.server.django_app",
            MIDDLEWARE=middleware,
            INSTALLED_APPS=["coatcheck.server.django"],
            COATCHECK={"store": os.environ.get("SHOP_STORE", "default")},
        )
    )

from django.core.asgi import get_asgi_application  # noqa: E402 - settings come first
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402

from coatcheck.server.django import idempotent  # noqa: E402


def pid(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(os.getpid()))


def note(request: HttpRequest) -> None:
    with (DIRECTORY / "effects").open("a") as effects:
        effects.write(f"{request.path} {request.coatcheck.key}\n")


def is_released(request: HttpRequest) -> bool:
    return (DIRECTORY / f"release-{request.coatcheck.key}").exists()


@idempotent(required=True)
def place(request: HttpRequest) -> HttpResponse:
    note(request)
    deadline = time.monotonic() + WAIT_S_MAX
    while request.path != "/orders" and not is_released(request):
        assert time.monotonic() < deadline, "no test released this"
        time.sleep(0.005)
    return HttpResponse("placed", status=201)


@idempotent(required=True)
async def place_async(request: HttpRequest) -> HttpResponse:
    note(request)
    async with asyncio.timeout(WAIT_S_MAX):
        while not is_released(request):  # noqa: ASYNC110 - a file of the test's
            await asyncio.sleep(0.005)
    return HttpResponse("placed", status=201)


@idempotent(required=True, mode="transaction")
def place_in_transaction(request: HttpRequest) -> HttpResponse:
    with connection.cursor() as cursor:
        cursor.execute("insert into orders (name) values (%s)", [request.coatcheck.key])
    return place.__wrapped__(request)


urlpatterns = [
    path("pid", pid),
    path("orders", place),
    path("slow", place),
    path("slow-async", place_async),
    path("transaction", place_in_transaction),
]


def create_table() -> None:
    with closing(sqlite3.connect(DATABASE, timeout=WAIT_S_MAX)) as created:
        created.execute("create table if not exists orders (name text primary key)")


def run_server(fd: int) -> None:
    """`manage.py runserver`."""
    from django.core.management import execute_from_command_line
    from django.core.management.commands.runserver import Command
    from django.core.servers.basehttp import WSGIServer

    class OnGivenSocket(WSGIServer):
        def server_bind(self) -> None:
            self.socket.close()
            self.socket = socket.socket(fileno=fd)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = self.server_address
            self.setup_environ()

    Command.server_cls = OnGivenSocket
    execute_from_command_line(["manage.py", "migrate", "--verbosity=0"])
    execute_from_command_line(["manage.py", "runserver", "--noreload", "127.0.0.1:1"])


create_table()
if __name__ == "__main__":
    run_server(int(sys.argv[1]))
elif os.environ["SHOP_FLAVOUR"] == "asgi":
    asgi_app = get_asgi_application()
else:
    wsgi_app = get_wsgi_application()
