"""The crash-window injector: it strikes where it says, once, and changes nothing else (L5)."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from coatcheck import AsyncEngine, Engine, current_operation, open_store
from coatcheck.errors import Misconfigured
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.stores import Query, ThreadedStore
from coatcheck.verify import crash
from coatcheck.verify.outcomes import FAULTS, RECOVERIES, outcome_of, table


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
            engine.run("a", lambda: "done")
        assert injector.has_struck
        assert engine.run("b", lambda: "done") == "done"


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


def test_the_table_tells_every_outcome_that_there_is():
    told = table()
    for fault in FAULTS:
        assert outcome_of(fault, "after effect", "retry") is not None
    assert told.count("###") == len(FAULTS)
    assert all(f"`{recovery}`" in told for recovery in RECOVERIES)
