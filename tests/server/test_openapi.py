"""OpenAPI documents of guarded applications: the header, and how each operation refuses."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Header
from pydantic import BaseModel
from starlette.testclient import TestClient

from coatcheck import Policy
from coatcheck.openapi import annotate
from coatcheck.server.fastapi import IdempotencyMiddleware, extend_openapi, idempotent
from coatcheck.server.openapi import PROBLEM_SCHEMA
from tests.support.http import AsgiExchange, Headers, Response, with_key

PROBLEM = "application/problem+json"
OURS = {"$ref": "#/components/schemas/Problem"}
ORDER = b'{"amount": 1}'


class Charge(BaseModel):
    amount: int


def endpoint() -> Any:
    """A new one for each route, because a mark is put on the function."""

    def charge(body: Charge) -> dict[str, int]:
        return {"charged": body.amount}

    return charge


def header_of(operation: dict[str, Any], name: str = "idempotency-key") -> dict[str, Any] | None:
    """The parameter for the key; there is at most one."""
    found = [p for p in operation.get("parameters", ()) if p["name"].lower() == name]
    assert len(found) <= 1
    return found[0] if found else None


# --- any document ---------------------------------------------------------------------------


def annotated(operation: dict[str, Any], policy: Policy | None = None, **rest: Any) -> Any:
    """The operation and the whole document; what was given does not change."""
    document = {"openapi": "3.1.0", "paths": {"/orders": {"post": operation}}, **rest}
    before = copy.deepcopy(document)
    after = annotate(document, {("/orders", "POST"): policy or Policy()})
    assert document == before
    return after["paths"]["/orders"]["post"], after


@pytest.mark.parametrize("required", [True, False])
def test_a_guarded_operation_takes_the_header_of_its_policy(required: bool):
    """V3."""
    policy = Policy(required=required, key_header="X-Key", key_chars_max=40)
    operation, _ = annotated({}, policy)
    (header,) = operation["parameters"]
    assert len(header.pop("description")) > 40
    assert header == {
        "name": "X-Key",
        "in": "header",
        "required": required,
        "schema": {"type": "string", "minLength": 1, "maxLength": 40},
    }


@pytest.mark.parametrize(
    ("policy", "statuses"),
    [
        (Policy(), {400, 409, 413, 422, 429, 503}),
        (Policy(mismatch=400), {400, 409, 413, 429, 503}),
        (Policy(on_expired="refuse", expired_status=410), {400, 409, 410, 413, 422, 429, 503}),
    ],
)
def test_each_refusal_is_a_problem_with_the_status_that_the_policy_says(policy, statuses):
    """V3."""
    operation, document = annotated({}, policy)
    assert set(operation["responses"]) == set(map(str, statuses))
    for response in operation["responses"].values():
        assert response["content"] == {PROBLEM: {"schema": OURS}}
    assert document["components"]["schemas"] == {"Problem": PROBLEM_SCHEMA}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"required": True}, "400", "key-missing"),
        ({"on_expired": "refuse"}, "409", "key-expired"),
        ({"live_keys_max": 5}, "429", "too-many-keys"),
        ({"attempts_max": 5}, "409", "too-many-attempts"),
    ],
)
def test_a_refusal_is_listed_only_if_the_policy_can_cause_it(fields, status, code):
    """V3."""
    texts = [
        annotated({}, policy)[0]["responses"][status]["description"]
        for policy in (Policy(**fields), Policy())
    ]
    assert [code in text for text in texts] == [True, False]


def test_what_the_application_says_about_a_status_stays():
    """V3: its own media type, header, schema and reference."""
    own: dict[str, Any] = {
        "409": {"description": "Sold out", "content": {"application/json": {"schema": {}}}},
        "422": {"description": "Invalid", "content": {PROBLEM: {"schema": {"type": "object"}}}},
        "503": {"$ref": "#/components/responses/Down"},
    }
    operation, _ = annotated({"responses": copy.deepcopy(own)})
    responses = operation["responses"]
    assert responses["409"]["content"] == {
        **own["409"]["content"],
        PROBLEM: {"schema": OURS},
    }
    assert responses["409"]["description"].startswith("Sold out. `in-progress`: ")
    assert responses["422"]["content"] == {
        PROBLEM: {"schema": {"oneOf": [{"type": "object"}, OURS]}}
    }
    assert responses["503"] == own["503"]


def test_a_header_that_the_application_declares_itself_is_not_repeated():
    """V3: but it is required if the policy says so."""
    own = {"name": "idempotency-key", "in": "header", "schema": {"type": "string"}}
    operation, _ = annotated({"parameters": [own]}, Policy(required=True))
    assert operation["parameters"] == [{**own, "required": True}]


def test_a_header_that_the_operation_shares_with_others_is_not_repeated():
    """V3: the shared one stays as it is, because others may not require it."""
    own = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}
    reference = {"$ref": "#/components/parameters/Key"}
    operation, document = annotated(
        {"parameters": [reference]},
        Policy(required=True),
        components={"parameters": {"Key": own}},
    )
    assert operation["parameters"] == [{**own, "required": True}]
    assert document["components"]["parameters"]["Key"] == own


def test_a_schema_of_the_application_is_not_replaced():
    """V3."""
    own = {"type": "object", "title": "Problem of mine"}
    operation, document = annotated({}, components={"schemas": {"Problem": own}})
    assert document["components"]["schemas"] == {"Problem": own, "KeyProblem": PROBLEM_SCHEMA}
    schema = operation["responses"]["409"]["content"][PROBLEM]["schema"]
    assert schema == {"$ref": "#/components/schemas/KeyProblem"}


def test_a_document_without_guarded_operations_stays_as_it_is():
    """V3."""
    document = {"openapi": "3.1.0", "paths": {"/orders": {"get": {}}}}
    assert annotate(document, {("/orders", "POST"): Policy(), ("/", "POST"): Policy()}) == document
    assert annotate({"openapi": "3.1.0"}, {("/", "POST"): Policy()}) == {"openapi": "3.1.0"}


# --- FastAPI --------------------------------------------------------------------------------


@pytest.fixture
def app() -> FastAPI:
    """Marked and unmarked routes, directly and in an included router."""
    app, router = FastAPI(), APIRouter(prefix="/shop")
    app.post("/charges", status_code=201)(idempotent(required=True)(endpoint()))
    app.post("/notes")(endpoint())
    app.put("/notes")(endpoint())
    app.get("/notes")(list)
    app.put("/marked/{number}")(idempotent(key_chars_max=9)(endpoint()))
    app.post("/free")(idempotent(methods=())(endpoint()))
    router.post("/charges")(idempotent(required=True)(endpoint()))
    app.include_router(router, prefix="/v1")
    return app


@pytest.fixture
def guarded(app: FastAPI) -> FastAPI:
    app.add_middleware(IdempotencyMiddleware, store="memory://")
    return app


def document_of(app: Any, path: str = "/openapi.json") -> Any:
    return json.loads(asyncio.run(AsgiExchange("GET", path, (), b"").run(app)).body)


def post(app: Any, path: str, headers: Headers = (), body: bytes = ORDER) -> Response:
    return asyncio.run(AsgiExchange("POST", path, with_key(None, headers), body).run(app))


def test_the_document_of_fastapi_names_every_guarded_operation(guarded: FastAPI):
    """V3, S3: by itself, because the middleware is there; the header is required where it is."""
    found = {
        (path, method): header and (header["required"], header["schema"]["maxLength"])
        for path, methods in document_of(guarded)["paths"].items()
        for method, operation in methods.items()
        for header in [header_of(operation)]
    }
    assert found == {
        ("/charges", "post"): (True, 255),
        ("/notes", "post"): (False, 255),
        ("/notes", "put"): None,
        ("/notes", "get"): None,
        ("/marked/{number}", "put"): (False, 9),
        ("/free", "post"): None,
        ("/v1/shop/charges", "post"): (True, 255),
    }


def test_validation_errors_and_problems_share_a_status(guarded: FastAPI):
    """V3: with a media type each."""
    document = document_of(guarded)
    content = document["paths"]["/charges"]["post"]["responses"]["422"]["content"]
    assert content == {
        "application/json": {"schema": {"$ref": "#/components/schemas/HTTPValidationError"}},
        PROBLEM: {"schema": OURS},
    }
    assert document["components"]["schemas"]["Problem"] == PROBLEM_SCHEMA
    assert document == document_of(guarded)  # however often it is asked for


def test_a_request_made_from_the_document_is_guarded(guarded: FastAPI):
    """V3, K1: as "Try it out" makes it; and what is refused is a problem as the schema says."""
    operation = document_of(guarded)["paths"]["/charges"]["post"]
    header = header_of(operation)
    assert header is not None
    name, key = header["name"], "k" * header["schema"]["maxLength"]
    first, again = (post(guarded, "/charges", [(name, key)]) for _ in range(2))
    assert (first.status, again.body, again.is_replay) == (201, first.body, True)
    refusals = [
        post(guarded, "/charges"),
        post(guarded, "/charges", [(name, key + "k")]),
        post(guarded, "/charges", [(name, key)], b'{"amount": 2}'),
    ]
    assert [refusal.status for refusal in refusals] == [400, 400, 422]
    for refusal in refusals:
        assert PROBLEM in operation["responses"][str(refusal.status)]["content"]
        members = set(refusal.problem)
        assert set(PROBLEM_SCHEMA["required"]) <= members <= set(PROBLEM_SCHEMA["properties"])
        assert refusal.problem["retry"] in PROBLEM_SCHEMA["properties"]["retry"]["enum"]


def test_a_server_that_has_started_has_the_whole_document(guarded: FastAPI):
    """V3: before its first request."""
    with TestClient(guarded) as client:
        operation = guarded.openapi()["paths"]["/charges"]["post"]
        header = header_of(operation)
        assert header is not None
        key = {header["name"]: "k-1"}
        answers = [client.post("/charges", json={"amount": 1}, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1].headers["Idempotent-Replayed"] == "true"


def test_a_key_that_is_found_in_the_request_makes_the_header_optional(app: FastAPI):
    """V3, K2."""
    app.add_middleware(IdempotencyMiddleware, store="memory://", key=lambda request: "natural")
    header = header_of(document_of(app)["paths"]["/charges"]["post"])
    assert header is not None
    assert header["required"] is False


def test_routes_that_are_only_observed_stay_as_they_are(app: FastAPI):
    """R1, V3: nothing is refused there, and no header is required."""
    before = copy.deepcopy(app.openapi())
    app.add_middleware(IdempotencyMiddleware, store="memory://", policy=Policy(mode="observe"))
    assert document_of(app) == before


def test_a_middleware_around_the_application_does_the_same(app: FastAPI):
    """V3: also around another middleware, and with a second one."""

    class Between:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, *args: Any) -> None:
            await self.app(*args)

    app.add_middleware(IdempotencyMiddleware, store="memory://")
    around = IdempotencyMiddleware(Between(app), store="memory://")
    operation = document_of(around)["paths"]["/notes"]["post"]
    assert header_of(operation) is not None
    assert operation["responses"]["409"]["description"].count("in-progress") == 1


def test_a_mounted_application_has_a_document_of_its_own(app: FastAPI):
    """V3."""
    outer = FastAPI()
    outer.mount("/below", app)
    outer.add_middleware(IdempotencyMiddleware, store="memory://")
    document = document_of(outer, "/below/openapi.json")
    assert header_of(document["paths"]["/charges"]["post"]) is not None


def test_a_document_that_the_application_has_changed_stays_so(app: FastAPI):
    """V3: as FastAPI's documentation says how; routes may be added later."""
    original = app.openapi

    def with_logo() -> dict[str, Any]:
        document = original()
        document["info"]["x-logo"] = {"url": "https://shop.example/logo.png"}
        return document

    app.openapi = with_logo  # type: ignore[method-assign]  # FastAPI's own way
    app.add_middleware(IdempotencyMiddleware, store="memory://")
    assert "x-logo" in document_of(app)["info"]
    app.openapi_schema = None
    app.post("/late")(endpoint())
    document = document_of(app)
    assert "x-logo" in document["info"]
    assert header_of(document["paths"]["/late"]["post"]) is not None


def test_an_endpoint_that_reads_the_header_itself_has_one_parameter(app: FastAPI):
    """V3."""

    @app.post("/own")
    @idempotent(required=True)
    def own(idempotency_key: Annotated[str | None, Header()] = None) -> str:
        return str(idempotency_key)

    app.add_middleware(IdempotencyMiddleware, store="memory://")
    header = header_of(document_of(app)["paths"]["/own"]["post"])
    assert header is not None
    assert header["required"] is True


def test_a_document_can_be_written_without_a_server(app: FastAPI):
    """V3: for a file in a repository."""
    assert header_of(app.openapi()["paths"]["/notes"]["post"]) is None
    extend_openapi(app, Policy(required=True))
    document = json.loads(json.dumps(app.openapi()))
    header = header_of(document["paths"]["/notes"]["post"])
    assert header is not None
    assert header["required"] is True
