"""Callers: functions of the request that return whose key it is.

There are functions for credentials, verified tokens, certificates, the framework's user, a cookie
and the client's address. What they return is digested, so that it is never stored in clear. Your
own is `def caller(request: Request) -> str`; over ASGI it may be `async def`. It must return the
same text for each retry of the same user, also after a token was refreshed. `Named(caller, name)`
adds a name that operators see. If it returns None or "", the default identifies the caller. If it
raises `Refused`, or an exception that the framework would turn into a response, such as
`HTTPException(401)`, the client gets that response: nothing runs, nothing is stored and nothing is
replayed. Any other exception is an error of the application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from coatcheck.core.answers import Happened
from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.server.request import Request

if TYPE_CHECKING:
    from coatcheck.server.tokens import Key


@dataclass(frozen=True, slots=True)
class Named:
    """
    What a `caller=` function may return: the caller, and its name for operators.

    Only *caller* decides whose key it is. `coatcheck lookup` shows the *name*, up to 100 characters
    of it. It is stored in clear, unless the engine has a key ring; a compact store drops it, and
    `coatcheck erase` deletes it with the record.
    """

    caller: str | bytes | int | UUID
    name: str


CallerValue: TypeAlias = str | bytes | int | UUID | Named | None

# What `caller=` takes. If it returns None, the default identifies the caller.
Caller: TypeAlias = Callable[[Request], CallerValue]

# What `caller=` also takes over ASGI.
AsyncCaller: TypeAlias = Callable[[Request], Awaitable[CallerValue]]


class Refused(Exception):
    """
    Raised by a `caller=` function: the client gets this response, and nothing runs.

    Args:
        status: of the response, 300 to 599.
        detail: the reason, for the client; it is the `detail` of a problem document.
        headers: of the response, such as `[("WWW-Authenticate", "Bearer")]`.
        body: replaces the problem document; give its `Content-Type` in *headers*.
    """

    def __init__(
        self,
        status: int = 401,
        detail: str = "the credentials of this request are missing or not valid",
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
    ) -> None:
        super().__init__(detail)
        Happened(status, tuple(headers), body or b"")  # which checks them
        if status < 300:
            raise Misconfigured(f"a refusal has a status from 300 to 599, not {status}")
        self.status = status
        self.detail = detail
        self.headers = tuple(headers)
        self.body = body


# Those of the headers below that may identify an application and not one of its users: an API key,
# or the certificate of the application or of a proxy.
SHARED = frozenset(
    b"""x-api-key api-key apikey x-apikey client-cert x-forwarded-client-cert ssl-client-cert
    ssl-client-subject-dn x-amzn-mtls-clientcert x-amzn-mtls-clientcert-subject
    x-arr-clientcert""".split()
)
# The headers that credentials usually come in, and those in which an authenticating proxy names the
# user. If one of them changes between retries, the retry counts as another caller's, which is the
# safe mistake. Headers that a proxy signs anew for each request are not among them
# (Cf-Access-Jwt-Assertion, X-Amzn-Oidc-Data): every retry would run again.
CREDENTIALS = SHARED.union(
    b"""authorization proxy-authorization x-auth-token x-access-token x-session-token
    x-forwarded-user x-auth-request-user x-remote-user remote-user
    cf-access-authenticated-user-email x-amzn-oidc-identity x-goog-authenticated-user-id
    x-goog-authenticated-user-email x-ms-client-principal-id""".split()
)
CREDENTIAL_NAMES = tuple(sorted(CREDENTIALS))


def credential(request: Request) -> str | None:
    """
    The credentials of the request: `Authorization`, `X-API-Key` and similar headers.

    Also the user whom a proxy in front has authenticated, such as `X-Forwarded-User`. It is part of
    the default.

    Two credentials never share a key. If tokens are refreshed between retries, use `user` or a
    function of your own: a retry with the new token would count as another caller's request.
    """
    if CREDENTIALS.isdisjoint(request.fields):
        return None
    return credential_text((name, request.fields.get(name)) for name in CREDENTIAL_NAMES) or None


def credential_text(headers: Iterable[tuple[bytes, bytes | None]]) -> str:
    """Those of *headers* that were sent, as one text."""
    lines = (b"%b: %b\n" % (name, value) for name, value in headers if value is not None)
    return b"".join(lines).decode("latin-1")


def api_key(header: str = "X-API-Key") -> Caller:
    """The value of one header."""
    name = header.lower().encode()
    return lambda request: request.header(name).decode("latin-1") or None


def cookie(name: str) -> Caller:
    """The value of one cookie, such as the session's."""
    if not name or any(character in name for character in "=; \t"):
        raise Misconfigured(f"{name!r} cannot be the name of a cookie")

    def caller(request: Request) -> str | None:
        for pair in request.header(b"cookie").decode("latin-1").split(";"):
            found, _, value = pair.strip().partition("=")
            if found == name:
                return value or None
        return None

    return caller


