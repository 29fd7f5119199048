"""The request guard: turns HTTP requests into claim requests; shared by ASGI and WSGI.

Nothing here waits or sends; the middlewares do.
"""

from __future__ import annotations

import functools
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias
from urllib.parse import quote
from uuid import UUID

from coatcheck.core.callables import check_function, refuse_awaitable
from coatcheck.core.fingerprint import fingerprint_of
from coatcheck.core.identity import caller_digest, operation_id
from coatcheck.core.key import Key, Malformed, parse_key, reference_of
from coatcheck.core.lifecycle import ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import COOKIE_IS_COMPARED, Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.response import Response
from coatcheck.engine.base import EngineBase
from coatcheck.engine.functions import key_of_call
from coatcheck.engine.recovery import label_of_route
from coatcheck.errors import Misconfigured
from coatcheck.server.callers import (
    CREDENTIAL_NAMES,
    CREDENTIALS,
    SHARED,
    Caller,
    client_certificate,
    credential_text,
    user,
)
from coatcheck.server.polling import StatusRequest, accepted, status_of, token_of
from coatcheck.server.request import Request
from coatcheck.server.responses import refused, replayed

# What `key=` takes: a function of the request. None or "": the request has no key.
NaturalKey: TypeAlias = Callable[[Request], object]

# 200: enough for an error's text, which may repeat everything that the client has sent.
REASON_CHARS_MAX = 200

# A client that retries once often retries again, with the same bytes: their fingerprint is
# remembered, for 1 024 requests of up to 2 KiB.
RETRY_BYTES_MAX = 2_048
_fingerprint_of_retry = functools.lru_cache(maxsize=1_024)(fingerprint_of)


class Hosts(Protocol):
    """Whether an application has routes for hosts: then the host is part of the caller."""

    @property
    def matter(self) -> bool:
        """Some routes are for a host."""
        ...


class NoHosts:
    """The hosts of an application whose routes do not tell them apart."""

    matter = False


