"""S: whose key it is, and what is guarded."""

import pytest

from coatcheck import KeyRing, open_store
from coatcheck.core.describe import facts_of, lines_of
from coatcheck.core.record import COMPLETED, FAILED
from coatcheck.server import callers
from coatcheck.server.request import Request
from tests.support.http import ORDER, with_key

from .api import Api, OpenApi
from .shop import in_turn, says

METHODS = ("GET", "HEAD", "OPTIONS")


def test_the_same_key_of_another_caller_is_another_operation(api: Api):
    """S1: B gets a result of its own, never A's answer, a 409 or a 422."""
    first = api.post("k-1", body=b'{"a": 1}', headers=[("Authorization", "Bearer alice")])
    other = api.post("k-1", body=b'{"b": 2}', headers=[("Authorization", "Bearer bob")])
    assert first.status == other.status == 201
    assert other.body != first.body
    assert other.reference != first.reference
    assert not other.is_replay
    assert api.effects() == 2


@pytest.mark.parametrize("name", ["X-Forwarded-User", "X-MS-Client-Principal-Id", "Client-Cert"])
def test_the_user_that_a_proxy_has_found_is_the_caller(api: Api, name: str):
    """S1, S2: `test_callers.py` has all of these headers."""
    first = api.post("k-1", headers=[(name, "alice")])
    other = api.post("k-1", headers=[(name, "bob")])
    assert not other.is_replay
    assert other.reference != first.reference
    assert api.post("k-1", headers=[(name, "alice")]).is_replay


@pytest.mark.parametrize("name", ["Cf-Access-Jwt-Assertion", "X-Amzn-Oidc-Data"])
def test_a_token_that_a_proxy_signs_for_each_request_is_not_the_caller(api: Api, name: str):
    """S2: or a retry would run again; who it is stands in a header beside it."""
    who = ("X-Amzn-Oidc-Identity", "alice")
    api.post("k-1", headers=[who, (name, "signed at noon")])
    assert api.post("k-1", headers=[who, (name, "signed a minute later")]).is_replay


def test_callers_that_share_a_certificate_are_distinguished_by_the_cookie(api: Api):
    """S1: it may be that of a whole service, or of the proxy in front."""
    service = ("X-Forwarded-Client-Cert", "Hash=1;Subject=CN=shop")
    api.post("k-1", headers=[service, ("Cookie", "session=alice")])
    other = api.post("k-1", headers=[service, ("Cookie", "session=bob")])
    assert (other.status, other.code) == (422, "key-reused")


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key"])
def test_a_retry_without_the_credential_never_sees_the_answer(api: Api, name: str):
    """S1."""
    api.post("k-1", headers=[(name, "secret")])
    assert not api.post("k-1").is_replay
    assert api.effects() == 2


def test_the_same_key_on_another_route_is_another_operation(api: Api):
    """S1: by path and by method."""
    api.post("k-1", "/orders")
    other_path = api.post("k-1", "/refunds")
    other_method = api.send("PATCH", "/orders", with_key("k-1"), b'{"item": 1}')
    assert not other_path.is_replay
    assert not other_method.is_replay
    assert len(api.shop.effects) == 3


@pytest.mark.served
def test_paths_that_differ_in_their_encoding_are_not_mixed_up(api: Api):
    """S1: /a%2Fb is one segment, and its answer is never that of another path."""
    first = api.post("k-1", "/orders/a%2Fb")
    other = api.post("k-1", "/orders/c")
    assert not other.is_replay
    assert other.reference != first.reference


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("/users/a~b", "/users/a%7Eb"),
        ("/users/a~b", "/users/a%7eb"),
        ("/%6frders", "/orders"),
        ("/caf%C3%A9", "/caf%c3%a9"),
        ("/a%2Fb%7E", "/a%2fb~"),
    ],
)
def test_one_path_is_one_operation_however_it_is_escaped(api: Api, path: str, other: str):
    """S1, L1: RFC 3986 §6.2.2; proxies and clients spell the same path in several ways."""
    first, again = api.post("k-1", path), api.post("k-1", other)
    assert again.is_replay
    assert again.reference == first.reference
    assert len(api.shop.effects) == 1


def test_a_percent_sign_that_is_no_escape_stays_as_it_was_sent(api: Api):
    """S1: a percent sign alone, and an escaped one, are no escapes."""
    paths = ["/a%257Eb", "/a%25~b", "/a~b"]
    assert not any(api.post("k-1", path).is_replay for path in paths)
    assert len({record.id for record in api.records()}) == len(paths)


def test_two_cookies_never_share_an_answer(api: Api):
    """S1: a cookie may be a session, so another one is refused rather than let in."""
    api.post("k-1", headers=[("Cookie", "session=alice")])
    other = api.post("k-1", headers=[("Cookie", "session=bob")])
    assert (other.status, other.code) == (422, "key-reused")
    assert api.effects() == 1


