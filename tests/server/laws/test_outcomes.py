"""L4: which answers are final, and what a retry after the others meets."""

import pytest

from coatcheck import Policy, Response

from .api import Api, OpenApi
from .shop import Call, Said, in_turn, raises, says

FINAL = (200, 201, 202, 204, 301, 303, 304, 400, 402, 404, 405, 409, 410, 412, 418, 422, 451)
NOT_NOW = (408, 425, 429)
BEFORE_THE_HANDLER = (401, 403, 407, 413, 415)
BROKEN = (500, 501, 502, 503, 504, 507)


@pytest.mark.parametrize("status", FINAL)
def test_a_final_answer_is_remembered(api: Api, status: int):
    """L4: 204, 303, 402 and 404 after a side effect too."""
    body = [] if status in (204, 304) else [b"final"]
    api.shop.answers["/orders"] = in_turn(says(status, *body), says(200, b"another"))
    first, again = api.post(), api.post()
    assert (again.status, again.body) == (first.status, first.body) == (status, b"".join(body))
    assert again.is_replay
    assert api.effects() == 1


@pytest.mark.parametrize("status", [*NOT_NOW, *BEFORE_THE_HANDLER, *BROKEN])
def test_an_answer_that_is_not_final_reaches_the_client_and_is_not_kept(api: Api, status: int):
    """L4: the next retry runs again, as the next attempt, and what it says is final."""
    api.shop.answers["/orders"] = in_turn(says(status, b"not yet"), says(201, b"done"))
    first = api.post()
    assert (first.status, first.body) == (status, b"not yet")
    assert first.all("idempotent-replayed") == []
    second, third = api.post(), api.post()
    assert (second.status, second.body) == (201, b"done")
    assert third.is_replay
    assert [call.operation.attempt for call in api.shop.effects] == [1, 2]
    assert first.reference == second.reference


@pytest.mark.served
@pytest.mark.persists
def test_an_exception_gives_the_key_back(api: Api):
    """L4: the next retry is the second attempt, with the same derived keys."""
    api.shop.answers["/orders"] = in_turn(raises(RuntimeError("a bug")), says(201, b"done"))
    assert isinstance(api.post().error, RuntimeError)
    assert api.post().body == b"done"
    one, other = (call.operation for call in api.shop.effects)
    assert (one.attempt, other.attempt) == (1, 2)
    assert one.derive("charge") == other.derive("charge")
    assert one.fence < other.fence


@pytest.mark.parametrize("status", [*NOT_NOW, *BROKEN])
def test_after_a_failure_the_key_still_belongs_to_its_request(api: Api, status: int):
    """F1, L4: another body is refused."""
    api.shop.answers["/orders"] = in_turn(says(status), says(201))
    api.post(body=b'{"item": 1}')
    assert api.post(body=b'{"item": 2}').code == "key-reused"
    assert api.post(body=b'{"item": 1}').status == 201


def test_another_request_after_a_refusal_before_the_handler_derives_other_keys(api: Api):
    """F1, L8: a provider that knows the first one's keys would answer with what that asked for."""
    api.shop.answers["/orders"] = in_turn(says(403), says(403), says(201))
    for item in (1, 1, 2):
        api.post(body=b'{"item": %d}' % item)
    one, again, other = (call.operation.derive("charge") for call in api.shop.effects)
    assert one == again != other


@pytest.mark.parametrize("status", BEFORE_THE_HANDLER)
def test_a_refusal_before_the_handler_does_not_use_up_the_key(api: Api, status: int):
    """L4: a corrected request may follow, and then the key belongs to that one."""
    api.shop.answers["/orders"] = in_turn(says(status, b"no"), says(201, b"welcome"))
    assert api.post(body=b'{"item": 1}').status == status
    assert api.post(body=b'{"item": 2}').body == b"welcome"
    assert api.post(body=b'{"item": 1}').code == "key-reused"
    assert api.post(body=b'{"item": 2}').is_replay


def test_several_refusals_before_the_handler_do_not_use_up_the_key(api: Api):
    """L4: nothing ran, however often it was refused."""
    shut = (says(415), says(413), says(403))
    api.shop.answers["/orders"] = in_turn(*shut, says(503), says(201))
    told = [api.post(body=b'{"item": %d}' % number).status for number in range(4)]
    assert told == [415, 413, 403, 503]
    assert api.post(body=b'{"item": 9}').code == "key-reused"
    assert api.post(body=b'{"item": 3}').status == 201


