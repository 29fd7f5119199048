"""The counter: where a request becomes a ticket; shared by the adapters.

Nothing here waits or sends; the adapters do.
"""

from __future__ import annotations

import functools
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias
from urllib.parse import quote
from uuid import UUID

from coatcheck.core.fingerprint import fingerprint_of
from coatcheck.core.key import Key, Malformed, parse_key, reference_of
from coatcheck.core.not_awaited import check_function, refuse_awaitable
from coatcheck.core.policy import Policy
from coatcheck.core.problem import COOKIE_IS_COMPARED, Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Response
from coatcheck.core.scope import SCOPE_CHARS, caller_digest, operation_id
from coatcheck.core.serve import Refuse, Replay, Ticket
from coatcheck.engine.desk import Desk
from coatcheck.engine.functions import key_of_call
from coatcheck.errors import Misconfigured
from coatcheck.server.answers import refused, replayed
from coatcheck.server.callers import (
    CREDENTIALS,
    SHARED,
    Caller,
    client_certificate,
    credential,
    user,
)
from coatcheck.server.request import Request
from coatcheck.server.status import Asked, accepted, status_of, token_of

# What `key=` takes: a function of the request. None or "": it has no key.
NaturalKey: TypeAlias = Callable[[Request], object]

# 200: what went wrong fits many times. What is told of it may repeat all that the client has sent.
REASON_CHARS_MAX = 200