def test_the_caller_is_a_function_of_the_request(open_api: OpenApi):
    """S2: rotated credentials of one user are one caller if the application says so."""
    api = open_api(caller=lambda request: request.header(b"x-user").decode())
    first = api.post("k-1", headers=[("X-User", "alice"), ("Authorization", "Bearer old")])
    again = api.post("k-1", headers=[("X-User", "alice"), ("Authorization", "Bearer new")])
    other = api.post("k-1", headers=[("X-User", "bob"), ("Authorization", "Bearer old")])
    assert again.is_replay
    assert again.body == first.body
    assert not other.is_replay
    assert api.effects() == 2


@pytest.mark.parametrize(
    ("caller", "header"),
    [
        (callers.credential, "Authorization"),
        (callers.api_key(), "X-API-Key"),
        (callers.api_key("X-Tenant"), "X-Tenant"),
        (callers.user, "Authorization"),
        (callers.client_address(proxies=1), "X-Forwarded-For"),
    ],
    ids=["credential", "api_key", "named_header", "user", "client_address"],
)
def test_the_ready_callers_tell_two_callers_apart(open_api: OpenApi, caller, header: str):
    """S2."""
    api = open_api(caller=caller)
    api.post("k-1", headers=[(header, "198.51.100.7")])
    again = api.post("k-1", headers=[(header, "198.51.100.7")])
    other = api.post("k-1", headers=[(header, "198.51.100.8")])
    assert again.is_replay
    assert not other.is_replay
    assert api.effects() == 2


def test_a_cookie_can_be_the_caller(open_api: OpenApi):
    """S2: one cookie of several; the others may change."""
    api = open_api(caller=callers.cookie("session"))
    api.post("k-1", headers=[("Cookie", "ad=1; session=alice")])
    assert api.post("k-1", headers=[("Cookie", "session=alice; ad=2")]).is_replay
    assert not api.post("k-1", headers=[("Cookie", "session=bob; ad=1")]).is_replay
    assert api.effects() == 2


@pytest.mark.parametrize(
    "caller",
    [callers.api_key("X-Shop-Key"), callers.cookie("session"), lambda _request: ""],
    ids=["api_key", "cookie", "own"],
)
def test_where_the_caller_function_finds_nothing_the_default_counts(open_api: OpenApi, caller):
    """S1, S2: two credentials are two callers, although neither has what was looked for."""
    api = open_api(caller=caller)
    api.post("k-1", headers=[("Authorization", "Bearer alice")])
    assert not api.post("k-1", headers=[("Authorization", "Bearer bob")]).is_replay
    assert api.post("k-1", headers=[("Authorization", "Bearer alice")]).is_replay
    assert api.effects() == 2


def test_a_credential_is_never_stored_in_clear(api: Api):
    """S2: neither in the record nor in any of its parts."""
    api.post("k-1", headers=[("Authorization", "Bearer hunter2hunter2")])
    (record,) = api.records()
    assert "hunter2" not in repr(record)
    assert record.scope


@pytest.mark.parametrize("size", [1, 2_000_000])
def test_an_error_of_the_caller_function_runs_nothing(open_api: OpenApi, size: int):
    """S2: a failure never serves one caller as another; and no file stays open."""

    def caller(request):
        raise LookupError("no such tenant")

    api = open_api(caller=caller)
    failed = api.post(body=b"x" * size)
    assert isinstance(failed.error, LookupError)
    assert api.shop.effects == []


@pytest.mark.parametrize("method", METHODS)
def test_safe_methods_pass_untouched(open_api: OpenApi, method: str):
    """S3: also where a key is required."""
    api = open_api(required=True)
    first = api.send(method, "/orders", with_key("k-1"))
    api.send(method, "/orders", with_key("k-1"))
    api.send(method, "/orders")
    assert first.status == 201
    assert first.all("idempotency-reference") == []
    assert len(api.shop.effects) == 3
    assert api.records() == []


@pytest.mark.parametrize(
    ("method", "effects"), [("POST", 1), ("PATCH", 1), ("PUT", 2), ("DELETE", 2)]
)
def test_post_and_patch_are_guarded_by_default(api: Api, method: str, effects: int):
    """S3."""
    api.send(method, "/orders", with_key("k-1"), b"{}")
    api.send(method, "/orders", with_key("k-1"), b"{}")
    assert len(api.shop.effects) == effects


def test_put_and_delete_are_guarded_on_request(open_api: OpenApi):
    """S3: and what is left out is not."""
    api = open_api(methods={"PUT", "delete"})
    for method in ("PUT", "DELETE", "POST"):
        api.send(method, "/orders", with_key("k-1"))
        api.send(method, "/orders", with_key("k-1"))
    assert [call.method for call in api.shop.effects] == ["PUT", "DELETE", "POST", "POST"]


def test_with_a_secret_ids_cannot_be_worked_out(open_api: OpenApi):
    """S1: two deployments with two secrets have nothing in common."""
    one = open_api(settings={"secret": b"one"}).post()
    other = open_api(settings={"secret": "other"}).post()
    assert not other.is_replay
    assert one.reference != other.reference


@pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")
def test_a_method_in_lower_case_is_that_method(open_api: OpenApi):
    """
    S3, L1, K3: `fetch(url, {method: "patch"})` sends it as it is written.

    Django and Flask take it for PATCH, so its key must count.
    """
    api = open_api()
    for _ in range(2):
        api.send("patch", "/orders", with_key("k-1"), ORDER)
    assert api.effects() == 1
    strict = open_api(required=True)
    assert strict.send("post", "/orders", with_key(None), ORDER).status == 400


def test_a_header_s_value_names_a_caller_as_its_text_does(open_api: OpenApi):
    """S2: a function of the application's own need not know that headers are bytes."""
    one = open_api(caller=lambda request: request.header(b"x-user"))
    first = one.post("k-1", headers=[("X-User", "alice")])
    assert not one.post("k-1", headers=[("X-User", "bob")]).is_replay
    other = open_api(caller=callers.api_key("X-User"), shop=one.shop)
    assert other.post("k-1", headers=[("X-User", "alice")]).body == first.body
    assert one.effects() == 2
    assert one.post("k-1").status == 201  # no caller, so the default counts


def test_every_adapter_calls_a_path_what_its_client_did(api: Api):
    """S1: an application that moves from one to the other keeps its keys."""
    for sent in ("/orders/7:pay", "/orders/a@b,c;v=1/x!$&'()*+=", "/orders/a%20b%C3%BC"):
        assert api.record(api.post("k-1", path=sent).reference).label == f"POST {sent}"


# --- the name of a caller -------------------------------------------------------------------


def named(request: Request) -> callers.Named:
    """An account by its number, with a name that may change."""
    number, _, name = request.header(b"x-account").decode("latin-1").partition(" ")
    return callers.Named(int(number), name)


def account(text: str) -> list[tuple[str, str]]:
    return [("X-Account", text)]


@pytest.mark.persists
def test_operators_see_the_name_that_the_application_gives(open_api: OpenApi):
    """O1, S2: the name is no part of the identity, and of a retry nothing is stored."""
    api = open_api(caller=named)
    first = api.post(headers=account("7 Ada"))
    assert api.post(headers=account("7 Ada Lovelace")).is_replay
    assert not api.post(headers=account("8 Ada")).is_replay
    (record,) = (r for r in api.records() if first.reference in str(facts_of(r, 0)["reference"]))
    assert facts_of(record, 0)["caller_name"] == "Ada"
    assert dict(lines_of(record, 0))["caller"] == f"Ada ({record.scope})"


def test_a_caller_without_a_name_stores_nothing_more(open_api: OpenApi):
    """O1: no bytes, for a name that is not given."""
    api = open_api(caller=named)
    api.post(headers=account("7"))
    (record,) = api.records()
    assert record.progress is None
    assert facts_of(record, 0)["caller_name"] is None
    assert dict(lines_of(record, 0))["caller"] == record.scope


def test_a_name_does_not_use_up_a_key(open_api: OpenApi):
    """L4, O1: a request that was refused before its handler may be corrected."""
    api = open_api(caller=named)
    api.shop.answers["/orders"] = in_turn(says(401, b"log in"), says(500, b"no"), says(201, b"ok"))
    assert api.post(headers=account("7 Ada")).status == 401
    assert api.post(headers=account("7 Ada"), body=b"{}").status == 500
    (failed,) = api.records()
    assert (failed.state, facts_of(failed, 0)["caller_name"]) == (FAILED, "Ada")
    assert api.post(headers=account("7 Ada"), body=b"{}").body == b"ok"
    assert api.post(headers=account("7 Ada")).code == "key-reused"


def test_a_long_name_is_cut(open_api: OpenApi):
    """X2."""
    api = open_api(caller=lambda _request: callers.Named("7", "x" * 1_000))
    api.post()
    assert facts_of(api.records()[0], 0)["caller_name"] == "x" * 99 + "…"


def test_an_encrypted_store_has_the_name_only_encrypted(open_api: OpenApi):
    """X1, O1."""
    api = open_api(caller=named, settings={"keyring": KeyRing({"1": b"k" * 32})})
    api.post(headers=account("7 Lovelace"))
    (record,) = api.records()
    assert "Lovelace" not in repr(record)
    assert api.post(headers=account("7 Lovelace")).is_replay


def test_a_compact_store_keeps_no_name(open_api: OpenApi, tmp_path):
    """O1: as it keeps no key."""
    store = open_store(f"sqlite:///{tmp_path}/records.db?compact=1")
    api = open_api(caller=named, store=store)
    first = api.post(headers=account("7 Ada"))
    assert api.post(headers=account("7 Ada")).is_replay
    (record,) = api.records()
    assert (record.state, record.progress) == (COMPLETED, None)
    assert first.reference == facts_of(record, 0)["reference"]


@pytest.mark.parametrize(
    "returned",
    [callers.Named("7", 7), callers.Named(None, "Ada"), callers.Named("", "Ada")],
)
def test_a_name_must_be_a_text_and_belong_to_a_caller(open_api: OpenApi, returned):
    """S2: or the default would be the caller, under a name that is not its own."""
    api = open_api(caller=lambda _request: returned)
    assert "Named" in str(api.post().error)
    assert api.effects() == 0
