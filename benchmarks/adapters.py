"""How much does the integration of a framework add to the middleware that it is built on?

Each framework serves the same route twice in this process, on the memory store and without a
server: once with the bare middleware, and once as its page in the docs says, with a marked route.
Requests alternate between both, and the ratio is computed within each round.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import django
import flask
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from fastapi import FastAPI
from fastapi import Request as FastApiRequest
from litestar import Litestar, post
from litestar import Request as LitestarRequest
from litestar.middleware import DefineMiddleware

from benchmarks import asgi_requests
from benchmarks.asgi_requests import BODY
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Figures, Table, Target
from coatcheck import AsyncEngine, Engine
from coatcheck.server import asgi, wsgi
from coatcheck.server import django as on_django
from coatcheck.server import fastapi as on_fastapi
from coatcheck.server import flask as on_flask
from coatcheck.server import litestar as on_litestar
from coatcheck.server.routes import OnePolicy

ROUNDS, ROUNDS_QUICK = 60, 20
# Short rounds: a disturbance of the machine then affects both parts of a ratio, or few ratios.
REQUESTS = 100
ADAPTER_MAX = 1.10  # of a request to the same application behind the bare middleware

PLACED = {"id": 1, "amount": 20, "state": "placed"}
OF = f"{TIMES} the middleware"
Send: TypeAlias = Callable[[Iterator[int]], float]


class Pair(NamedTuple):
    """One framework: behind the bare middleware, and with its own integration."""

    bare: Send
    adapted: Send


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    rounds = ROUNDS_QUICK if quick else ROUNDS
    rows = []
    with asyncio.Runner() as runner:
        pairs = {
            "FastAPI": Pair(*(_of_asgi(runner, app) for app in (_fastapi_bare(), _fastapi()))),
            "Litestar": Pair(*(_of_asgi(runner, app) for app in (_litestar_bare(), _litestar()))),
            "Flask": Pair(*(_of_wsgi(app) for app in (_flask_bare(), _flask()))),
            "Django": _django(),
        }
        new, replayed = _measure(pairs, rounds)
    for what, found in (("a new key", new), ("a replay", replayed)):
        for name, (bare, adapted) in found.items():
            ratio = adapted.over(bare)
            columns = {"middleware, µs": bare, "integration, µs": adapted, OF: ratio}
            target = Target(measured=ratio, bound="≤", limit=ADAPTER_MAX, unit=OF)
            rows.append(Figures(what=f"{what}, {name}", columns=columns, targets=[target]))
    return Table(
        name="adapters",
        question="processor time of a guarded request in process, on the memory store",
        rows=rows,
        head=("", "middleware, µs", "integration, µs", OF),
        notes=[
            "middleware: without marks, added as the framework documents it for any middleware",
            "integration: a marked route, and the plugin, extension or middleware of the framework",
            "Django: a replay by the bare middleware does not reach Django's handler",
        ],
    )


Found: TypeAlias = dict[str, tuple[Samples, Samples]]


def _measure(pairs: Mapping[str, Pair], rounds: int) -> tuple[Found, Found]:
    senders = {(name, at): send for name, pair in pairs.items() for at, send in enumerate(pair)}
    places = list(senders)
    new: dict[tuple[str, int], list[float]] = {place: [] for place in places}
    replayed: dict[tuple[str, int], list[float]] = {place: [] for place in places}
    numbers = itertools.count()
    for send in senders.values():
        send(itertools.islice(numbers, REQUESTS))
    for number in range(rounds):
        first = number // 2 % len(places)
        # Backwards in every other round: of two turns of a framework the second one is the faster.
        turns = (places[first:] + places[:first])[:: -1 if number % 2 else 1]
        keys = list(itertools.islice(numbers, REQUESTS))
        for found in (new, replayed):  # the same keys: the second time they are replays
            for place in turns:
                found[place].append(senders[place](iter(keys)))
    return _samples(pairs, new), _samples(pairs, replayed)


def _samples(pairs: Mapping[str, Pair], found: dict[tuple[str, int], list[float]]) -> Found:
    return {
        name: (Samples(tuple(found[name, 0])), Samples(tuple(found[name, 1]))) for name in pairs
    }


# --- the applications -----------------------------------------------------------------------


def _fastapi_bare() -> Any:  # noqa: ANN401 - any ASGI application
    app = FastAPI()
    app.add_middleware(
        asgi.IdempotencyMiddleware, engine=AsyncEngine("memory://"), routes=OnePolicy
    )
    app.post("/orders", status_code=201)(_fastapi_place)
    return app


def _fastapi() -> Any:  # noqa: ANN401 - any ASGI application
    app = FastAPI()
    app.add_middleware(asgi.IdempotencyMiddleware, engine=AsyncEngine("memory://"))
    app.post("/orders", status_code=201)(on_fastapi.idempotent(required=True)(_fastapi_place))
    return app


async def _fastapi_place(request: FastApiRequest) -> dict[str, Any]:
    await request.json()
    return PLACED


def _litestar_bare() -> Any:  # noqa: ANN401 - any ASGI application
    middleware = DefineMiddleware(
        asgi.IdempotencyMiddleware, engine=AsyncEngine("memory://"), routes=OnePolicy
    )
    handler = post("/orders")(_litestar_place)
    return Litestar([handler], middleware=[middleware], logging_config=None)


def _litestar() -> Any:  # noqa: ANN401 - any ASGI application
    handler = post("/orders")(on_litestar.idempotent(required=True)(_litestar_place))
    plugin = on_litestar.IdempotencyPlugin(engine=AsyncEngine("memory://"))
    return Litestar([handler], plugins=[plugin], logging_config=None)


async def _litestar_place(request: LitestarRequest[Any, Any, Any]) -> dict[str, Any]:
    await request.json()
    return PLACED


def _flask_bare() -> Any:  # noqa: ANN401 - any WSGI application
    app = flask.Flask("bare")
    app.add_url_rule("/orders", "place", _flask_place, methods=["POST"])
    return wsgi.IdempotencyMiddleware(app.wsgi_app, engine=Engine("memory://"))


def _flask() -> Any:  # noqa: ANN401 - any WSGI application
    app = flask.Flask("marked")
    on_flask.Coatcheck(app, engine=Engine("memory://"))
    view = on_flask.idempotent(required=True)(_flask_place)
    app.add_url_rule("/orders", "place", view, methods=["POST"])
    return app.wsgi_app


def _flask_place() -> tuple[dict[str, Any], int]:
    flask.request.get_json()
    return PLACED, 201


def _django() -> Pair:
    """Django behind the bare middleware, and with its own; both have the same settings."""
    marked = on_django.idempotent(required=True)(_django_place)
    settings.configure(
        ALLOWED_HOSTS=["*"],
        INSTALLED_APPS=["coatcheck.server.django"],
        MIDDLEWARE=[],
        COATCHECK={"store": "memory://"},
        ROOT_URLCONF=(path("orders", _django_place), path("marked", marked)),
    )
    django.setup()
    bare = wsgi.IdempotencyMiddleware(WSGIHandler(), engine=Engine("memory://"))
    settings.MIDDLEWARE = ["coatcheck.server.django.IdempotencyMiddleware"]
    return Pair(_of_wsgi(bare), _of_wsgi(WSGIHandler(), "/marked"))


def _django_place(request: HttpRequest) -> HttpResponse:
    json.loads(request.body)
    return JsonResponse(PLACED, status=201)


# --- sending --------------------------------------------------------------------------------


def _of_asgi(runner: asyncio.Runner, app: Any) -> Send:  # noqa: ANN401 - any ASGI application
    return lambda keys: runner.run(asgi_requests.send(app, keys))


def _of_wsgi(app: Any, path: str = "/orders") -> Send:  # noqa: ANN401 - any WSGI application
    def send(keys: Iterator[int]) -> float:
        """Send a request for each of *keys*; µs of processor time for each."""
        environs = [_environ(key, path) for key in keys]
        started_s = time.process_time()
        for environ in environs:
            returned = app(environ, _start_response)
            b"".join(returned)
            getattr(returned, "close", _nothing)()
        return (time.process_time() - started_s) / len(environs) * 1e6

    return send


def _environ(key: int, path: str) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "127.0.0.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(BODY)),
        "HTTP_IDEMPOTENCY_KEY": f"order-{key}",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(BODY),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }


def _start_response(_status: str, _headers: list[tuple[str, str]], _error: object = None) -> Any:  # noqa: ANN401 - the write function
    return _nothing


def _nothing(*_arguments: object) -> None:
    pass
