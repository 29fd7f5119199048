"""The request guard: turns HTTP requests into claim requests; shared by ASGI and WSGI.

Nothing here waits or sends; the middlewares do.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote
from uuid import UUID

from coatcheck.core.callables import check_function, is_async_function, refuse_awaitable
from coatcheck.core.fingerprint import fingerprint_of, with_session
from coatcheck.core.identity import caller_digest, operation_id
from coatcheck.core.key import Key, Malformed, parse_key, reference_of
from coatcheck.core.lifecycle import ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import SESSION_IS_COMPARED, Problem, problem
from coatcheck.core.progress import Progress, encoded
from coatcheck.core.record import Record
from coatcheck.core.response import Response
from coatcheck.engine import AsyncEngine
from coatcheck.engine.base import EngineBase
from coatcheck.engine.functions import key_of_call
from coatcheck.engine.recovery import label_of_route
from coatcheck.errors import Misconfigured
from coatcheck.server.body import LargeBody
from coatcheck.server.callers import (
    CREDENTIAL_NAMES,
    CREDENTIALS,
    SHARED,
    AsyncCaller,
    Caller,
    Named,
    client_certificate,
    credential,
    credential_text,
    user,
)
from coatcheck.server.cookies import SessionCookies
from coatcheck.server.keys import NaturalKey
from coatcheck.server.polling import StatusRequest, accepted, status_of, token_of
from coatcheck.server.refusals import response_of_refusal
from coatcheck.server.request import Request
from coatcheck.server.responses import refused, replayed

logger = logging.getLogger("coatcheck")

# Not 404: that would mean that there is no such operation.
NOT_POLLED = "the state of this operation is not read, because coatcheck is disabled"

# 200: enough for an error's text, which may repeat everything that the client has sent.
REASON_CHARS_MAX = 200

# 100: enough for a name or an address, and stored with every record.
NAME_CHARS_MAX = 100

# A client that retries once often retries again, with the same bytes: their fingerprint is
# remembered, for 1 024 requests of up to 2 KiB.
RETRY_BYTES_MAX = 2_048
_fingerprint_of_retry = functools.lru_cache(maxsize=1_024)(fingerprint_of)


# Makes the response of a refusal; a framework may have a look of its own for errors.
Render: TypeAlias = Callable[[Problem, Policy, Request], Response]


def _problem_document(refusal: Problem, policy: Policy, _request: Request) -> Response:
    return refused(refusal, policy)


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
        caller: Caller | AsyncCaller | None,
        key: NaturalKey | None,
        hosts: Hosts,
        cookies: SessionCookies | None = None,
    ) -> None:
        self.caller_is_async = isinstance(engine, AsyncEngine) and is_async_function(caller)
        if caller is not None and not self.caller_is_async:
            check_function("caller", caller)
        if key is not None:
            check_function("key", key)
        self._engine = engine
        self._attempts = engine.attempts
        self._secret = engine.attempts.secret
        self._hosts = hosts
        # Not `callers.jwt` with a client that fetches keys: it must not run on an event loop.
        caller_blocks = getattr(caller, "blocks", False) is True
        self.caller_is_quick = not self.caller_is_async and not caller_blocks
        self.caller = caller
        self._cookies = cookies or SessionCookies()
        self.render: Render = _problem_document
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
            key = key_of_call(self._key(request))  # a `ContentKey` stays one
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

    def key_of_content(
        self, request: Request, policy: Policy, template: str | None
    ) -> str | Problem | None:
        """
        The key that is made of *request* and its session; its caller is known.

        None if nothing identifies the client: another client with the same content would get its
        response. The fingerprint is the key, so that what a policy ignores does not matter here.
        """
        _, session = self._caller_of(request)
        known = (request.caller, credential(request), user(request), client_certificate(request))
        if not session and all(one is None for one in known):
            return problem("key-missing", reason=policy.key_header) if policy.required else None
        return self.claim_request(request, policy, "", template).fingerprint.hex()

    def claim_request(
        self, request: Request, policy: Policy, key: str, template: str | None
    ) -> ClaimRequest:
        """
        What to claim for *request*; *template* is its route's, if that is known.

        The id is made of the path, with a template or without one: a retry of a request that came
        before its route was marked must find the same record. The template is only the label.
        """
        method, path, body = request.method, request.path, request.body
        caller, session = request.identity = self._caller_of(request)
        compared: list[tuple[bytes, bytes]] = []
        if policy.header_names:
            compared = [(n, request.header(n)) for n in policy.header_names]
        if b"content-encoding" in request.fields:  # it says what the bytes of the body mean
            compared = [*compared, (b"content-encoding", request.fields[b"content-encoding"])]
        place = f"{method} {path}"
        route = place if template is None else f"{method} {template}"
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
        new_request = self._attempts.new_request
        if not session:
            claim = new_request(id, fingerprint, key=key, caller=caller, label=route)
            return self._with_name(claim, request.caller_name) if request.caller_name else claim
        bound = with_session(fingerprint, session, self._secret)
        claim = new_request(id, bound, key=key, caller=caller, label=route)
        return claim._replace(without_session=fingerprint)

    def _with_name(self, claim: ClaimRequest, name: str) -> ClaimRequest:
        """*claim* with the name of its caller, which only operators see."""
        if self._engine.is_compact:
            return claim
        return claim._replace(progress=encoded(Progress(caller=name)))

    def is_nested(self, request: Request, claim: ClaimRequest) -> bool:
        """
        *request* runs under this very claim already: it was guarded further out.

        A middleware was added twice, or one stands around a mounted application that has its own.
        If it were claimed again, it would wait for itself.
        """
        operation = request.native.get("coatcheck.operation")
        if operation is None or not operation.fence:  # it is only observed
            return False
        is_same: bool = operation.reference == reference_of(claim.id)
        return is_same

    def refused(
        self, request: Request, refusal: Problem, policy: Policy, template: str | None = None
    ) -> Response:
        """The response for a *request* that could not be claimed; it is reported."""
        self._attempts.report_refusal(refusal, f"{request.method} {template or request.path}")
        return self.render(refusal, policy, request)

    def response_of(
        self, answer: Replay | Refuse, claim: ClaimRequest, policy: Policy, request: Request
    ) -> Response:
        """The response for a request for which no handler ran."""
        if isinstance(answer, Replay):
            made = replayed(answer, claim, policy, request.fields.get(b"accept-encoding"))
            return self.render(made, policy, request) if isinstance(made, Problem) else made
        # A transaction that is not committed has nothing to poll for yet.
        if policy.in_flight == "202" and policy.mode == "record" and answer.record is not None:
            return self.accepted(answer.record, policy, request)
        refusal = answer.problem
        if refusal.code == "key-reused" and request.identity and request.identity[1]:
            refusal = replace(refusal, detail=f"{refusal.detail}; {SESSION_IS_COMPARED}")
        return self.render(refusal, policy, request)

    def accepted(self, record: Record, policy: Policy, request: Request) -> Response:
        """The 202 that sends the client of *request* to the polling address of its operation."""
        identity = request.identity or self._caller_of(request)
        location = _location(self._token_of(record, *identity), policy, request)
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

    def not_polled(self, request: Request) -> Response:
        """The response of a polling address while the process is disabled; no store is asked."""
        refusal = problem("store-unavailable", reason=NOT_POLLED)
        response = refused(refusal, self._engine.policy)
        return response._replace(body=b"") if request.method == "HEAD" else response

    def _is_address(self, token: str, record: Record, request: Request) -> bool:
        """*token* was given to the caller of *request*, for *record*."""
        caller, session = self._caller_of(request)
        # A caller's name may be easy to guess: the record says whose it is (a compact store keeps
        # one character of that). A function has no caller.
        if not record.scope or not caller.startswith(record.scope):
            return False
        # Like a retry, a client may have got its session after it was given the address.
        ours = {self._token_of(record, caller, of) for of in (session, b"")}
        return any(hmac.compare_digest(token.encode(), one.encode()) for one in ours)

    def _token_of(self, record: Record, caller: str, session: bytes) -> str:
        return token_of(record, caller.encode() + session, self._secret)

    def identify(self, request: Request) -> None:
        """Call `caller=` in this thread; raises what it raises."""
        caller: Any = self.caller
        _identify(request, caller(request))

    async def identify_on_loop(self, request: Request) -> None:
        """Call `caller=` from an event loop; raises what it raises."""
        caller: Any = self.caller
        if self.caller_is_async:
            _identify(request, await caller(request))
        elif not self.caller_is_quick or isinstance(request.body, LargeBody):
            await asyncio.to_thread(self.identify, request)
        else:
            self.identify(request)

    def refused_by_caller(
        self, error: Exception, request: Request, policy: Policy, template: str | None = None
    ) -> Response | None:
        """The response if `caller=` refused *request* with *error*; None if it failed."""
        response = response_of_refusal(error, policy)
        if response is None:
            return None
        refusal = problem("caller-refused", status=response.status)
        label = f"{request.method} {template or request.path}"
        self._attempts.report_refusal(refusal, label)
        if error.__cause__ is not None:  # why a token is not valid: the client does not learn it
            cause = repr(error.__cause__)[:REASON_CHARS_MAX]
            logger.info("coatcheck: caller= refused %s with %d: %s", label, response.status, cause)
        return response._replace(body=b"") if request.method == "HEAD" else response

    def _caller_of(self, request: Request) -> tuple[str, bytes]:
        """Whose key it is, and the session that a retry must have, too."""
        if request.caller is not None:
            tenant = ("host", request.header(b"host").lower()) if self._hosts.matter else ()
            own = caller_digest("own", request.caller, *tenant, secret=self._secret)
            return own, b""
        fields, native = request.fields, request.native
        who = user(request) if "user" in native or "REMOTE_USER" in native else None
        certificate = None
        if native.get("extensions") or "SSL_CLIENT_S_DN" in native or "SSL_CLIENT_CERT" in native:
            certificate = client_certificate(request)
        credentials = tuple(map(fields.get, CREDENTIAL_NAMES))
        host = request.header(b"host").lower() if self._hosts.matter else None
        caller = _default_caller(credentials, who, certificate, host, self._secret)
        # If the session were part of the caller, a retry in another session would run again. If it
        # were ignored, one session could read another's answer. So it is compared, and a request in
        # another session is refused. It is not compared if something else identifies the user,
        # which an application's API key does not.
        cookie = fields.get(b"cookie")
        if not cookie or who is not None or not SHARED.issuperset(CREDENTIALS.intersection(fields)):
            return caller, b""
        return caller, self._cookies.session_of(cookie, native.get("session"))


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


def _identify(request: Request, found: object) -> None:
    """Give *request* the caller that a `caller=` function *found*."""
    if found is None:  # then the default counts
        return
    if not isinstance(found, Named):
        request.caller = _text_of_caller(found)
        return
    name: object = found.name
    request.caller = _text_of_caller(found.caller)
    if request.caller is None or not isinstance(name, str):
        raise Misconfigured("caller= returned a Named without a caller, or whose name is no text")
    is_long = len(name) > NAME_CHARS_MAX
    request.caller_name = f"{name[: NAME_CHARS_MAX - 1]}…" if is_long else name


def _text_of_caller(found: object) -> str | None:
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
    raise Misconfigured(f"caller= returned a value of type {kind}; it must return a text, or None")


def _location(token: str, policy: Policy, request: Request) -> str:
    return f"{quote(request.root)}{policy.status_path}{token}"
