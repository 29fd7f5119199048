"""S4: which cookies a retry must have in common with its first request."""

import pytest

from tests.support.http import Headers

from .api import Api, OpenApi
from .shop import Call, Said, in_turn, says


def cookie(*pairs: str) -> Headers:
    return [("Cookie", "; ".join(pairs))] if pairs else []


ADA = cookie("session=ada")


@pytest.mark.parametrize(
    ("first", "retry"),
    [
        (cookie("_ga=GA1.1.1", "session=ada"), cookie("_ga=GA1.1.2", "session=ada")),
        (cookie("session=ada", "csrftoken=1"), cookie("csrftoken=2", "theme=dark", "session=ada")),
        (cookie("OptanonConsent=a", "_gid=1"), cookie("OptanonConsent=b", "_fbp=2")),
        (cookie("sid=ada", "token=t"), cookie("token=t", "sid=ada")),
        (cookie("session="), cookie()),
        (cookie(";;", "=", "session", "é=1"), cookie()),
    ],
)
def test_a_cookie_that_is_no_session_may_change(api: Api, first: Headers, retry: Headers):
    """S4: it may come, go and change, as may the order."""
    api.post(headers=first)
    assert api.post(headers=retry).is_replay
    assert api.effects() == 1


@pytest.mark.parametrize(
    "retry",
    [
        *(cookie(), cookie("session=eve"), cookie("Session=ada"), cookie("session=ada", "sid=1")),
        *(cookie("session=ada", "session=eve"), cookie("session=eve", "session=ada")),
        *(cookie("session;sent;ada"), cookie("session;verified;ada"), cookie("session = ada")),
    ],
)
def test_a_retry_in_another_session_is_refused(api: Api, retry: Headers):
    """S4, S1, X3: with and without one, and whatever imitates one."""
    api.post(headers=ADA)
    assert api.post(headers=retry).code == "key-reused"
    assert api.post(headers=ADA).is_replay
    assert api.effects() == 1


@pytest.mark.persists
def test_a_session_that_appears_after_the_first_request_gets_its_answer(open_api: OpenApi):
    """S4: from memory and from the store; and two sessions get no more than a request without."""
    first = open_api().post()
    for api in (open_api(), open_api()):
        again = api.post(headers=ADA)
        assert (again.is_replay, again.body) == (True, first.body)
    assert api.post(headers=cookie("session=eve")).is_replay
    assert api.post().is_replay
    assert api.post(headers=ADA, body=b'{"item": 2}').code == "key-reused"
    assert api.effects() == 0


@pytest.mark.persists
def test_a_session_that_appeared_runs_what_failed_without_it(api: Api):
    """S4, L8, X3: its answer is for this session only, and downstream calls have the same keys."""
    keys: list[str] = []

    def fails(call: Call) -> Said:
        keys.append(call.operation.derive("charge"))
        return Said(500, chunks=[b"down"])

    def works(call: Call) -> Said:
        keys.append(call.operation.derive("charge"))
        return Said(201, chunks=[b"done"])

    api.shop.answers["/orders"] = in_turn(fails, fails, works)
    assert api.post().status == 500
    assert api.post(headers=ADA).status == 500
    assert api.post(headers=cookie("session=eve")).code == "key-reused"
    assert api.post(headers=ADA).body == b"done"
    assert (len(keys), len(set(keys))) == (3, 1)
    assert api.post(headers=ADA).is_replay
    assert [api.post().code, api.post(headers=cookie("session=eve")).code] == ["key-reused"] * 2


def test_a_request_that_was_refused_before_its_handler_may_be_repeated_in_a_session(
    open_api: OpenApi,
):
    """S4, L4: as after a login."""
    api = open_api()
    api.shop.answers["/orders"] = in_turn(says(401, b"log in"), says(201, b"done"))
    assert api.post().status == 401
    assert api.post(headers=ADA).body == b"done"
    assert api.post().code == "key-reused"


def test_an_application_names_its_own_session_cookies(open_api: OpenApi):
    """S4: by name or pattern; they win over the list of those that are not compared."""
    api = open_api(session_cookies=("mycookie", "ACME_*", "_ga"))
    for number, name in enumerate(("mycookie", "acme_shop", "_ga", "__Host-mycookie")):
        key = f"k-{number}"
        api.post(key, headers=cookie(f"{name}=ada", "other=1"))
        assert api.post(key, headers=cookie(f"{name}=ada", "other=2")).is_replay
        assert api.post(key, headers=cookie(f"{name}=eve")).code == "key-reused"


def test_a_session_is_never_stored_in_clear(api: Api):
    """S4, S2."""
    api.post(headers=cookie("session=hunter2hunter2"))
    (record,) = api.records()
    assert "hunter2" not in repr(record)
