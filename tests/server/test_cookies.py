"""Which cookies hold a session, by the names of the world, and how signed ones are compared."""

import asyncio
import json
import sys
from base64 import b64encode

import flask
import httpx
import itsdangerous
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck import Misconfigured, MissingExtra
from coatcheck.server.asgi import IdempotencyMiddleware as Asgi
from coatcheck.server.cookies import SessionCookies
from coatcheck.server.wsgi import IdempotencyMiddleware as Wsgi

SESSIONS = b"""
    session sessionid SESSION session_id sess sid SID SSID HSID APISID SAPISID __Secure-3PSID
    connect.sid express.sid sails.sid express:sess koa.sess koa:sess rack.session PHPSESSID
    JSESSIONID JSESSIONIDSSO ASP.NET_SessionId ASPSESSIONIDQQABCDEF .AspNetCore.Session
    .AspNetCore.Cookies .AspNetCore.Identity.Application .AspNet.ApplicationCookie .ASPXAUTH CFID
    CFTOKEN CAKEPHP ci_session laravel_session _myapp_session _gitlab_session user_session PLAY_SESSION
    MoodleSession grafana_session sentrysid beaker.session.id webpy_session_id roundcube_sessid
    SSESS0a1b2c SESS0a1b2c wordpress_logged_in_0a1b wordpress_sec_0a1b phpbb3_x_sid phpbb3_x_u
    xf_session xf_user enwikiSession enwikiUserID enwikiToken __ac auth auth_token auth_session
    authToken access_token access_token_cookie refresh_token id_token token jwt accessToken
    sAccessToken sRefreshToken Authorization CF_Authorization bearer api_key apikey remember_token
    remember_web_59ba remember_user_token remember-me _identity fastapiusersauth sso sso_ticket
    next-auth.session-token __Secure-next-auth.session-token authjs.session-token __session
    __clerk_db_jwt __client appSession appSession.0 auth0 _oauth2_proxy mod_auth_openidc_session
    AWSELBAuthSessionCookie-0 KEYCLOAK_SESSION KEYCLOAK_IDENTITY AUTH_SESSION_ID SMSESSION
    iPlanetDirectoryPro FedAuth rtFa ESTSAUTHPERSISTENT MSISAuth ory_kratos_session authelia_session
    stytch_session_jwt wos-session better-auth.session_token sb-abcd-auth-token.0 hanko user user_id
    uid __Host-session __Secure-sid __Host-token __Host-Http-sid __Http-uid __Host-Http-uid
""".decode().split()
OTHERS = b"""
    _ga _ga_ABC123 _gid _gat _gat_UA-1 _gcl_au _gac_1 __utma __utmb __utmz _dc_gtm_UA-1 _fbp _fbc fr
    _hjSessionUser_1 _hjSession_1 _hjid _hjIncludedInSessionSample_1 _hjAbsoluteSessionInProgress
    ai_session ai_user _clck _clsk MUID _uetsid _uetvid _pk_id.1.1f _pk_ses.1.1f _sp_id.1f _sp_ses.1f
    ajs_anonymous_id ajs_user_id amplitude_id_1 AMP_1 AMP_MKTG_1 mp_1_mixpanel ph_1_posthog
    rl_session rl_anonymous_id _dd_s _parsely_session _parsely_visitor sbjs_session sbjs_current
    intercom-id-x intercom-session-x intercom-device-id-x hubspotutk __hstc __hssc __hssrc
    __stripe_mid __stripe_sid _shopify_s _shopify_y crisp-client%2Fsession%2F1 drift_aid driftt_aid
    optimizelyEndUserId _vwo_uuid _vis_opt_s __kla_id cto_bundle _ttp ttcsid _tt_enable_cookie
    _scid _pin_unauth _rdt_uuid li_sugr bcookie lidc UserMatchHistory AnalyticsSyncHistory IDE NID
    s_cc s_sq s_sess AMCV_1 AMCVS_1 kndctr_1_identify_x RT _gd_session analytics_session_id
    ab.storage.sessionId.1 __cf_bm cf_clearance __cfruid _cfuvid AWSALB AWSALBCORS AWSELB
    BIGipServerpool ARRAffinity ARRAffinitySameSite incap_ses_1_2 visid_incap_1 nlbi_1 datadome
    _abck bm_sz bm_sv ak_bmsc SERVERID ROUTEID
    csrftoken csrf_token _csrf csrf XSRF-TOKEN _xsrf __Host-csrf next-auth.csrf-token
    __Host-next-auth.csrf-token csrf_access_token csrf_refresh_token authenticity_token
    __RequestVerificationToken .AspNetCore.Antiforgery.x OpenIdConnect.nonce.x
    OptanonConsent OptanonAlertBoxClosed CookieConsent cookieyes-consent cookie_consent
    euconsent-v2 CookieScriptConsent cookielawinfo-checkbox-x borlabs-cookie eupubconsent-v2
    theme lang locale currency cart_id messages django_language NEXT_LOCALE sidebar_state density
""".decode().split()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_cookie_with_the_name_of_a_session_is_compared(name: str):
    """S4."""
    assert SessionCookies().session_of(f"a=1; {name}=x".encode()) != b""