def test_with_a_better_credential_the_same_key_runs(api: Api):
    """L4, S1: 401 first, then the right token."""
    api.shop.answers["/orders"] = in_turn(says(401), says(201))
    assert api.post(headers=[("Authorization", "Bearer wrong")]).status == 401
    assert api.post(headers=[("Authorization", "Bearer right")]).status == 201


def test_everything_can_be_kept(open_api: OpenApi):
    """L4: keep="all" stores 5xx too, but never what says "not now" or was refused before the handler."""
    api = open_api(keep="all")
    for status in BROKEN:
        path = f"/{status}"
        api.shop.answers[path] = in_turn(says(status, b"broken"), says(201))
        api.post(path=path)
        again = api.post(path=path)
        assert (again.status, again.body, again.is_replay) == (status, b"broken", True)
    for status in (*NOT_NOW, *BEFORE_THE_HANDLER):
        path = f"/{status}"
        api.shop.answers[path] = in_turn(says(status), says(201))
        api.post(path=path)
        assert api.post(path=path).status == 201


def test_an_exception_is_no_answer_that_could_be_kept(open_api: OpenApi):
    """L4: whatever the policy keeps."""
    api = open_api(keep="all")
    api.shop.answers["/orders"] = in_turn(raises(RuntimeError("a bug")), says(201, b"done"))
    api.post()
    assert api.post().body == b"done"


def test_a_function_can_choose_what_is_kept(open_api: OpenApi):
    """L4: it sees the whole answer."""
    seen: list[Response] = []

    def keep(response: Response) -> bool:
        seen.append(response)
        return b"sold out" in response.body

    api = open_api(keep=keep)
    api.shop.answers["/a"] = in_turn(says(200, b"pending"), says(200, b"sold out"), says(200))
    assert [api.post(path="/a").body for _ in range(4)] == [b"pending", *[b"sold out"] * 3]
    api.shop.answers["/b"] = in_turn(says(503, b"sold ", b"out"), says(200))
    assert [api.post(path="/b").status for _ in range(2)] == [503, 503]
    assert [(r.status, r.body) for r in seen[:1]] == [(200, b"pending")]
    assert (b"content-type", b"text/plain") in seen[0].headers


@pytest.mark.parametrize("chunks", [[b"a" * 30], [b"a" * 15] * 2], ids=["one chunk", "several"])
@pytest.mark.parametrize(("status", "code"), [(200, "result-unavailable"), (503, None)])
def test_the_keep_function_never_gets_a_part_of_a_response(open_api: OpenApi, chunks, status, code):
    """L4, L12: one that is too large to be kept is judged by its status."""
    asked: list[Response] = []
    api = open_api(keep=asked.append, response_bytes_max=20)
    api.shop.answers["/orders"] = in_turn(says(status, *chunks), says(201, b"again"))
    assert api.post().body == b"a" * 30
    again = api.post()
    assert again.code == code if code else again.body == b"again"
    assert [response.body for response in asked if response.status == status] == []


@pytest.mark.parametrize(
    ("recovery", "status", "told"),
    [
        *(("retry", status, "replay") for status in (201, 401, 429, 500)),
        *(("manual", status, "replay") for status in (201, 404)),
        *(("manual", status, "outcome-unknown") for status in (401, 429, 500)),
    ],
)
@pytest.mark.parametrize("in_flight", ["wait", "202"])
def test_a_keep_function_that_fails_runs_nothing_twice(
    open_api: OpenApi, caplog, recovery, status, told, *, in_flight
):
    """L4, L12: its answer is kept, or in doubt where a failure would be; and it is logged."""

    def keep(_response: Response) -> bool:
        raise ZeroDivisionError("a bug in keep")

    api = open_api(keep=keep, recovery=recovery, in_flight=in_flight)
    api.shop.answers["/orders"] = in_turn(says(status, b"done"), says(201, b"again"))
    first, again = api.post(), api.post()
    assert (first.status, first.body) == (status, b"done")
    if told == "replay":
        assert (again.status, again.body, again.is_replay) == (status, b"done", True)
    else:
        assert again.code == told
    assert api.effects() == 1
    assert "a bug in keep" in caplog.text


