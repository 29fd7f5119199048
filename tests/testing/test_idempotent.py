"""`assert_idempotent`: what it accepts, and what it says about what it does not accept (V2)."""

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.errors import Misconfigured
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.testing import Request, assert_idempotent, assert_idempotent_async
from tests.testing.shops import Shop

COAT = Request("POST", "/orders", json={"item": "coat"})
INTERFACES = pytest.mark.parametrize("interface", ["asgi", "wsgi"])


def failure_of(app, **settings):
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(app, settings.pop("request", COAT), **settings)
    return str(caught.value)


@INTERFACES
def test_a_guarded_application_passes_in_every_situation(interface):
    """V2: three situations, so three orders."""
    shop = Shop(interface)
    assert_idempotent(shop.app, COAT, effects=lambda: shop.orders)
    assert shop.orders == ["coat"] * 3


@INTERFACES
def test_one_application_can_be_checked_several_times(interface):
    shop = Shop(interface)
    for _ in range(2):
        assert_idempotent(shop.app, COAT, effects=lambda: len(shop.orders))
    assert len(shop.orders) == 6


@INTERFACES
def test_an_unguarded_application_fails_with_what_was_doubled(interface):
    """V2: the message names the request, the situation, the number and the doubled effect."""
    shop = Shop(interface, guarded=False)
    words = failure_of(shop.app, effects=lambda: shop.orders)
    assert "POST /orders is not idempotent: sent twice with one key" in words
    assert "took effect 2 times instead of once" in words
    assert "counted 0 before and 2 after" in words
    assert "added: ['coat', 'coat']" in words


@INTERFACES
def test_a_failure_shows_the_line_of_the_test_and_no_frames_of_an_event_loop(interface):
    """V2: what pytest prints of a failure is the test itself."""
    shop = Shop(interface, guarded=False)
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(shop.app, COAT, effects=lambda: shop.orders)
    shown = [entry for entry in caught.traceback if not entry.ishidden(caught)]
    assert [entry.path.name for entry in shown] == [Path(__file__).name]


@INTERFACES
def test_a_route_that_coatcheck_does_not_guard_is_named_as_the_likely_cause(interface):
    """V2: a forgotten middleware, or a method that the policy does not guard."""
    for shop, request in (
        (Shop(interface, guarded=False), COAT),
        (Shop(interface), Request("PUT", "/orders", json={"item": "coat"})),
    ):
        words = failure_of(shop.app, request=request, effects=lambda shop=shop: shop.orders)
        assert "the answer has no Idempotency-Reference" in words
        assert f"guards no {request.method} request to this path" in words


def test_a_guarded_route_is_not_blamed_on_a_forgotten_middleware():
    """V2: this one is guarded, and its effect is outside of the handler."""
    shop, effects = Shop("asgi"), []

    async def app(asgi_scope, receive, send):
        effects.append(asgi_scope["type"])
        await shop.app(asgi_scope, receive, send)

    words = failure_of(app, effects=lambda: effects)
    assert "took effect 2 times" in words
    assert "Idempotency-Reference" not in words


def test_a_race_is_found_although_a_plain_retry_is_harmless():
    """V2: look first, then write: only requests at the same time show that this is a race."""
    seen, orders = {}, []

    async def place(request):
        key = request.headers["idempotency-key"]
        if key not in seen:
            await asyncio.sleep(0)
            orders.append(key)
            seen[key] = len(orders)
        return JSONResponse({"order": seen[key]}, status_code=201)

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    words = failure_of(app, effects=lambda: len(orders), at_once=3)
    assert "sent 3 times at once with one key, it took effect 3 times" in words


def test_a_lost_answer_is_found_although_nothing_else_goes_wrong():
    """V2: this one forgets a key when its client has gone away."""
    seen, orders = {}, []

    async def place(request):
        key = request.headers["idempotency-key"]
        if key not in seen:
            orders.append(key)
            seen[key] = len(orders)
        number = seen[key]
        await request.body()
        if await request.is_disconnected():
            del seen[key]
        return JSONResponse({"order": number}, status_code=201)

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    words = failure_of(app, effects=lambda: orders)
    assert "sent again with its key because the answer was lost, it took effect 2 times" in words


def test_a_retry_that_gets_another_answer_fails():
    keys, app = set(), Starlette()

    async def place(request):
        key = request.headers["idempotency-key"]
        status = 409 if key in keys else 201
        keys.add(key)
        return JSONResponse({"status": status}, status_code=status)

    app.add_route("/orders", place, methods=["POST"])
    words = failure_of(app, effects=lambda: keys)
    assert "took effect once, but its answers differ" in words
    assert '201 {"status":201} and then 409 {"status":409}' in words
    keys.clear()
    assert_idempotent(app, COAT, effects=lambda: keys, same_answer=False)


