"""Whose key it is: the ready `caller=` functions, value by value."""

import pytest
from starlette.authentication import SimpleUser, UnauthenticatedUser

from coatcheck import Engine, Misconfigured
from coatcheck.server import callers
from coatcheck.server.guard import NoHosts, RequestGuard
from coatcheck.server.request import Request


def request(native=(), **headers: str) -> Request:
    """A request with these headers; `x_api_key` is X-API-Key."""
    fields = {n.replace("_", "-").encode(): v.encode("latin-1") for n, v in headers.items()}
    return Request("POST", "/", b"", fields, b"", dict(native))


# --- credentials ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"authorization": "a"}, {"authorization": "b"}),
        ({"authorization": "a"}, {}),
        ({"authorization": "a"}, {"x_api_key": "a"}),
        ({"authorization": "ab"}, {"authorization": "a", "x_api_key": "b"}),
        ({"x_api_key": "a"}, {"x_api_key": "A"}),
        ({"authorization": "Basic \xff"}, {"authorization": "Basic \xfe"}),
    ],
)
def test_two_credentials_are_never_one_caller(one, other):
    """S1, S2: however they are spread over the two headers."""
    assert callers.credential(request(**one)) != callers.credential(request(**other))


# Spelt out, because one that is forgotten there would be forgotten here.
OF_USERS = (
    *("authorization", "proxy-authorization"),
    *("x-auth-token", "x-access-token", "x-session-token"),
    *("x-forwarded-user", "x-auth-request-user", "x-remote-user", "remote-user"),
    *("cf-access-authenticated-user-email", "x-amzn-oidc-identity", "x-ms-client-principal-id"),
    *("x-goog-authenticated-user-id", "x-goog-authenticated-user-email"),
)
OF_APPLICATIONS = (
    *("x-api-key", "api-key", "apikey", "x-apikey"),
    *("client-cert", "x-forwarded-client-cert", "ssl-client-cert", "ssl-client-subject-dn"),
    *("x-amzn-mtls-clientcert", "x-amzn-mtls-clientcert-subject", "x-arr-clientcert"),
)


@pytest.mark.parametrize("name", [*OF_USERS, *OF_APPLICATIONS])
def test_two_values_of_any_credential_are_two_callers(name: str):
    """S1, S2: whichever header it comes in."""
    found = {callers.credential(request(**{name: value})) for value in ("a", "b")}
    assert len(found | {callers.credential(request())}) == 3


def test_no_header_is_taken_for_a_credential_that_is_not_looked_at_here():
    """S2."""
    assert {name.encode() for name in (*OF_USERS, *OF_APPLICATIONS)} == callers.CREDENTIALS
    assert {name.encode() for name in OF_APPLICATIONS} == callers.SHARED


def test_one_credential_is_one_caller():
    """S2."""
    sent = {"authorization": "Bearer t", "x_api_key": "k"}
    assert callers.credential(request(**sent)) == callers.credential(request(**sent))


def test_an_api_key_can_be_in_any_header():
    """S2: and a credential beside it does not matter then."""
    caller = callers.api_key("X-Tenant")
    assert caller(request(x_tenant="t", authorization="one")) == "t"
    assert caller(request(x_tenant="t", authorization="other")) == "t"
    assert callers.api_key()(request(x_api_key="k")) == "k"


@pytest.mark.parametrize("caller", [callers.credential, callers.api_key(), callers.api_key("X-T")])
def test_a_request_without_a_credential_has_no_caller_of_its_own(caller):
    """S1, S2: then the default decides."""
    assert caller(request(accept="*/*")) is None


# --- cookies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cookie", "found"),
    [
        ("session=s", "s"),
        ("a=1; session=s; b=2", "s"),
        ("a=1;session=s", "s"),
        ("session=a=b", "a=b"),
        ("xsession=s", None),
        ("session", None),
        ("session=", None),
        ("", None),
    ],
)
def test_one_cookie_of_many_can_be_the_caller(cookie: str, found: str | None):
    """S2: by its exact name."""
    assert callers.cookie("session")(request(cookie=cookie)) == found


@pytest.mark.parametrize("name", ["", "a b", "a=b", "a;b"])
def test_what_cannot_be_a_cookie_is_refused_at_start(name: str):
    """S2."""
    with pytest.raises(Misconfigured):
        callers.cookie(name)


# --- the framework's user -------------------------------------------------------------------


class Model:
    """A user as an ORM gives it."""

    is_authenticated = True

    def __init__(self, id: int | None) -> None:
        self.id = id


def test_the_user_goes_before_the_credential():
    """S2: a refreshed token is the same user."""
    old = callers.user(request({"user": Model(7)}, authorization="old"))
    new = callers.user(request({"user": Model(7)}, authorization="new"))
    other = callers.user(request({"user": Model(8)}, authorization="old"))
    assert old == new != other


