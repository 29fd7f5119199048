"""Callers: whose key it is, as a function of the request (S2).

Ready ones for credentials, certificates, the framework's user, a cookie and the client's address.
Each gives a text that is digested before it goes anywhere, so none of them is ever stored in clear.
Write your own as `def caller(request: Request) -> str`; the same person must give the same text
with each retry, also after a token was refreshed. Bytes, as headers are, count as their text. None
means that it does not know, as "" does: then the default counts, so that all who bring nothing are
not one caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias
from uuid import UUID

from coatcheck.errors import Misconfigured
from coatcheck.server.request import Request

# What `caller=` takes: a function of the request. None: it does not know, and the default counts.
Caller: TypeAlias = Callable[[Request], str | bytes | int | UUID | None]


# Those of the headers below that may be an application's, and the same for all of its users: its
# key, or the certificate that it, or a proxy, calls us with.
SHARED = frozenset(
    b"""x-api-key api-key apikey x-apikey client-cert x-forwarded-client-cert ssl-client-cert
    ssl-client-subject-dn x-amzn-mtls-clientcert x-amzn-mtls-clientcert-subject
    x-arr-clientcert""".split()
)
# The headers that credentials usually come in, and those in which a proxy that authenticates says
# whom it has found. Some may be sent with every request and say nothing of the caller; then a retry
# with another value is somebody else's, which is the safe mistake. What a proxy signs anew with
# each request is not among them (Cf-Access-Jwt-Assertion, X-Amzn-Oidc-Data): every retry would run.
CREDENTIALS = SHARED.union(
    b"""authorization proxy-authorization x-auth-token x-access-token x-session-token
    x-forwarded-user x-auth-request-user x-remote-user remote-user
    cf-access-authenticated-user-email x-amzn-oidc-identity x-goog-authenticated-user-id
    x-goog-authenticated-user-email x-ms-client-principal-id""".split()
)
CREDENTIAL_NAMES = tuple(sorted(CREDENTIALS))


def credential(request: Request) -> str | None:
    """
    The credential that came with the request: `Authorization`, `X-API-Key` and their like.

    And what a proxy in front says of whom it has authenticated, such as `X-Forwarded-User`. The
    default, where there is one.

    Two credentials never share a key. Where users' tokens are refreshed between retries, use
    `user` or a function of your own, or a retry with the new token is somebody else's request.
    """
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


def user(request: Request) -> str | None:
    """
    The user that an authentication middleware in front of ours has found.

    Starlette's `scope["user"]`, or WSGI's `REMOTE_USER`. Frameworks that find it later, as Django
    and Flask-Login do, need a function of your own. For a request without a user the default
    counts, so that two strangers are not one.
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
    Whose certificate the server has seen: ASGI's `tls` extension, or WSGI's `SSL_CLIENT_S_DN`.

    By its name, which a renewed certificate keeps; else by the certificate itself. Part of the
    default, too. A certificate that a proxy has seen comes in a header: see `credential`.
    """
    native = request.native
    tls: Any = (native.get("extensions") or {}).get("tls")
    if tls:
        chain, verified = iter(tls.get("client_cert_chain") or ()), tls.get("client_cert_error")
        found = tls.get("client_cert_name") or next(chain, None)
    else:
        verified = native.get("SSL_CLIENT_VERIFY")
        found = native.get("SSL_CLIENT_S_DN") or native.get("SSL_CLIENT_CERT")
    # Where anybody's certificate is let in, the name in it may be anybody's.
    return f"certificate {verified or 'SUCCESS'} {found}" if found else None


def client_address(*, proxies: int = 0) -> Caller:
    """
    The client's network address.

    Behind *proxies* of your own, the address is the one that the outermost of them wrote into
    `X-Forwarded-For`; with the wrong number a client can write any address it likes, and many
    clients behind one gateway are one caller. Prefer a credential where there is one.
    """
    if proxies < 0:
        raise Misconfigured(f"proxies is {proxies}; it is how many of your own stand in front")

    def caller(request: Request) -> str | None:
        if proxies:
            hops = request.header(b"x-forwarded-for").decode("latin-1").split(",")
            if len(hops) >= proxies and hops[-proxies].strip():
                return hops[-proxies].strip()
        client: Any = request.native.get("client")
        found = client[0] if client else request.native.get("REMOTE_ADDR")
        return str(found) if found else None

    return caller
