"""How much does telemetry add to a guarded request?

Over HTTP, each contender is a uvicorn worker, as in `http.py`, and its processor time is measured.
In process, the middleware runs without a server: this shows smaller differences. Each contender has
an engine of its own on the memory store. Requests alternate between contenders in small groups, and
the ratio is computed within each round.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.asgi_requests import send
from benchmarks.exporters import EXPORTERS
from benchmarks.http import SLOT, SLOT_QUICK, Turn, servers_of
from benchmarks.machine import pinned
from benchmarks.measuring import Samples, interleave
from benchmarks.report import TIMES, Figures, Table, Target
from coatcheck import AsyncEngine
from coatcheck.server.asgi import IdempotencyMiddleware

ROUNDS, ROUNDS_QUICK = 60, 20
# Short rounds: a disturbance of the machine then affects both parts of a ratio, or few ratios.
REQUESTS = 200
HTTP_ROUNDS, HTTP_ROUNDS_QUICK = 21, 5
HTTP_KINDS = {"new": "a new key", "replay": "a replay"}
TELEMETRY_MAX = 1.05  # of a request without telemetry, for TARGETED
TARGETED = "Prometheus"

OF = f"{TIMES} without telemetry"


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    rounds = ROUNDS_QUICK if quick else ROUNDS
    over_http = _measure_http(quick=quick)
    new, replayed = asyncio.run(_measure(rounds))
    rows = [
        row for what, found in over_http.items() for row in _rows(f"HTTP, {what}", found, TARGETED)
    ]
    rows += _rows("in process, a new key", new)
    rows += _rows("in process, a replay", replayed)
    return Table(
        name="telemetry",
        question="processor time of a guarded request, on the memory store",
        rows=rows,
        head=("", "without, µs", "with, µs", OF),
        notes=[
            "a Starlette application with one route; HTTP: one uvicorn worker, 64 connections",
            "OpenTelemetry: with its SDK, which keeps one of a hundred traces",
        ],
    )


def _rows(what: str, found: dict[str, Samples], targeted: str = "") -> list[Figures]:
    bare = found["without"]
    rows = []
    for name in list(found)[1:]:
        ratio = found[name].over(bare)
        target = Target(measured=ratio, bound="≤", limit=TELEMETRY_MAX, unit=OF)
        rows.append(
            Figures(
                what=f"{what}, {name}",
                columns={"without, µs": bare, "with, µs": found[name], OF: ratio},
                targets=[target] if name == targeted else (),
            )
        )
    return rows


def _measure_http(*, quick: bool) -> dict[str, dict[str, Samples]]:
    """Processor time of the server for one request, by kind of request and contender."""
    slot = SLOT_QUICK if quick else SLOT
    pairs = [(name, "memory") for name in EXPORTERS]
    with servers_of(pairs, {"memory": "memory://"}) as servers, pinned("last"):
        turns = {
            (kind, name): Turn(servers[name, "memory"], kind, slot)
            for kind in HTTP_KINDS
            for name in EXPORTERS
        }
        named = {" ".join(key): turn for key, turn in turns.items()}
        interleave(named, HTTP_ROUNDS_QUICK if quick else HTTP_ROUNDS)
    return {
        what: {name: Samples(tuple(turns[kind, name].cpu_us)) for name in EXPORTERS}
        for kind, what in HTTP_KINDS.items()
    }


async def _measure(rounds: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    apps = {name: _app(instrument) for name, instrument in EXPORTERS.items()}
    names = list(apps)
    new: dict[str, list[float]] = {name: [] for name in names}
    replayed: dict[str, list[float]] = {name: [] for name in names}
    numbers = itertools.count()
    for app in apps.values():
        await send(app, itertools.islice(numbers, REQUESTS))
    for number in range(rounds):
        first = number % len(names)
        keys = list(itertools.islice(numbers, REQUESTS))
        for found in (new, replayed):  # the same keys: the second time they are replays
            for name in names[first:] + names[:first]:
                found[name].append(await send(apps[name], iter(keys)))
    return _samples(new), _samples(replayed)


def _samples(found: dict[str, list[float]]) -> dict[str, Samples]:
    return {name: Samples(tuple(values)) for name, values in found.items()}


def _app(instrument: Callable[[AsyncEngine], object]) -> IdempotencyMiddleware:
    shop = Starlette(routes=[Route("/orders", _create, methods=["POST"])])
    guarded = IdempotencyMiddleware(shop, engine=AsyncEngine("memory://"))
    instrument(guarded.engine)
    return guarded


async def _create(request: Request) -> Response:
    order = await request.json()
    return JSONResponse({"id": 1, "amount": order["amount"], "state": "placed"}, status_code=201)