def test_an_async_keep_function_has_failed(open_api: OpenApi, caplog):
    """L12: what it promises is not what it says."""

    async def judge(_response: Response) -> bool:
        return False

    hidden = lambda response: judge(response)  # noqa: E731, PLW0108 - it does not look async
    api = open_api(keep=hidden)
    assert not api.post().is_replay
    assert api.post().is_replay
    assert "must not be async" in caplog.text


def test_the_conflict_of_a_duplicate_is_never_stored(open_api: OpenApi):
    """L3, L4: what we refuse leaves no trace."""
    api = open_api(in_flight="409")
    claim = api.claim("k-1", "/orders")
    assert api.post().code == "in-progress"
    assert api.post(body=b"{}").code == "key-reused"
    assert api.records() == [claim]


# --- presets --------------------------------------------------------------------------------


def test_the_ietf_preset_answers_as_the_draft_says(open_api: OpenApi):
    """L3, F1: 409 at once, 422 for a mismatch; the key is optional unless the route says so."""
    api = open_api(policy="ietf")
    assert api.post(key=None).status == 201
    api.claim("k-1", "/orders")
    assert api.post("k-1").code == "in-progress"
    assert api.post("k-1", body=b"{}").status == 422
    strict = open_api(policy=Policy.preset("ietf", required=True))
    assert strict.post(key=None).status == 400


def test_the_stripe_preset_answers_as_stripe_does(open_api: OpenApi):
    """L3, L4, F1: 5xx are kept, a mismatch is 400, a conflict 409 at once."""
    api = open_api(policy="stripe")
    api.shop.answers["/broken"] = in_turn(says(500, b"kept"), says(201))
    api.post(path="/broken")
    again = api.post(path="/broken")
    assert (again.status, again.body, again.is_replay) == (500, b"kept", True)
    assert api.post(path="/broken", body=b"{}").status == 400
    api.claim("k-2", "/orders")
    assert (api.post("k-2").status, api.post("k-2").code) == (409, "in-progress")


def test_the_payments_preset_never_runs_twice_by_itself(open_api: OpenApi, clock):
    """K3, L4, L5, T1: the key is required, 72 hours; an unclear end waits for a person."""
    api = open_api(policy="payments")
    assert api.post(key=None).code == "key-missing"
    api.shop.answers["/broken"] = in_turn(says(502, b"?"), says(201))
    first = api.post(path="/broken")
    assert (first.status, first.body) == (502, b"?")
    unknown = api.post(path="/broken")
    assert (unknown.status, unknown.code) == (409, "outcome-unknown")
    assert unknown.reference == first.reference
    api.shop.answers["/bug"] = in_turn(raises(RuntimeError("a bug")), says(201))
    api.post(path="/bug")
    assert api.post(path="/bug").code == "outcome-unknown"
    api.shop.answers["/busy"] = in_turn(says(429), says(201))
    api.post(path="/busy")
    assert api.post(path="/busy").status == 201
    api.post("k-9")
    clock.advance(71 * 3_600)
    assert api.post("k-9").is_replay
    assert api.effects("/broken") == api.effects("/bug") == 1


@pytest.mark.persists
def test_two_engines_with_different_policies_share_one_store(open_api: OpenApi, clock):
    """L4, T1: each goes by its own policy, and by what stands in the record."""
    careful, quick = open_api(window="72h", keep="all"), open_api(window="2h", mismatch=409)
    for api in (careful, quick):
        api.shop.answers["/orders"] = in_turn(says(500, b"broken"), says(201, b"done"))
    assert careful.post("k-1").status == 500
    assert quick.post("k-1").body == b"broken"
    assert quick.post("k-1", body=b"{}").status == 409
    assert careful.post("k-1", body=b"{}").status == 422
    clock.advance(3 * 3_600)
    assert quick.post("k-1").is_replay
    assert quick.effects() == 0


@pytest.mark.served
def test_an_answer_with_no_body_and_no_headers_is_an_answer(api: Api):
    """L2, L4."""
    api.shop.answers["/orders"] = lambda _call: Said(204, (), ())
    first, again = api.post(), api.post()
    assert (first.status, first.body) == (again.status, again.body) == (204, b"")
    assert again.is_replay


def test_a_handler_knows_the_number_of_its_attempt(api: Api):
    """L4, L5: so that the second can look before it leaps."""

    def careful(call: Call) -> Said:
        return says(503 if call.operation.attempt < 3 else 201)(call)

    api.shop.answers["/orders"] = careful
    assert [api.post().status for _ in range(4)] == [503, 503, 201, 201]
    assert api.effects() == 3