def test_a_request_without_an_effect_proves_nothing():
    shop = Shop("asgi")
    words = failure_of(shop.app, request=Request("POST", "/nothing"), effects=lambda: 7)
    assert "had no effect" in words
    assert "404" in words


def test_an_amount_of_money_counts_as_well_as_a_list():
    """Also one that decreases; the doubled amount is a multiple of one."""
    shop = Shop("asgi", guarded=False)
    words = failure_of(shop.app, effects=lambda: Decimal(100) - Decimal("9.99") * len(shop.orders))
    assert "took effect 2 times" in words
    assert "a difference of -9.99" in words
    shop = Shop("asgi")
    assert_idempotent(shop.app, COAT, effects=lambda: 100 - 9.99 * len(shop.orders))


def test_each_situation_can_have_a_request_of_its_own():
    shop, items = Shop("asgi"), iter(["coat", "hat", "scarf"])
    assert_idempotent(
        shop.app,
        lambda: Request("POST", "/orders", json={"item": next(items)}),
        effects=lambda: shop.orders,
    )
    assert shop.orders == ["coat", "hat", "scarf"]


def test_the_lifespan_runs_around_the_checks():
    shop, ends = Shop("asgi"), []

    async def lifespan(app):
        shop.orders.append("opened")
        yield {"from": "lifespan"}
        ends.append(len(shop.orders))

    from contextlib import asynccontextmanager

    async def place(request):
        shop.place(request.state._state["from"])
        return JSONResponse({}, status_code=201)

    app = Starlette(
        routes=[Route("/orders", place, methods=["POST"])], lifespan=asynccontextmanager(lifespan)
    )
    app.add_middleware(IdempotencyMiddleware, store="memory://")
    assert_idempotent(app, COAT, effects=lambda: shop.orders)
    assert shop.orders == ["opened", "lifespan", "lifespan", "lifespan"]
    assert ends == [4]


def test_an_application_that_does_not_start_is_reported():
    async def app(asgi_scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    assert "did not start: no database" in failure_of(app, effects=list)


def test_an_application_without_a_lifespan_is_served_all_the_same():
    orders = []

    async def app(asgi_scope, receive, send):
        assert asgi_scope["type"] == "http"
        await receive()
        orders.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    guarded = IdempotencyMiddleware(app, store="memory://")
    assert_idempotent(guarded, COAT, effects=lambda: orders)


def test_the_cause_of_an_error_response_is_shown():
    async def place(request):
        raise LookupError("no such item")

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    with pytest.raises(AssertionError, match="the answer was 500") as caught:
        assert_idempotent(app, COAT, effects=lambda: 0)
    assert isinstance(caught.value.__cause__, LookupError)


def test_async_code_awaits_the_check_and_its_effects_may_be_async():
    shop = Shop("asgi")

    async def effects():
        return shop.orders

    async def check():
        with pytest.raises(Misconfigured, match="await assert_idempotent_async"):
            assert_idempotent(shop.app, COAT, effects=effects)
        await assert_idempotent_async(shop.app, COAT, effects=effects)

    asyncio.run(check())
    assert len(shop.orders) == 3


def test_an_event_loop_of_another_library_is_refused_with_what_to_write():
    """V2: anyio runs async tests on trio, too, if that is installed."""
    shop = Shop("asgi")
    checking = assert_idempotent_async(shop.app, COAT, effects=lambda: shop.orders)
    with pytest.raises(Misconfigured, match=r'anyio_backend.* return "asyncio"'):
        checking.send(None)  # as trio does: without a running event loop of asyncio


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"effects": 7}, "effects must be a function"),
        ({"effects": lambda: None}, r"effects\(\) returned None"),
        ({"effects": list, "at_once": 1}, "at_once is 1"),
        ({"effects": list, "request": "POST /orders"}, "it must be a coatcheck.testing.Request"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(settings, words):
    shop = Shop("asgi")
    with pytest.raises(Misconfigured, match=words):
        assert_idempotent(shop.app, settings.pop("request", COAT), **settings)
    assert shop.orders == []


def test_a_request_is_checked_when_it_is_made():
    with pytest.raises(Misconfigured, match="must begin with a slash"):
        Request("POST", "orders")
    with pytest.raises(Misconfigured, match="not both"):
        Request("POST", "/orders", json={}, body=b"{}")
    with pytest.raises(Misconfigured, match="neither an ASGI nor a WSGI"):
        assert_idempotent("shop:app", COAT, effects=list)