class RequestGuard:
    """Reads the keys, callers and fingerprints of one application's requests."""

    def __init__(
        self,
        engine: EngineBase,
        caller: Caller | None,
        key: NaturalKey | None,
        hosts: Hosts,
    ) -> None:
        for name, function in (("caller", caller), ("key", key)):
            if function is not None:
                check_function(name, function)
        self._engine = engine
        self._attempts = engine.attempts
        self._secret = engine.attempts.secret
        self._hosts = hosts
        self._caller = caller
        self._key = key
        self.has_natural_keys = key is not None

    def key_of(self, values: Sequence[bytes], policy: Policy) -> Key | Problem | None:
        """The key in the header's *values*; None if there is none and none is required."""
        if not values:
            if policy.required and self._key is None:
                return problem("key-missing", reason=policy.key_header)
            return None
        key = parse_key(values, policy.key_chars_max)
        if isinstance(key, Malformed):
            return problem("key-invalid", reason=f"{policy.key_header}: {key.reason}")
        return key

    def natural_key_of(self, request: Request, policy: Policy) -> str | Problem | None:
        """The key that a `key=` function finds in a request that came without a header."""
        if self._key is None:
            return None
        try:
            key = key_of_call(self._key(request))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # The function did not find a key in what the client sent: that is a 400.
            why = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            return problem("key-invalid", reason=f"no key can be found in the request: {why}")
        if not key:
            return problem("key-missing", reason=policy.key_header) if policy.required else None
        if len(key) > policy.key_chars_max:
            reason = f"the key has {len(key)} characters; {policy.key_chars_max} are allowed"
            return problem("key-invalid", reason=reason)
        return key

    def claim_request(
        self, request: Request, policy: Policy, key: str, template: str | None
    ) -> ClaimRequest:
        """What to claim for *request*; *template* is its route's, if that is known."""
        method, path, body = request.method, request.path, request.body
        caller, compared = self._caller_of(request)
        if policy.header_names:
            compared = [*compared, *((n, request.header(n)) for n in policy.header_names)]
        if b"content-encoding" in request.fields:  # it says what the bytes of the body mean
            compared = [*compared, (b"content-encoding", request.fields[b"content-encoding"])]
        route = f"{method} {template or path}"
        place = route if template is None else f"{method} {_unnamed(template)}"
        id = operation_id(caller=caller, route=place, key=key, secret=self._secret)
        is_small = isinstance(body, bytes) and len(body) + len(path) <= RETRY_BYTES_MAX
        is_retry = is_small and self._attempts.replay_cache.knows(id)
        make: Callable[..., bytes] = _fingerprint_of_retry if is_retry else fingerprint_of
        fingerprint = make(
            method=method,
            path=path,
            query=request.query,
            content_type=request.fields.get(b"content-type", b""),
            body=body if isinstance(body, bytes) else body.chunks(),
            ignore=policy.pointers,
            headers=tuple(compared),
            secret=self._secret,
        )
        if self._engine.service:
            route = label_of_route(route, self._engine.service)
        return self._attempts.new_request(id, fingerprint, key=key, caller=caller, label=route)

    def is_nested(self, request: Request, claim: ClaimRequest) -> bool:
        """
        *request* runs under this very claim already: it was guarded further out.

        A middleware was added twice, or one stands around a mounted application that has its own.
        If it were claimed again, it would wait for itself.
        """
        operation = request.native.get("coatcheck.operation")
        return operation is not None and operation.reference == reference_of(claim.id)

    def refused(
        self, request: Request, refusal: Problem, policy: Policy, template: str | None = None
    ) -> Response:
        """The response for a *request* that could not be claimed; it is reported."""
        self._attempts.report_refusal(refusal, f"{request.method} {template or request.path}")
        return refused(refusal, policy)

    def response_of(
        self, answer: Replay | Refuse, claim: ClaimRequest, policy: Policy, request: Request
    ) -> Response:
        """The response for a request for which no handler ran."""
        if isinstance(answer, Replay):
            return replayed(answer, claim, policy, request.fields.get(b"accept-encoding"))
        # A transaction that is not committed has nothing to poll for yet.
        if policy.in_flight == "202" and policy.mode == "record" and answer.record is not None:
            return self.accepted(answer.record, policy, request)
        refusal = answer.problem
        if refusal.code == "key-reused" and self._caller_of(request)[1]:
            refusal = replace(refusal, detail=f"{refusal.detail}; {COOKIE_IS_COMPARED}")
        return refused(refusal, policy)

    def accepted(self, record: Record, policy: Policy, request: Request) -> Response:
        """The 202 that sends the client of *request* to the polling address of its operation."""
        location = _location(self._token_of(record, *self._caller_of(request)), policy, request)
        prefer = request.header(b"prefer") if policy.in_flight == "202" else b""
        return accepted(record, location, policy, prefer=prefer)

    def status(self, record: Record | None, token: str, request: Request) -> Response | None:
        """The status of *record*; None: *token* is not its polling address for this client."""
        if record is None or not self._is_address(token, record, request):
            return None
        policy, accept_encoding = self._engine.policy, request.fields.get(b"accept-encoding")
        location, now_ms = _location(token, policy, request), self._attempts.now_ms()
        status = StatusRequest(location, now_ms, accept_encoding)
        response = status_of(self._attempts.current(record), status, policy)
        return response._replace(body=b"") if request.method == "HEAD" else response

    def _is_address(self, token: str, record: Record, request: Request) -> bool:
        """*token* was given to the caller of *request*, for *record*."""
        caller, compared = self._caller_of(request)
        # A caller's name may be easy to guess: the record says whose it is (a compact store keeps
        # one character of that). A function has no caller.
        if not record.scope or not caller.startswith(record.scope):
            return False
        ours = self._token_of(record, caller, compared)
        return hmac.compare_digest(token.encode(), ours.encode())

    def _token_of(
        self, record: Record, caller: str, compared: Sequence[tuple[bytes, bytes]]
    ) -> str:
        who = caller.encode() + b"".join(value for _, value in compared)
        return token_of(record, who, self._secret)

    def _caller_of(self, request: Request) -> tuple[str, list[tuple[bytes, bytes]]]:
        """Whose key it is, and which headers must be the same for a retry."""
        if self._caller is not None and (own := _text_of(self._caller(request))) is not None:
            tenant = ("host", request.header(b"host").lower()) if self._hosts.matter else ()
            return caller_digest("own", own, *tenant, secret=self._secret), []
        fields, native = request.fields, request.native
        who = user(request) if "user" in native or "REMOTE_USER" in native else None
        certificate = None
        if native.get("extensions") or "SSL_CLIENT_S_DN" in native or "SSL_CLIENT_CERT" in native:
            certificate = client_certificate(request)
        credentials = tuple(map(fields.get, CREDENTIAL_NAMES))
        host = request.header(b"host").lower() if self._hosts.matter else None
        caller = _default_caller(credentials, who, certificate, host, self._secret)
        # A cookie may hold a session, or a timestamp of an analytics script. If it identified the
        # caller, a retry with a new timestamp would run again. If it were ignored, one session
        # could read another's answer. So it is compared, and a request with another cookie is
        # refused. It is not compared if something else identifies the user, which an application's
        # API key does not.
        cookie = fields.get(b"cookie")
        if not cookie or who is not None or not SHARED.issuperset(CREDENTIALS.intersection(fields)):
            return caller, []
        return caller, [(b"cookie", cookie)]


# 256: the callers of some seconds. Everything that distinguishes callers is among the arguments.
@functools.lru_cache(maxsize=256)
def _default_caller(
    credentials: tuple[bytes | None, ...],
    who: str | None,
    certificate: str | None,
    host: bytes | None,
    secret: bytes,
) -> str:
    """The digest of a caller without a `caller=`; *credentials*: by `CREDENTIAL_NAMES`."""
    sent = credential_text(zip(CREDENTIAL_NAMES, credentials, strict=True))
    if not sent and who is None and certificate is None and host is None:
        return caller_digest("", secret=secret)
    parts: list[bytes | str] = ["credential", sent]
    if who is not None:
        parts += ["user", who]
    if certificate is not None:
        parts += ["certificate", certificate]
    if host is not None:
        parts += ["host", host]
    return caller_digest(*parts, secret=secret)


@functools.lru_cache(maxsize=256)  # 256: more declared routes than an API has
def _unnamed(template: str) -> str:
    """*template* without the names of its parameters: a release may rename them."""
    return re.sub(r"\{[^{}]*\}", "{}", template)


def _text_of(found: object) -> str | None:
    """What a `caller=` function returned, as text; numbers and headers are common."""
    if isinstance(found, bytes):
        found = found.decode("latin-1")  # like `callers.api_key`
    if found is None or isinstance(found, str):
        return found or None
    if isinstance(found, (int, UUID)):
        return str(found)
    refuse_awaitable("caller", found)
    # Not its value: that may be a credential, and this is logged.
    kind = type(found).__name__
    raise Misconfigured(f"caller= returned a {kind}; it must return a text, or None")


def _location(token: str, policy: Policy, request: Request) -> str:
    return f"{quote(request.root)}{policy.status_path}{token}"
