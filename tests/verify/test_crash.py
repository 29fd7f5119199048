"""The crash-window injector: it strikes where it says, once, and changes nothing else (L5)."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from coatcheck import AsyncEngine, Engine, KeyRing, current_operation, open_store
from coatcheck.errors import Misconfigured
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from coatcheck.stores import Query, ThreadedStore
from coatcheck.verify import crash


class Reached(crash.Injector):
    """One that only writes down where it was."""

    def __init__(self):
        super().__init__("before claim", lambda: None)
        self.points = []

    def reach(self, point):
        self.points.append(point)


def test_the_points_are_reached_in_their_order():
    injector = Reached()
    effect = injector.effect(lambda: "done")

    def handle():
        return current_operation().step("effect", effect)

    with Engine(injector.store(open_store("memory://"))) as engine:
        assert engine.run("k", handle) == "done"
        assert engine.run("k", handle) == "done"
    assert injector.points == [
        *("before claim", "after claim", "after effect", "after step", "after complete"),
    ]


def test_each_step_is_two_points_and_nothing_else_is_one():
    """L7: notes and renewals are written into the claim as well, and are no steps."""
    injector = Reached()

    def handle():
        operation = current_operation()
        operation.note("about to charge")
        operation.step("charge", lambda: 1, at_most_once=True)
        operation.progress(0.5)
        engine.attempts.heartbeat.leases[operation.claim.id].lease_ms = 10**9  # so that it is due
        engine.attempts.heartbeat.tick()
        operation.step("ship", lambda: 2)

    with Engine(injector.store(open_store("memory://"))) as engine:
        engine.run("k", handle)
    assert injector.points[2:-1] == ["in step", "after step", "after step"]


def test_steps_of_an_attempt_before_are_not_reached_again():
    """L7: also by an injector that has never seen them."""
    store, injector, fails = open_store("memory://"), Reached(), [True]

    def handle():
        current_operation().step("charge", lambda: 1)
        if fails:
            fails.pop()
            raise ZeroDivisionError
        current_operation().step("ship", lambda: 2)

    with pytest.raises(ZeroDivisionError):
        Engine(store).run("k", handle, scope="s")
    with Engine(injector.store(store)) as engine:
        engine.run("k", handle, scope="s")
    assert injector.points == ["before claim", "after step", "after complete"]


def test_what_is_sealed_is_no_point():
    """X1, L7: the injector has no keys."""
    injector = Reached()
    ring = KeyRing({"1": b"k" * 32})
    with Engine(injector.store(open_store("memory://")), keyring=ring) as engine:
        engine.run("k", lambda: current_operation().step("charge", lambda: 1), scope="s")
    assert injector.points == ["before claim", "after claim", "after complete"]


def test_an_injector_may_let_the_first_ones_pass():
    """L7: to strike at the third step."""
    taken, injector = [], crash.Injector("after effect", crash.fail, 3)
    effect = injector.effect(taken.append)
    effect(1)
    effect(2)
    with pytest.raises(crash.Injected):
        effect(3)
    effect(4)
    assert taken == [1, 2, 3, 4]


def test_the_response_is_the_last_point_over_wsgi():
    injector = Reached()

    def app(_environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [injector.effect(lambda: b"done")()]

    with Engine(injector.store(open_store("memory://"))) as engine:
        guarded = injector.wsgi(WsgiMiddleware(app, engine=engine))
        transport = httpx.WSGITransport(guarded)
        with httpx.Client(transport=transport, base_url="http://shop") as client:
            assert client.post("/", headers={"Idempotency-Key": "k"}).text == "done"
    assert injector.points == [
        *("before claim", "after claim", "after effect", "after complete", "before response"),
    ]


def test_the_response_is_the_last_point():
    injector = Reached()

    @injector.effect
    async def effect():
        return "done"

    async def endpoint(_request):
        return PlainTextResponse(await effect())

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    engine = AsyncEngine(ThreadedStore(injector.store(open_store("memory://"))))
    app.add_middleware(IdempotencyMiddleware, engine=engine)

    async def main():
        transport = httpx.ASGITransport(injector.asgi(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            await client.post("/", headers={"Idempotency-Key": "k"})
        await engine.close()

    asyncio.run(main())
    assert injector.points == [
        *("before claim", "after claim", "after effect", "after complete", "before response"),
    ]


def test_an_injector_strikes_only_once():
    injector = crash.Injector("after claim", crash.fail)
    with Engine(injector.store(open_store("memory://"))) as engine:
        with pytest.raises(crash.Injected):
            engine.run("a", lambda: "done", scope="s")
        assert injector.has_struck
        assert engine.run("b", lambda: "done", scope="s") == "done"


def test_a_point_that_does_not_exist_is_refused():
    with pytest.raises(Misconfigured, match="there is no point 'somewhere'"):
        crash.Injector("somewhere", crash.fail)


def test_all_else_of_the_store_is_as_it_was(tmp_path):
    store = crash.Injector("after claim", crash.fail).store(
        open_store(f"sqlite:///{tmp_path}/k.db")
    )
    assert store.get([b"i" * 16]) == [None]
    assert store.find(Query()).records == []
    assert store.sweep(0) == 0
    assert store.check()[0].level == "ok"
    assert store.now_ms() > 0
    store.close()
