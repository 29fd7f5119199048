"""Verified JSON Web Tokens as callers: who is accepted, and that everyone else is refused."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Engine, Misconfigured, MissingExtra
from coatcheck.server import callers
from coatcheck.server.asgi import IdempotencyMiddleware as Asgi
from coatcheck.server.callers import Refused
from coatcheck.server.guard import NoHosts, RequestGuard
from coatcheck.server.request import Request
from tests.support.http import AsgiExchange, with_key

SECRET = "a secret of at least sixty-four bytes, so that it fits every algorithm"
RSA = rsa.generate_private_key(65_537, 2_048)
OTHER_RSA = rsa.generate_private_key(65_537, 2_048)
EC = ec.generate_private_key(ec.SECP256R1())
PEM = RSA.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
PRIVATE_PEM = RSA.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)


def jwk(key: rsa.RSAPrivateKey, name: str) -> dict[str, object]:
    public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": name, "alg": "RS256", "use": "sig"}


JWKS = {"keys": [jwk(RSA, "one"), jwk(OTHER_RSA, "two")]}


def token(key=SECRET, algorithm="HS256", headers=None, **claims) -> str:
    given = {"sub": "ada", "exp": time.time() + 86_400, **claims}  # some are made at import
    kept = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(kept, key, algorithm, headers)


def request(value: str | bytes, header: str = "authorization") -> Request:
    raw = value if isinstance(value, bytes) else value.encode("latin-1")
    fields = {header.lower().encode(): raw} if raw else {}
    return Request("POST", "/", b"", fields, b"", {})


def bearer(value: str) -> Request:
    return request(f"Bearer {value}")


def assert_refused(caller, asked: Request, challenge: str = 'Bearer error="invalid_token"') -> None:
    with pytest.raises(Refused) as refused:
        caller(asked)
    assert refused.value.status == 401
    assert refused.value.headers == (("WWW-Authenticate", challenge),)


HS = callers.jwt(SECRET, algorithms=["HS256"])


def test_a_refreshed_token_is_the_same_caller():
    """S2: and another claim, or another issuer, is another caller."""
    old = HS(bearer(token(exp=time.time() + 1)))
    assert HS(bearer(token(exp=time.time() + 99, iat=time.time(), jti="2"))) == old
    issuers = ["https://a", "https://b", 'https://a", "sub', None]
    made = {HS(bearer(token(iss=iss, sub=sub))) for iss in issuers for sub in ("ada", "eve")}
    assert len(made) == 8
    assert old in made


@pytest.mark.parametrize(
    ("key", "algorithms", "signed"),
    [
        (SECRET, ["HS256", "HS512"], token(algorithm="HS512")),
        (SECRET.encode(), ["HS256"], token()),
        (PEM, ["RS256"], token(RSA, "RS256")),
        (PEM.decode(), ["RS256", "PS256"], token(RSA, "PS256")),
        (JWKS, ["RS256"], token(OTHER_RSA, "RS256", {"kid": "two"})),
        (JWKS["keys"][0], ["RS256"], token(RSA, "RS256")),
        ({"keys": [jwk(RSA, "one")]}, ["RS256"], token(RSA, "RS256")),
        (jwt.PyJWK(jwk(RSA, "one")), ["RS256"], token(RSA, "RS256")),
        (jwt.PyJWKSet.from_dict(JWKS), ["RS256"], token(RSA, "RS256", {"kid": "one"})),
        (EC.public_key(), ["ES256"], token(EC, "ES256")),
    ],
)
def test_every_kind_of_key_verifies_a_token(key, algorithms, signed):
    """S2."""
    assert "ada" in callers.jwt(key, algorithms=algorithms)(bearer(signed))


def unsigned(**claims: object) -> str:
    """A token that says itself that it has no signature."""
    parts = ({"alg": "none", "typ": "JWT"}, {"sub": "ada", **claims})
    encoded = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts]
    return b".".join((*encoded, b"")).decode()


def changed(signed: str, **claims: object) -> str:
    """A token with other claims under the signature of *signed*."""
    head, _, signature = signed.split(".")
    return f"{head}.{token(**claims).split('.')[1]}.{signature}"


STRICT = callers.jwt(
    SECRET, algorithms=["HS256"], audience="shop", issuer=["https://a", "https://b"]
)
PUBLIC = callers.jwt(PEM, algorithms=["RS256"])
SET = callers.jwt(JWKS, algorithms=["RS256"])


def hmac_with(key: bytes) -> str:
    """A token that is signed with a public key as if it were an HMAC secret."""
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": "ada"})
    encoded = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts]
    made = hmac.new(key, b".".join(encoded), hashlib.sha256).digest()
    return b".".join((*encoded, base64.urlsafe_b64encode(made).rstrip(b"="))).decode()


@pytest.mark.parametrize(
    ("caller", "signed"),
    [
        (HS, token(exp=1)),
        (HS, token(nbf=time.time() + 86_400)),
        (HS, token(SECRET[::-1])),
        (HS, changed(token(), sub="eve")),
        (HS, unsigned()),
        (HS, token(algorithm="HS384")),
        (HS, token(sub=None)),
        (HS, token(sub="")),
        (HS, token(aud="shop")),
        (callers.jwt(SECRET, algorithms=["HS256"], claim="n"), token(n=True)),
        (callers.jwt(SECRET, algorithms=["HS256"], claim="n"), token(n=["ada"])),
        (callers.jwt(SECRET, algorithms=["HS256"], claim="n"), token()),
        (STRICT, token(iss="https://a")),
        (STRICT, token(iss="https://a", aud="other")),
        (STRICT, token(iss="https://c", aud="shop")),
        (STRICT, token(aud="shop")),
        (PUBLIC, token(OTHER_RSA, "RS256")),
        (PUBLIC, hmac_with(PEM)),
        (PUBLIC, unsigned()),
        (SET, token(RSA, "RS256", {"kid": "two"})),
        (SET, token(RSA, "RS256", {"kid": "three"})),
        (SET, token(RSA, "RS256")),
        (SET, hmac_with(PEM)),
        (HS, "nonsense"),
        (HS, "a.b.c"),
        (HS, "é"),
    ],
)
def test_a_token_that_is_not_valid_is_refused(caller, signed):
    """S2: RFC 6750 §3.1."""
    assert_refused(caller, bearer(signed))


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer  ", "Basic YTpi", "Digest x", token()])
def test_a_request_without_a_token_is_asked_for_one(value):
    """S2: RFC 6750 §3: without an error code, because it has made no error yet."""
    assert_refused(HS, request(value), "Bearer")


@given(st.binary(max_size=300))
def test_no_bytes_are_an_error_of_the_application(value: bytes):
    """S2."""
    for caller in (HS, SET):
        with pytest.raises(Refused):
            caller(request(b"Bearer " + value))


def test_a_header_that_is_nested_deeply_is_refused():
    """S2: it fits into a header, and is parsed before its signature is verified."""
    nested = base64.urlsafe_b64encode(b'{"a":' + b"[" * 40_000).rstrip(b"=").decode()
    for caller in (HS, SET):
        assert_refused(caller, bearer(f"{nested}.e30.AAAA"))


def test_the_settings_choose_claim_header_issuer_and_leeway():
    """S2: a header of another name has the token alone, or after its scheme."""
    caller = callers.jwt(SECRET, algorithms=["HS256"], claim="email", header="X-Token")
    alone = caller(request(token(email="a@b"), "X-Token"))
    assert caller(request(f"bearer {token(email='a@b')}", "X-Token")) == alone
    assert_refused(caller, request(f"Basic {token(email='a@b')}", "X-Token"), "Bearer")
    assert_refused(caller, bearer(token(email="a@b")), "Bearer")
    number = callers.jwt(SECRET, algorithms=["HS256"], claim="n")
    assert number(bearer(token(n=7))) != number(bearer(token(n="7")))
    assert "ada" in STRICT(bearer(token(iss="https://b", aud=["shop", "x"])))
    late = bearer(token(exp=time.time() - 5))
    assert_refused(HS, late)
    for leeway in (60, timedelta(minutes=1)):
        assert callers.jwt(SECRET, algorithms=["HS256"], leeway=leeway)(late)


@pytest.mark.parametrize(
    ("key", "settings", "why"),
    [
        (SECRET, {"algorithms": ["HS256", "RS256"]}, "may not be mixed"),
        (PEM, {"algorithms": ["RS256", "HS256"]}, "may not be mixed"),
        (SECRET, {"algorithms": []}, "it must be a list"),
        (SECRET, {"algorithms": "HS256"}, "it must be a list"),
        (SECRET, {"algorithms": ["none"]}, "not an algorithm that signs"),
        (SECRET, {"algorithms": [7]}, "not an algorithm that signs"),
        (SECRET, {"algorithms": ["HS1"]}, "'HS1'"),
        (SECRET, {"algorithms": ["RS256"]}, "does not fit"),
        (PEM, {"algorithms": ["HS256"]}, "does not fit"),
        (PEM, {"algorithms": ["ES256"]}, "does not fit"),
        ("", {"algorithms": ["HS256"]}, "does not fit"),
        (None, {"algorithms": ["HS256"]}, "does not fit"),
        ({}, {"algorithms": ["RS256"]}, "does not fit"),
        ({"keys": []}, {"algorithms": ["RS256"]}, "does not fit"),
        (JWKS, {"algorithms": ["HS256"]}, "does not fit"),
        (PRIVATE_PEM, {"algorithms": ["RS256"]}, "private key"),
        (SECRET, {"algorithms": ["HS256"], "claim": ""}, "claim"),
        (SECRET, {"algorithms": ["HS256"], "audience": 7}, "audience"),
        (SECRET, {"algorithms": ["HS256"], "issuer": []}, "issuer"),
        (SECRET, {"algorithms": ["HS256"], "leeway": "1"}, "leeway"),
    ],
)
def test_settings_that_are_wrong_or_unsafe_are_refused_at_start(key, settings, why):
    """S2: and the message has no key in it."""
    with pytest.raises(Misconfigured, match=re.escape(why)) as error:
        callers.jwt(key, **settings)
    assert SECRET not in str(error.value)


def test_the_algorithms_must_be_given():
    """S2."""
    with pytest.raises(TypeError, match="algorithms"):
        callers.jwt(SECRET)


def test_a_missing_library_is_named(monkeypatch):
    """S2."""
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(sys.modules, "coatcheck.server.tokens")
    with pytest.raises(MissingExtra, match=r"pip install 'coatcheck\[jwt\]'"):
        callers.jwt(SECRET, algorithms=["HS256"])


# --- keys that are fetched ------------------------------------------------------------------


class KeyServer:
    """Serves a JWKS on loopback, and remembers which threads were waiting for it."""

    def __init__(self) -> None:
        self.document = JWKS
        self.fetched = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.fetched += 1
                body = json.dumps(outer.document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks.json"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def key_server():
    server = KeyServer()
    yield server
    server.close()


def test_fetched_keys_verify_tokens(key_server: KeyServer):
    """S2: an unknown key is refused."""
    caller = callers.jwt(jwt.PyJWKClient(key_server.url), algorithms=["RS256"])
    assert "ada" in caller(bearer(token(RSA, "RS256", {"kid": "one"})))
    for unknown in ({"kid": "three"}, None):
        assert_refused(caller, bearer(token(RSA, "RS256", unknown)))
    assert_refused(caller, bearer("nonsense"))
    assert key_server.fetched == 1


def test_keys_that_cannot_be_fetched_are_an_outage_and_no_refusal(key_server: KeyServer):
    """S2: the client may retry; its token may well be valid."""
    key_server.close()
    caller = callers.jwt(jwt.PyJWKClient(key_server.url, timeout=1), algorithms=["RS256"])
    with pytest.raises(Refused) as refused:
        caller(bearer(token(RSA, "RS256", {"kid": "one"})))
    assert (refused.value.status, refused.value.headers) == (503, (("Retry-After", "1"),))


def test_fetching_keys_does_not_block_the_event_loop(key_server: KeyServer):
    """S2: it runs in a thread."""
    threads: list[int] = []

    class Watched(jwt.PyJWKClient):
        def fetch_data(self):
            threads.append(threading.get_ident())
            return super().fetch_data()

    async def main() -> list[int]:
        caller = callers.jwt(Watched(key_server.url), algorithms=["RS256"])
        guarded = Asgi(app, store="memory://", caller=caller)
        statuses = []
        for signed in (token(RSA, "RS256", {"kid": "one"}), unsigned()):
            headers = with_key("k-1", [("Authorization", f"Bearer {signed}")])
            response = await AsgiExchange("POST", "/", headers, b"{}").run(guarded)
            statuses.append(response.status)
        await guarded.engine.close()
        return statuses

    async def app(_asgi_scope, _receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert asyncio.run(main()) == [201, 401]
    assert threads
    assert threading.get_ident() not in threads


def test_no_claim_is_stored_in_clear():
    """S2."""
    engine = Engine("memory://")
    asked = bearer(token(sub="ada@example.com"))
    asked.caller = HS(asked)
    claim = RequestGuard(engine, HS, None, NoHosts()).claim_request(asked, engine.policy, "k", None)
    assert "ada" not in repr(claim)
    assert claim.scope