class Counter:
    """Where requests of one application hand in their keys."""

    def __init__(
        self,
        desk: Desk,
        caller: Caller | None,
        key: NaturalKey | None,
        is_by_host: Callable[[], bool],
    ) -> None:
        for name, function in (("caller", caller), ("key", key)):
            if function is not None:
                check_function(name, function)
        self.desk = desk
        self._is_by_host = is_by_host  # whether the application answers by the host it is asked as
        self._caller = caller
        self._key = key
        self.has_natural_keys = key is not None
        self._nobody = caller_digest("", secret=desk.secret)

    def key_of(self, values: Sequence[bytes], policy: Policy) -> Key | Problem | None:
        """The key in the header's *values*; None where there is none and none is needed."""
        if not values:
            if policy.required and self._key is None:
                return problem("key-missing", reason=policy.key_header)
            return None
        key = parse_key(values, policy.key_chars_max)
        if isinstance(key, Malformed):
            return problem("key-invalid", reason=f"{policy.key_header}: {key.reason}")
        return key

    def natural_key_of(self, request: Request, policy: Policy) -> str | Problem | None:
        """The key that the request itself names (K4), for one that came without a header."""
        if self._key is None:
            return None
        try:
            key = key_of_call(self._key(request))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # The function did not find a key in what the client sent: the client's mistake.
            why = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            return problem("key-invalid", reason=f"no key can be found in the request: {why}")
        if not key:
            return problem("key-missing", reason=policy.key_header) if policy.required else None
        if len(key) > policy.key_chars_max:
            reason = f"the key has {len(key)} characters; {policy.key_chars_max} are allowed"
            return problem("key-invalid", reason=reason)
        return key

    def ticket(self, request: Request, policy: Policy, key: str, template: str | None) -> Ticket:
        """The ticket of *request*; *template* is its route's, where that is known."""
        method, path, whole = request.method, request.path, request.body.whole
        caller, included = self._caller_of(request)
        if policy.header_names:
            included = [*included, *((n, request.header(n)) for n in policy.header_names)]
        if b"content-encoding" in request.fields:  # it says what the bytes of the body mean
            included = [*included, (b"content-encoding", request.fields[b"content-encoding"])]
        desk, route = self.desk, f"{method} {template or path}"
        place = route if template is None else f"{method} {_unnamed(template)}"
        id = operation_id(caller=caller, route=place, key=key, secret=desk.secret)
        fingerprint = fingerprint_of(
            method=method,
            path=path,
            query=request.query,
            content_type=request.fields.get(b"content-type", b""),
            body=request.body.bytes_or_chunks() if whole is None else whole,
            ignore=policy.pointers,
            headers=included,
            secret=desk.secret,
            is_retry=desk.cache.knows(id),
        )
        mark = policy.mark
        return desk.ticket(id, fingerprint, key=key, caller=caller, route=route, mark=mark)

    def is_held_by(self, request: Request, ticket: Ticket) -> bool:
        """
        *request* runs under the claim of *ticket* already: it was guarded further out.

        By a middleware that was added twice, or by one around a mounted application that has its
        own. Who claimed again would wait for itself.
        """
        operation = request.native.get("coatcheck.operation")
        return operation is not None and operation.reference == reference_of(ticket.id)

    def refused(
        self, request: Request, refusal: Problem, policy: Policy, template: str | None = None
    ) -> Response:
        """The answer on the wire where *request* came to no ticket; the observers hear of it."""
        self.desk.tell_refusal(refusal, f"{request.method} {template or request.path}")
        return refused(refusal, policy)

    def answered(
        self, answer: Replay | Refuse, ticket: Ticket, policy: Policy, request: Request
    ) -> Response:
        """The answer on the wire where no handler ran for this request."""
        if isinstance(answer, Replay):
            return replayed(answer, ticket, policy, request.header(b"accept-encoding"))
        # Of what a transaction has not committed there is nothing yet to ask for.
        if policy.in_flight == "202" and policy.mode == "record" and answer.record is not None:
            return self.accepted(answer.record, policy, request)
        refusal = answer.problem
        if refusal.code == "key-reused" and self._caller_of(request)[1]:
            refusal = replace(refusal, detail=f"{refusal.detail}; {COOKIE_IS_COMPARED}")
        return refused(refusal, policy)

    def accepted(self, record: Record, policy: Policy, request: Request) -> Response:
        """The answer that sends the client of *request* to the address of what runs for it."""
        location = _location(self._token_of(record, *self._caller_of(request)), policy, request)
        prefer = request.header(b"prefer") if policy.in_flight == "202" else b""
        return accepted(record, location, policy, prefer=prefer)

    def status(self, record: Record | None, token: str, request: Request) -> Response | None:
        """What *request* is told of *record*; None: *token* is no address of it, for this one."""
        if record is None or not self._is_address(token, record, request):
            return None
        policy, accept_encoding = self.desk.policy, request.header(b"accept-encoding")
        asked = Asked(_location(token, policy, request), self.desk.now_ms(), accept_encoding)
        response = status_of(self.desk.standing(record), asked, policy)
        return response._replace(body=b"") if request.method == "HEAD" else response

    def _is_address(self, token: str, record: Record, request: Request) -> bool:
        """*token* was given to whoever sends *request*, when it asked for *record*."""
        caller, included = self._caller_of(request)
        # A caller's name may be easy to guess, and a function has none: the record says whose it
        # is. That of a compact store does not; there it has no label either.
        if record.label and record.scope != caller[:SCOPE_CHARS]:
            return False
        ours = self._token_of(record, caller, included)
        return hmac.compare_digest(token.encode(), ours.encode())

    def _token_of(
        self, record: Record, caller: str, included: Sequence[tuple[bytes, bytes]]
    ) -> str:
        who = caller.encode() + b"".join(value for _, value in included)
        return token_of(record, who, self.desk.secret)

    def _caller_of(self, request: Request) -> tuple[str, list[tuple[bytes, bytes]]]:
        """Whose key it is, and what of the request's headers must not change between retries."""
        if self._caller is not None and (own := _text_of(self._caller(request))) is not None:
            return caller_digest("own", own, *self._tenant(request), secret=self.desk.secret), []
        fields, native, who = request.fields, request.native, user(request)
        certified = None
        # Looked for in place: most servers tell nothing of the kind, and a call takes longer.
        if (
            ("extensions" in native and "tls" in (native["extensions"] or ()))
            or "SSL_CLIENT_S_DN" in native
            or "SSL_CLIENT_CERT" in native
        ):
            certified = client_certificate(request)
        if not (who or certified or self._is_by_host()) and CREDENTIALS.isdisjoint(fields):
            caller = self._nobody
        else:
            parts: tuple[str, ...] = ("credential", credential(request) or "")
            if who is not None:
                parts = (*parts, "user", who)
            if certified is not None:
                parts = (*parts, "certificate", certified)
            caller = caller_digest(*parts, *self._tenant(request), secret=self.desk.secret)
        # A cookie may hold a session, or an advertiser's clock. If it named the caller, a retry
        # with a fresh clock would run again; if it were ignored, one session could read another's
        # answer. So it is compared: another cookie is refused, and neither can happen. It is not
        # where something else tells who it is, which a key of a whole application does not.
        cookie = fields.get(b"cookie")
        if not cookie or who is not None or not SHARED.issuperset(CREDENTIALS.intersection(fields)):
            return caller, []
        return caller, [(b"cookie", cookie)]

    def _tenant(self, request: Request) -> tuple[bytes | str, ...]:
        """Where the application answers by host, that is part of whom a key belongs to."""
        return ("host", request.header(b"host").lower()) if self._is_by_host() else ()


@functools.lru_cache(maxsize=256)  # 256: as many routes as an API has marked
def _unnamed(template: str) -> str:
    """*template* without the names of its parameters: a release may call them something else."""
    return re.sub(r"\{[^{}]*\}", "{}", template)


def _text_of(found: object) -> str | None:
    """What a `caller=` function has found; numbers and headers are the likeliest of all."""
    if isinstance(found, bytes):
        found = found.decode("latin-1")  # as `callers.api_key` has it
    if found is None or isinstance(found, str):
        return found or None
    if isinstance(found, (int, UUID)):
        return str(found)
    refuse_awaitable("caller", found)
    # Not what it is: that may be a credential, and this is logged.
    kind = type(found).__name__
    raise Misconfigured(f"caller= returned a {kind}; it is to return a text, or None")


def _location(token: str, policy: Policy, request: Request) -> str:
    return f"{quote(request.root)}{policy.status_path}{token}"