@pytest.mark.parametrize("name", OTHERS)
def test_a_cookie_with_another_name_is_not_compared(name: str):
    """S4: statistics, advertisements, consent, forged requests, bots, load balancers, settings."""
    assert SessionCookies().session_of(f"a=1; {name}=x".encode()) == b""


@given(
    st.lists(st.sampled_from(SESSIONS), unique=True),
    st.lists(st.sampled_from(OTHERS), unique=True),
    st.randoms(use_true_random=False),
)
def test_only_sessions_count_however_they_are_mixed(sessions, others, random):
    """S4."""
    pairs = [f"{name}={name[::-1]}" for name in (*sessions, *others)]
    random.shuffle(pairs)
    alone = "; ".join(f"{name}={name[::-1]}" for name in sessions)
    cookies = SessionCookies()
    found = cookies.session_of("; ".join(pairs).encode())
    assert found == cookies.session_of(alone.encode())


@given(st.binary(max_size=200), st.sampled_from([None, {}, {"a": 1}, [1], "text"]))
def test_no_cookie_raises_an_error(cookie: bytes, content: object):
    """S4: whatever a client sends, and whatever a middleware calls a session."""
    for cookies in (SessionCookies(), SessionCookies(["*"], "secret")):
        found = cookies.session_of(cookie, content)
        assert b";verified;" not in found or b";verified;" in cookie


@pytest.mark.parametrize(
    "settings",
    [
        *({"session_cookies": "session"}, {"session_cookies": 7}, {"session_cookies": ("a b",)}),
        *({"session_cookies": ("",)}, {"session_cookies": (b"session",)}, {"session_secret": ""}),
        *({"session_secret": []}, {"session_secret": ["new", ""]}, {"session_secret": [7]}),
    ],
)
@pytest.mark.parametrize("kind", [Asgi, Wsgi])
def test_settings_that_cannot_be_meant_are_refused_at_start(kind, settings):
    """S4: without the secret in the message."""
    with pytest.raises(Misconfigured, match="session_") as error:
        kind(lambda: None, store="memory://", **settings)
    assert "new" not in str(error.value)


def test_a_missing_library_is_named(monkeypatch):
    """S4."""
    monkeypatch.setitem(sys.modules, "itsdangerous", None)
    with pytest.raises(MissingExtra, match=r"coatcheck\[itsdangerous\]"):
        SessionCookies(secret="s")


# --- sessions that are signed anew ----------------------------------------------------------

NOON, LATER = 1_700_000_000, 1_700_000_060


class SignedAt(itsdangerous.TimestampSigner):
    """Signs at a time of the test's choice."""

    now = NOON

    def get_timestamp(self) -> int:
        return self.now


def starlette_cookie(content: object, *, at: int, secret: str = "secret") -> bytes:
    signer = SignedAt(secret)
    signer.now = at
    return signer.sign(b64encode(json.dumps(content).encode()))


def flask_cookie(content: object, *, at: int, secret: str = "secret") -> bytes:
    app = flask.Flask("shop")
    app.secret_key = secret
    serializer = app.session_interface.get_signing_serializer(app)
    serializer.signer = SignedAt
    SignedAt.now = at
    try:
        return serializer.dumps(content).encode()
    finally:
        SignedAt.now = NOON


LARGE = {"user": "ada", "text": "a" * 500}  # Flask compresses it


@pytest.mark.parametrize("sign", [starlette_cookie, flask_cookie])
@pytest.mark.parametrize("content", [{"user": "ada"}, LARGE])
def test_a_session_that_was_signed_anew_is_the_same_where_the_secret_is_known(sign, content):
    """S4: also after the secret was rotated."""
    cookies = SessionCookies(secret=["secret", b"newer"])
    found = {
        cookies.session_of(b"session=" + sign(content, **signed))
        for signed in ({"at": NOON}, {"at": LATER}, {"at": LATER, "secret": "newer"})
    }
    assert len(found) == 1
    eve = cookies.session_of(b"session=" + sign({"user": "eve"}, at=NOON))
    assert eve not in found | {b""}


