"""The contract check of OpenAPI documents (V2)."""

import asyncio
from typing import Annotated

import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import post as litestar_post
from litestar.params import HeaderParameter

from coatcheck.errors import Misconfigured
from coatcheck.server.fastapi import IdempotencyMiddleware
from coatcheck.testing import assert_every_unsafe_route_takes_a_key

KEY = {"name": "idempotency-key", "in": "header"}


def document(parameters=(), **methods):
    return {"paths": {"/orders": {"parameters": list(parameters), **methods}}}


@pytest.mark.parametrize(
    "openapi",
    [
        document(post={"parameters": [KEY]}, get={}, delete={}),
        document([KEY], post={}, patch={}),
        {
            **document(post={"parameters": [{"$ref": "#/components/parameters/a~1key"}]}),
            "components": {"parameters": {"a/key": KEY}},
        },
    ],
    ids=["at the operation", "at the path", "by reference"],
)
def test_a_document_passes_wherever_it_names_the_header(openapi):
    """V2: the header may be declared in each of the places that OpenAPI has."""
    assert_every_unsafe_route_takes_a_key(openapi)


def test_every_route_without_the_header_is_named():
    openapi = document(post={}, patch={"parameters": [{"name": "Idempotency-Key", "in": "query"}]})
    with pytest.raises(
        AssertionError, match=r"2 of 2 unsafe routes .* POST /orders, PATCH /orders"
    ):
        assert_every_unsafe_route_takes_a_key(openapi)


def test_exceptions_are_named_by_route_or_operation():
    openapi = document(post={"operationId": "log_in"}, patch={})
    assert_every_unsafe_route_takes_a_key(openapi, exceptions=["log_in", "PATCH /orders"])
    assert_every_unsafe_route_takes_a_key(openapi, exceptions=["POST /orders", "PATCH /orders"])
    with pytest.raises(AssertionError, match="no unsafe route has the name: POST /login"):
        assert_every_unsafe_route_takes_a_key(
            openapi, exceptions=["log_in", "PATCH /orders", "POST /login"]
        )


def test_methods_and_header_are_those_of_the_api():
    openapi = document(delete={}, post={"parameters": [{"name": "X-Key", "in": "header"}]})
    assert_every_unsafe_route_takes_a_key(openapi, key_header="X-Key")
    with pytest.raises(AssertionError, match="DELETE /orders"):
        assert_every_unsafe_route_takes_a_key(openapi, methods=["DELETE"])


@pytest.mark.parametrize("is_served", [True, False])
def test_an_application_of_fastapi_is_checked_by_its_document(is_served):
    """V2, V3: the middleware adds the header when the document is served."""
    app = FastAPI(openapi_url="/openapi.json" if is_served else None)
    app.post("/orders")(lambda: None)
    with pytest.raises(AssertionError, match="POST /orders"):
        assert_every_unsafe_route_takes_a_key(app)
    app = FastAPI(openapi_url="/openapi.json" if is_served else None)
    app.post("/orders")(lambda: None)
    app.add_middleware(IdempotencyMiddleware, store="memory://")
    assert_every_unsafe_route_takes_a_key(app)


def test_an_async_test_checks_an_application_too():
    app = FastAPI()
    app.post("/orders")(lambda: None)
    app.add_middleware(IdempotencyMiddleware, store="memory://")

    async def check():
        assert_every_unsafe_route_takes_a_key(app)

    asyncio.run(check())


def test_a_check_of_nothing_is_no_success():
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_every_unsafe_route_takes_a_key(document(get={}))
    for no_document in (print, {"paths": 7}):
        with pytest.raises(Misconfigured):
            assert_every_unsafe_route_takes_a_key(no_document)


def test_an_application_of_litestar_is_checked_by_its_document():
    @litestar_post("/orders")
    async def place(
        key: Annotated[str, HeaderParameter(name="Idempotency-Key")],
    ) -> None: ...

    @litestar_post("/login")
    async def log_in() -> None: ...

    assert_every_unsafe_route_takes_a_key(Litestar([place]))
    assert_every_unsafe_route_takes_a_key(Litestar([place, log_in]), exceptions=["POST /login"])
    with pytest.raises(AssertionError, match=r"1 of 2 unsafe routes .* POST /login"):
        assert_every_unsafe_route_takes_a_key(Litestar([place, log_in]))
