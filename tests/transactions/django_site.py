"""A site of Django's behind the middleware, in a process of its own: its settings are global.

Each line that it reads is a scene of the test's, as JSON; what came of it is printed, as JSON. Every
scene has a new process, a copy of one that has only imported what is needed, which takes longest.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
from contextlib import nullcontext
from typing import Any

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, JsonResponse
from django.test.utils import CaptureQueriesContext
from django.urls import path

from coatcheck import Policy
from coatcheck.server.wsgi import IdempotencyMiddleware

NAMES = ("place", "fail", "hook", "decline", "taken")
RUNS: list[str] = []
HOOKS: list[bool] = []


def place(request: HttpRequest) -> JsonResponse:
    """Write a row, and do what the number says beside it."""
    number = int(json.loads(request.body))
    RUNS.append(request.path)
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", (number,))
    transaction.on_commit(lambda: HOOKS.append(connection.in_atomic_block))
    if request.path == "/fail":
        raise ValueError("no")
    if request.path == "/decline":
        return JsonResponse({"error": "declined"}, status=402)
    if request.path == "/taken":
        return _take_again(number)
    if request.path == "/hook":
        transaction.on_commit(_fail)
    return JsonResponse({"number": number}, status=201)


def _take_again(number: int) -> JsonResponse:
    """Answer as a view that catches what its model raised, which marks the block for rollback."""
    try:
        with transaction.mark_for_rollback_on_error(), connection.cursor() as cursor:
            cursor.execute("insert into orders values (%s)", (number,))
    except IntegrityError:
        return JsonResponse({"error": "taken"}, status=409)
    raise AssertionError("it was written twice")


def _fail() -> None:
    raise OSError("the broker is away")


urlpatterns = [path(name, place) for name in NAMES]


def post(site: Any, where: str, number: int) -> int:
    """The status of the answer; the key is the number."""
    body = json.dumps(number).encode()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": where,
        "SCRIPT_NAME": "",
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(body)),
        "CONTENT_TYPE": "application/json",
        "HTTP_IDEMPOTENCY_KEY": f"order-{number}",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.url_scheme": "http",
    }
    started: list[str] = []
    body = site(environ, lambda status, *_: started.append(status))
    b"".join(body)
    if hasattr(body, "close"):
        body.close()
    return int(started[0][:3])


def play(scene: dict[str, Any]) -> dict[str, Any]:
    """Play *scene*: post each of its orders, every other time to another node."""
    settings.configure(
        DEBUG=scene.get("debug", False),
        DATABASES={"default": scene["database"]},
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="none",
    )
    django.setup()
    logging.disable()
    app = get_wsgi_application()
    policy = Policy(mode="transaction")
    sites = [
        IdempotencyMiddleware(
            app, store=scene["store"], policy=policy, transactions=lambda: connection
        )
        for _ in range(2)
    ]
    answers, is_open = [], []
    queries = CaptureQueriesContext(connection) if "is_captured" in scene else nullcontext([])
    with queries as captured:
        for turn, (where, number) in enumerate(scene["orders"]):
            answers.append(post(sites[turn % 2], where, number))
            is_open.append(connection.connection is not None)
        seen = {"queries": [query["sql"] for query in captured]}
    for site in sites:
        site.engine.close()
    return seen | {"answers": answers, "runs": RUNS, "hooks": HOOKS, "is_open": is_open}


def play_apart(line: str) -> None:
    """Play the scene of *line* in a new process."""
    if process := os.fork():
        os.waitpid(process, 0)
        return
    try:
        seen = play(json.loads(line))
    except Exception:  # noqa: BLE001 - the test raises it
        seen = {"failed": traceback.format_exc()}
    print(json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    for line in sys.stdin:
        play_apart(line)