def test_starlettes_and_wsgis_users_are_found():
    """S2."""
    assert callers.user(request({"user": SimpleUser("alice")})) != callers.user(
        request({"user": SimpleUser("bob")})
    )
    assert callers.user(request({"REMOTE_USER": "alice"})) != callers.user(
        request({"REMOTE_USER": "bob"})
    )


NOBODY = [{}, {"user": UnauthenticatedUser()}, {"REMOTE_USER": ""}, {"user": Model(None)}]


@pytest.mark.parametrize("native", NOBODY)
def test_without_a_logged_in_user_the_default_decides(native):
    """S2: two strangers are not one, and neither are two sessions."""
    assert callers.user(request(native, authorization="a")) is None


def test_a_user_cannot_be_named_like_a_credential():
    """S1, S2: the kinds of identity do not meet."""
    credential = callers.credential(request(authorization="x"))
    assert callers.user(request({"REMOTE_USER": credential})) != credential


# --- certificates ---------------------------------------------------------------------------


def over_tls(**said: object) -> dict[str, object]:
    return {"extensions": {"tls": said}}


ALICE, BOB = "CN=alice", "CN=bob"
CERTIFIED = [
    (over_tls(client_cert_name=ALICE), over_tls(client_cert_name=BOB)),
    (over_tls(client_cert_chain=["PEM 1", "ca"]), over_tls(client_cert_chain=["PEM 2", "ca"])),
    (over_tls(client_cert_name=ALICE), over_tls(client_cert_name=ALICE, client_cert_error="no")),
    (over_tls(client_cert_name=ALICE), over_tls(client_cert_name=None, client_cert_chain=())),
    ({"SSL_CLIENT_S_DN": ALICE}, {"SSL_CLIENT_S_DN": BOB}),
    ({"SSL_CLIENT_CERT": "PEM 1"}, {"SSL_CLIENT_CERT": "PEM 2"}),
    (
        {"SSL_CLIENT_S_DN": ALICE, "SSL_CLIENT_VERIFY": "SUCCESS"},
        {"SSL_CLIENT_S_DN": ALICE, "SSL_CLIENT_VERIFY": "FAILED:self signed"},
    ),
]


@pytest.mark.parametrize(("one", "other"), CERTIFIED)
def test_two_certificates_are_two_callers(one, other):
    """S1, S2: as the server reports them; one that was not verified is another caller."""
    alice = callers.client_certificate(request(one))
    assert alice == callers.client_certificate(request(one))
    assert alice != callers.client_certificate(request(other))


@pytest.mark.parametrize(("one", "other"), CERTIFIED)
def test_the_default_caller_knows_certificates(one, other):
    """S1: by default."""
    engine = Engine("memory://")
    guard = RequestGuard(engine, None, None, NoHosts())
    ids = {guard.claim_request(request(n), engine.policy, "k", None).id for n in (one, other, one)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    "native",
    [
        *({}, {"extensions": None}, {"extensions": {}}, {"extensions": {"tls": {}}}),
        {"SSL_CLIENT_VERIFY": "NONE", "SSL_CLIENT_S_DN": ""},
    ],
)
def test_without_a_certificate_nothing_changes(native):
    """S2: the default decides, and is the same caller as without TLS."""
    assert callers.client_certificate(request(native)) is None
    engine = Engine("memory://")
    guard = RequestGuard(engine, None, None, NoHosts())
    ids = {guard.claim_request(request(n), engine.policy, "k", None).id for n in (native, {})}
    assert len(ids) == 1


# --- addresses ------------------------------------------------------------------------------


def test_the_address_is_that_of_the_connection():
    """S2: over ASGI and WSGI; what a client writes about itself does not count."""
    caller = callers.client_address()
    assert caller(request({"client": ("192.0.2.1", 1234)})) == "192.0.2.1"
    assert caller(request({"REMOTE_ADDR": "192.0.2.1"}, x_forwarded_for="6.6.6.6")) == "192.0.2.1"
    assert caller(request({"client": None})) is None
    assert caller(request({"client": ("", 0)})) is None
    assert caller(request()) is None


@pytest.mark.parametrize(
    ("proxies", "forwarded", "found"),
    [
        (1, "198.51.100.7", "198.51.100.7"),
        (1, "6.6.6.6, 198.51.100.7", "198.51.100.7"),
        (2, "6.6.6.6, 198.51.100.7, 10.0.0.1", "198.51.100.7"),
        (2, "198.51.100.7", "192.0.2.1"),
        (1, "", "192.0.2.1"),
    ],
)
def test_behind_proxies_the_outermost_of_them_is_believed(proxies, forwarded, found):
    """S2: whatever a client has written before it."""
    caller = callers.client_address(proxies=proxies)
    assert caller(request({"REMOTE_ADDR": "192.0.2.1"}, x_forwarded_for=forwarded)) == found


def test_a_negative_number_of_proxies_is_refused_at_start():
    """S2."""
    with pytest.raises(Misconfigured):
        callers.client_address(proxies=-1)