def jwt(
    key: Key,
    *,
    algorithms: Sequence[str],
    audience: str | Sequence[str] | None = None,
    issuer: str | Sequence[str] | None = None,
    claim: str = "sub",
    header: str = "Authorization",
    leeway: float | timedelta = 0,
) -> Caller:
    """
    One claim of the verified JSON Web Token in the request, and its issuer.

    A refreshed token with the same claim is the same caller. A request without a valid token gets
    401 with a `WWW-Authenticate` header (RFC 6750). Needs `coatcheck[jwt]`.

    Args:
        key: a secret, or a public key as PEM; a JWK or JWKS, as `PyJWK`, `PyJWKSet` or dict; or a
            `jwt.PyJWKClient`, which fetches them.
        algorithms: those that tokens may be signed with, such as `["RS256"]`. HMAC and public keys
            may not be mixed, because anyone could sign with the public key as an HMAC secret.
        audience: whom the token must be for; None: it must name no audience.
        issuer: who must have issued the token, or one of several.
        claim: which claim names the user; the request is refused if it is not in the token.
        header: where the token is: after `Bearer`, or alone in a header of another name.
        leeway: by how many seconds clocks may differ.
    """
    try:
        from coatcheck.server.tokens import TokenCaller  # noqa: PLC0415 - needs PyJWT
    except ImportError as error:
        raise MissingExtra("jwt", "PyJWT") from error
    return TokenCaller(
        key,
        algorithms=algorithms,
        claim=claim,
        header=header,
        checks={"audience": audience, "issuer": issuer, "leeway": leeway},
    )


def user(request: Request) -> str | None:
    """
    The user that an authentication middleware in front of ours has found.

    Starlette's `scope["user"]`, or WSGI's `REMOTE_USER`. Frameworks that find the user later, such
    as Django and Flask-Login, need a function of your own. For a request without a user the default
    identifies the caller.
    """
    found: Any = request.native.get("user") or request.native.get("REMOTE_USER")
    if found and isinstance(found, str):
        return f"user {found}"
    if getattr(found, "is_authenticated", False):
        for attribute in ("identity", "id", "pk", "username"):
            try:
                value = getattr(found, attribute)
            except (AttributeError, NotImplementedError):
                continue
            if value is not None:
                return f"user {attribute} {value}"
    return None


def client_certificate(request: Request) -> str | None:
    """
    The client's TLS certificate: ASGI's `tls` extension, or WSGI's `SSL_CLIENT_S_DN`.

    Its subject, which a renewed certificate keeps, or else the certificate itself. It is part of
    the default. A proxy passes the certificate in a header: see `credential`.
    """
    native = request.native
    tls: Any = (native.get("extensions") or {}).get("tls")
    if tls:
        chain, verified = iter(tls.get("client_cert_chain") or ()), tls.get("client_cert_error")
        found = tls.get("client_cert_name") or next(chain, None)
    else:
        verified = native.get("SSL_CLIENT_VERIFY")
        found = native.get("SSL_CLIENT_S_DN") or native.get("SSL_CLIENT_CERT")
    # If the server accepts unverified certificates, the subject may be forged.
    return f"certificate {verified or 'SUCCESS'} {found}" if found else None


def client_address(*, proxies: int = 0) -> Caller:
    """
    The client's network address.

    *proxies*: how many proxies of your own stand in front. The address is the one that the
    outermost of them wrote into `X-Forwarded-For`. If the number is wrong, a client can forge its
    address. All clients behind one gateway are one caller, so prefer a credential.
    """
    if proxies < 0:
        raise Misconfigured(f"proxies is {proxies}; it must be the number of your own proxies")

    def caller(request: Request) -> str | None:
        if proxies:
            hops = request.header(b"x-forwarded-for").decode("latin-1").split(",")
            if len(hops) >= proxies and hops[-proxies].strip():
                return hops[-proxies].strip()
        client: Any = request.native.get("client")
        found = client[0] if client else request.native.get("REMOTE_ADDR")
        return str(found) if found else None

    return caller