@pytest.mark.parametrize("sign", [starlette_cookie, flask_cookie])
def test_a_forged_cookie_is_never_the_session_that_it_imitates(sign):
    """S4, X3: without a signature, with a changed one, with one of another secret or moment."""
    cookies = SessionCookies(secret="secret")
    cookie = sign({"user": "ada"}, at=NOON)
    encoded, moment, signature = cookie.rsplit(b".", 2)
    other = sign({"user": "ada"}, at=LATER, secret="guessed")
    eve = sign({"user": "eve"}, at=NOON)
    forged = [
        *(encoded, encoded + b".", encoded + b"..", b"%b.%b" % (encoded, moment), other),
        b"%b.%b." % (encoded, moment),
        b"%b.%b.%b" % (encoded, other.rsplit(b".", 2)[1], signature),
        b"%b.%b" % (encoded, eve.split(b".", 1)[1]),
        b"%b.%b.%b" % (encoded, moment, signature[::-1]),
        b";verified;%b" % encoded,
        b"session;verified;%b" % encoded,
    ]
    ours = cookies.session_of(b"session=" + cookie)
    content = {"user": "eve"}  # what the middleware in front has read from another cookie
    for value in forged:
        assert cookies.session_of(b"session=" + value) != ours, value
        assert cookies.session_of(b"session=" + value, content) != ours, value
        assert SessionCookies().session_of(b"session=" + value, content) != ours, value


def test_without_a_secret_a_signed_cookie_is_compared_whole():
    """S4: its signature cannot be verified."""
    cookies = SessionCookies()
    found = {
        cookies.session_of(b"session=" + starlette_cookie({"user": "ada"}, at=at))
        for at in (NOON, LATER)
    }
    assert len(found) == 2


KEY = {"Idempotency-Key": "k-1"}


def shop(served: list[str], name: str, *, is_in_front: bool) -> Starlette:
    """A shop with Starlette's sessions, before or behind the guard."""

    async def order(request):
        served.append(request.session.get("user", "a guest"))
        return JSONResponse({"served": served[-1]}, 201)

    app = Starlette(routes=[Route("/orders", order, methods=["POST"])])
    sessions = {"secret_key": "secret", "session_cookie": name, "max_age": None}
    if not is_in_front:
        app.add_middleware(SessionMiddleware, **sessions)
    app.add_middleware(Asgi, store="memory://")
    if is_in_front:
        app.add_middleware(SessionMiddleware, **sessions)
    return app


@pytest.mark.parametrize("name", ["session", "shop_session"])
@pytest.mark.parametrize("is_in_front", [True, False])
def test_a_session_middleware_in_front_verifies_the_session(name: str, is_in_front):
    """S4: then its content is compared, whatever the cookie is called; else the whole cookie."""
    served: list[str] = []
    app = shop(served, name, is_in_front=is_in_front)

    async def posted(*cookies: bytes) -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [
                await client.post("/orders", headers={**KEY, "Cookie": f"{name}={cookie.decode()}"})
                for cookie in cookies
            ]

    ada, later = (starlette_cookie({"user": "ada"}, at=at) for at in (NOON, LATER))
    eve = starlette_cookie({"user": "eve"}, at=NOON)
    forged = starlette_cookie({"user": "ada"}, at=LATER, secret="guessed")
    bare = ada.split(b".")[0]
    answers = asyncio.run(posted(ada, later, eve, forged, bare, ada))
    resigned = 201 if is_in_front else 422
    assert [answer.status_code for answer in answers] == [201, resigned, 422, 422, 422, 201]
    assert "most likely the session cookie differs" in answers[2].json()["detail"]
    assert served == ["ada"]


def test_a_polling_address_is_for_the_session_that_the_request_came_with():
    """S4, L10: also if the handler has changed the session before the client got the address."""
    may_end = asyncio.Event()

    async def cut(request):
        request.session["films"] = 1
        await request.scope["coatcheck.operation"].accept()
        await may_end.wait()
        return JSONResponse("cut")

    app = Starlette(routes=[Route("/films", cut, methods=["POST"])])
    app.add_middleware(Asgi, store="memory://")
    app.add_middleware(SessionMiddleware, secret_key="secret", max_age=None)
    cookie = {"Cookie": f"session={starlette_cookie({'user': 'ada'}, at=NOON).decode()}"}

    async def story() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            accepted = await client.post("/films", headers={**KEY, **cookie})
            assert accepted.status_code == 202
            client.cookies.clear()
            polled = await client.get(accepted.headers["location"], headers=cookie)
            assert polled.status_code == 202
            may_end.set()

    asyncio.run(story())


def test_a_flask_session_that_was_signed_anew_is_the_same_session():
    """S4: over WSGI, with the secret of the application."""
    app, served = flask.Flask("shop"), []
    app.secret_key = "secret"

    @app.post("/orders")
    def order():
        served.append(flask.session.get("user"))
        return {"served": served[-1]}, 201

    app.wsgi_app = Wsgi(app.wsgi_app, store="memory://", session_secret=app.secret_key)
    client = app.test_client(use_cookies=False)
    signed = [flask_cookie({"user": "ada"}, at=NOON), flask_cookie({"user": "ada"}, at=LATER)]
    signed.append(flask_cookie({"user": "ada"}, at=LATER, secret="guessed"))
    statuses = [
        client.post("/orders", headers={**KEY, "Cookie": f"session={one.decode()}"}).status_code
        for one in signed
    ]
    assert statuses == [201, 201, 422]
    assert len(served) == 1
    app.wsgi_app.engine.close()
