"""S2: a `caller=` function may refuse a request. Then nothing runs and nothing is shown."""

import json
import logging

import pytest
from fastapi import HTTPException as FastApiException
from starlette.exceptions import HTTPException
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import HTTPException as HttpException
from werkzeug.exceptions import Unauthorized, abort
from werkzeug.wrappers import Response as WerkzeugResponse

from coatcheck import Misconfigured
from coatcheck.server.callers import Refused
from coatcheck.server.request import Request

from .api import OpenApi
from .shop import Gate, says

CHALLENGE = [("WWW-Authenticate", "Bearer")]
REVOKED = [("Authorization", "Bearer revoked")]
VALID = [("Authorization", "Bearer valid")]


def aborted(*args: object) -> Exception:
    try:
        abort(*args)
    except HttpException as error:
        return error
    raise AssertionError


# What is raised, and the status, body and challenge that the client gets.
REFUSALS = {
    "ours": (Refused(401, "who are you?", headers=CHALLENGE), 401, "who are you?", "Bearer"),
    "ours, bare": (Refused(), 401, "the credentials of this request are missing or not valid", None),
    "forbidden": (Refused(403, "not you"), 403, "not you", None),
    "with a body": (Refused(418, headers=CHALLENGE, body=b"a teapot"), 418, b"a teapot", "Bearer"),
    "redirect": (Refused(307, headers=[*CHALLENGE, ("Location", "/login")], body=b""), 307, b"", "Bearer"),
    "starlette": (HTTPException(401, "no", {"WWW-Authenticate": "Bearer"}), 401, "no", "Bearer"),
    "starlette, bare": (HTTPException(403), 403, "Forbidden", None),
    "starlette, without content": (HTTPException(304), 304, b"", None),
    "fastapi": (FastApiException(422, {"code": [1]}), 422, {"code": [1]}, None),
    "werkzeug": (
        Unauthorized("no", WerkzeugResponse(b"no", 401, CHALLENGE)), 401, b"no", "Bearer"
    ),
    "werkzeug, by abort": (aborted(403, "no"), 403, None, None),
    "werkzeug, challenge": (
        Unauthorized("no", www_authenticate=WWWAuthenticate("basic", {"realm": "x"})),
        *(401, None, "Basic realm=x"),
    ),
}  # fmt: skip


def refusing(error: Exception):
    """Refuses what does not have the valid credential."""

    def caller(request):
        if request.header(b"authorization") != b"Bearer valid":
            raise error
        return "ada"

    return caller


@pytest.mark.parametrize("name", REFUSALS)
def test_the_client_gets_the_refusal_of_the_caller_function(open_api: OpenApi, name: str):
    """S2: with its status, headers and detail; a known key shows nothing, a new one runs nothing."""
    error, status, said, challenge = REFUSALS[name]
    api = open_api(caller=refusing(error))
    assert api.post(headers=VALID).status == 201
    for key in ("k-1", "k-2"):
        response = api.post(key, headers=REVOKED)
        assert (response.status, response.header("www-authenticate")) == (status, challenge)
        assert not response.is_replay
        assert response.all("idempotency-reference") == []
        if isinstance(said, bytes):
            assert response.body == said
        elif said is not None:
            assert (response.problem["detail"], response.code) == (said, "caller-refused")
            assert response.header("cache-control") == "no-store"
    assert (api.effects(), len(api.records())) == (1, 1)
    assert api.post(headers=VALID).is_replay


def test_a_revoked_credential_gets_nothing_at_the_polling_address(open_api: OpenApi):
    """S2, X3: the address is refused before the store is asked."""
    is_revoked = []

    def caller(_request):
        if is_revoked:
            raise Refused(401, headers=CHALLENGE)
        return "ada"

    api = open_api(caller=caller, in_flight="202")
    gate = api.shop.answers["/orders"] = Gate(says(201, b"Ada's order"))
    first = api.start_post()
    gate.wait_until_entered()
    address = api.post().header("location")
    gate.open()
    first.result(20)
    assert api.send("GET", address).body == b"Ada's order"
    is_revoked.append(True)
    for path in (address, address[:-8] + "00000000"):
        response, head = api.send("GET", path), api.send("HEAD", path)
        assert (response.status, response.code) == (401, "caller-refused")
        assert (head.status, head.body) == (401, b"")
    assert api.effects() == 1
    assert api.send("GET", "/orders").status == 201  # any other page is the application's


class WithoutHeaders(Exception):
    """A service that was asked has an error of its own."""

    status_code, detail = 401, "no"


class Unsendable(Exception):
    """It has a status that no response has, or a header that cannot be sent."""

    detail = "no"

    def __init__(self, status_code: object, headers: object = None) -> None:
        self.status_code = status_code
        self.headers = headers


@pytest.mark.parametrize(
    "error",
    [
        *(LookupError("no such user"), WithoutHeaders(), Unsendable(42), Unsendable("401")),
        *(
            Unsendable(200),
            Unsendable(None),
            Unsendable(401, 7),
            Unsendable(401, {"X": "a\r\nSet-Cookie: evil=1"}),
        ),
    ],
)
def test_any_other_exception_is_an_error_of_the_application(open_api: OpenApi, error: Exception):
    """S2: it reaches the server, and nothing runs."""
    api = open_api(caller=refusing(error))
    assert api.post(headers=REVOKED).error is error
    assert (api.effects(), api.records()) == (0, [])


@pytest.mark.parametrize("size", [1, 2_000_000])
def test_a_refused_request_leaves_no_file_open(open_api: OpenApi, size: int):
    """S2."""
    api = open_api(caller=refusing(Refused()))
    assert api.post(body=b"x" * size, headers=REVOKED).status == 401


def test_a_refusal_is_reported(open_api: OpenApi):
    """S2: like any other, and without the credential."""
    decisions = []
    api = open_api(caller=refusing(Refused()), settings={"observers": [decisions.append]})
    api.post(headers=REVOKED)
    (decision,) = decisions
    assert (decision.outcome, decision.code) == ("refused", "caller-refused")
    assert decision.label == "POST /orders"
    assert "revoked" not in json.dumps(repr(decision))


def test_the_cause_of_a_refusal_is_in_the_log(open_api: OpenApi, caplog):
    """S2, O3: the client does not learn why its token is not valid, but an operator does."""
    caplog.set_level(logging.INFO)

    def caller(_request: Request) -> str:
        try:
            raise LookupError("expired\nyesterday")
        except LookupError as error:
            raise Refused from error

    refused = open_api(caller=caller).post()
    assert b"expired" not in refused.body
    (line,) = (r for r in caplog.records if "expired" in r.getMessage())
    assert (line.levelno, "\n" in line.getMessage()) == (logging.INFO, False)
    assert line.getMessage() == (
        "coatcheck: caller= refused POST /orders with 401: LookupError('expired\\nyesterday')"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"status": 200}, {"status": 600}, {"status": "401"}, {"headers": [("X", "a\nb")]}),
        *({"headers": [("a b", "c")]}, {"body": "text"}, {"status": 304, "body": b"x"}),
    ],
)
def test_a_refusal_that_cannot_be_sent_is_an_error_where_it_is_made(wrong):
    """S2."""
    with pytest.raises(Misconfigured):
        Refused(**wrong)
