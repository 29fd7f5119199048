"""Keys that are made of the content: a form that is posted twice."""

from urllib.parse import urlencode

import pytest

from coatcheck.server import keys
from tests.support.http import Headers, Response
from tests.support.times import Clock, eventually

from .api import Api, OpenApi
from .shop import Gate, in_turn, raises, says

FORM = [("Content-Type", "application/x-www-form-urlencoded")]
ADA: Headers = [("Authorization", "Bearer ada")]
BOB: Headers = [("Authorization", "Bearer bob")]


def submit(api: Api, who: Headers = ADA, path: str = "/orders", **fields: str) -> Response:
    """Post a form, as a browser does."""
    body = urlencode(fields or {"item": "coat"}).encode()
    return api.post(None, path, body, [*FORM, *who])


@pytest.fixture
def api(open_api: OpenApi) -> Api:
    return open_api(key=keys.by_content(window="10s"))


def test_a_form_that_is_posted_twice_is_one_action(api: Api):
    """K4, L1: without any key from the client."""
    first, again = submit(api), submit(api)
    assert first.status == 201
    assert (again.body, again.is_replay) == (first.body, True)
    assert again.reference == first.reference
    assert api.effects() == 1


def test_after_its_window_the_same_content_is_a_new_action(
    api: Api, clock: Clock, caplog: pytest.LogCaptureFixture
):
    """T1, T2: by the window of the key, not of the policy; nobody is warned of a late retry."""
    submit(api)
    clock.advance(9.9)
    assert submit(api).is_replay
    clock.advance(0.2)
    assert not submit(api).is_replay
    assert api.effects() == 2
    assert not [one for one in caplog.records if "late retry" in one.getMessage()]
    clock.advance(9.9)
    assert submit(api).is_replay


def test_a_second_post_waits_for_the_first_however_long_that_takes(open_api: OpenApi, clock: Clock):
    """L3: also when the window is over by then."""
    api = open_api(key=keys.by_content(window="2s"), wait="20s")
    gate = Gate()
    api.shop.answers["/orders"] = gate
    headers, body = [*FORM, *ADA], b"item=coat"
    first = api.start_post(None, body=body, headers=headers)
    gate.wait_until_entered()
    second = api.start_post(None, body=body, headers=headers)
    eventually(lambda: api.waiters() == 1)
    clock.advance(3)
    gate.open()
    assert first.result(20).body == second.result(20).body
    assert second.result().is_replay
    assert api.effects() == 1


@pytest.mark.parametrize(
    "other",
    [
        {"who": BOB},
        {"item": "hat"},
        {"path": "/refunds"},
        {"path": "/orders?gift=1"},
        {"who": [*ADA, ("Cookie", "session=other"), ("X-API-Key", "a")]},
    ],
    ids=["caller", "content", "path", "query", "credential"],
)
def test_another_caller_path_or_content_is_another_action(api: Api, other: dict):
    """S1, S2, F1."""
    submit(api)
    answer = submit(api, **{"item": "coat", **other})
    assert (answer.status, answer.is_replay) == (201, False)


def test_two_sessions_are_two_clients(api: Api):
    """S2: neither gets a response of the other, nor a refusal because of it."""
    sessions = ("a", "b", "a")
    answers = [submit(api, [("Cookie", f"session={name}")]) for name in sessions]
    assert [answer.status for answer in answers] == [201, 201, 201]
    assert [answer.is_replay for answer in answers] == [False, False, True]


def test_a_client_that_nothing_identifies_is_not_guarded(api: Api):
    """S2: two people who post the same form do not share a response."""
    answers = [submit(api, ()) for _ in range(2)]
    assert [answer.all("idempotency-reference") for answer in answers] == [[], []]
    assert api.effects() == 2


def test_where_a_key_is_required_such_a_client_is_refused(open_api: OpenApi):
    """K3, S2."""
    api = open_api(key=keys.by_content(), required=True)
    assert submit(api, ()).code == "key-missing"
    assert submit(api).status == 201


def test_a_caller_function_identifies_the_client(open_api: OpenApi):
    """S2: it is asked before the key is made."""
    caller = {"caller": lambda request: request.header(b"x-tenant") or None}
    api = open_api(key=keys.by_content(), **caller)
    tenants = [[("X-Tenant", name)] for name in ("a", "b", "a")]
    assert [submit(api, tenant).is_replay for tenant in tenants] == [False, False, True]
    assert not submit(api, ()).all("idempotency-reference")


def test_the_header_of_a_client_is_its_key(api: Api):
    """K4: then the policy's window holds, and another body is a misuse."""
    headers = [*FORM, *ADA]
    assert api.post("k-1", body=b"item=coat", headers=headers).status == 201
    assert api.post("k-1", body=b"item=hat", headers=headers).code == "key-reused"
    assert not submit(api).is_replay
    windows = {record.key: record.window_until_ms - record.created_ms for record in api.records()}
    assert windows.pop("k-1") == 24 * 3_600_000
    assert list(windows.values()) == [10_000]


def test_a_failed_post_may_be_sent_again(api: Api):
    """L4."""
    api.shop.answers["/orders"] = in_turn(says(503), raises(RuntimeError("a bug")), says(201))
    assert [submit(api).status for _ in range(3)] == [503, 500, 201]
    assert submit(api).is_replay


def test_what_the_policy_ignores_does_not_matter(open_api: OpenApi):
    """F2: a JSON body whose timestamp differs is the same content."""
    api = open_api(key=keys.by_content(), ignore=("/sent_at",))
    bodies = (b'{"item": 1, "sent_at": 1}', b'{"sent_at": 2, "item": 1}')
    answers = [api.post(None, body=body, headers=ADA) for body in bodies]
    assert [answer.is_replay for answer in answers] == [False, True]


def test_another_key_may_be_found_first(open_api: OpenApi):
    """K4: `by_content` in a function of one's own."""
    content = keys.by_content()

    def key(request):
        return dict([request.body.split(b"=")]).get(b"order") or content(request)

    api = open_api(key=key)
    assert [submit(api, order="17").is_replay for _ in range(2)] == [False, True]
    assert [submit(api).is_replay for _ in range(2)] == [False, True]
    by_key = {record.key: record.window_until_ms - record.created_ms for record in api.records()}
    assert by_key["17"] == 24 * 3_600_000


def test_observed_posts_are_reported_and_run(open_api: OpenApi):
    """R3."""
    api = open_api(key=keys.by_content(), mode="observe")
    assert [submit(api).is_replay for _ in range(2)] == [False, False]
    assert api.effects() == 2
