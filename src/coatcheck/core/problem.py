"""Problems: every refusal as a problem document (RFC 9457), from one table.

Sixth step of the path. A program must be able to act on a refusal. So each has a stable `code`, and
its `retry` tells the client what to do: retry with the same key, start again with a new key, or
neither. A problem contains nothing of the stored request or response.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from coatcheck import errors
from coatcheck.core.key import redacted, reference_of

Retry: TypeAlias = Literal["same-key", "new-key", "never"]
Code: TypeAlias = Literal[
    "key-missing",
    "key-invalid",
    "key-reused",
    "in-progress",
    "outcome-unknown",
    "result-unavailable",
    "key-expired",
    "body-incomplete",
    "body-too-large",
    "caller-refused",
    "too-many-waiting",
    "too-many-keys",
    "too-many-attempts",
    "store-unavailable",
]


class Kind(NamedTuple):
    """What all problems with one code have in common; *words* is the template of the detail."""

    status: int
    retry: Retry
    retry_after_s: int | None  # of "in-progress" at least; see `lifecycle.retry_after_s`
    error: type[errors.CoatcheckError]
    title: str
    words: str


# "new-key" only where nothing has run for this key and nothing will: otherwise a new key could do
# the work twice. Retry-After is 1 s: most causes are gone by then, and clients add backoff and
# jitter. Too many keys: 60 s, because a key becomes free only when its window ends, which may be
# hours away.
KINDS: dict[Code, Kind] = {
    "key-missing": Kind(
        *(400, "new-key", None, errors.KeyRejected),
        "Idempotency key missing",
        "this operation needs an idempotency key: send a new UUID in the {reason} header, and send "
        "the same UUID with each retry",
    ),
    "key-invalid": Kind(
        *(400, "new-key", None, errors.KeyRejected),
        "Idempotency key invalid",
        "{reason}",
    ),
    "key-reused": Kind(
        *(422, "never", None, errors.KeyReused),
        "Idempotency key reused with a different request",
        "key {key} was first used with another request ({reason}); send that request again, or use "
        "a new key for a new action",
    ),
    "in-progress": Kind(
        *(409, "same-key", 1, errors.KeyBusy),
        "The first request is still in progress",
        "the operation with key {key} was started {reason} and has not answered yet; retry after "
        "{retry_after_s} s with the same key",
    ),
    "outcome-unknown": Kind(
        *(409, "never", None, errors.OutcomeUnknown),
        "The outcome of this operation is not known",
        "an attempt with key {key} did not finish, and it is not known what it did; it does not "
        "run again by itself: contact support with the reference",
    ),
    "result-unavailable": Kind(
        *(409, "never", None, errors.ResultUnavailable),
        "The operation is done, but its response cannot be replayed",
        "the operation with key {key} was executed once, but {reason}; do not send it again",
    ),
    "key-expired": Kind(
        *(409, "never", None, errors.KeyExpired),
        "Idempotency key expired",
        "key {key} has expired, and its response is no longer replayed; check whether the action "
        "happened before you use a new key",
    ),
    "body-incomplete": Kind(
        *(400, "same-key", None, errors.KeyRejected),
        "Request body incomplete",
        "{reason}, so nothing was executed; send the request again with the same key",
    ),
    "body-too-large": Kind(
        *(413, "never", None, errors.LimitExceeded),
        "Request body too large",
        "{reason}",
    ),
    "caller-refused": Kind(
        *(401, "same-key", None, errors.KeyRejected),
        "The caller of this request was not accepted",
        "{reason}",
    ),
    "too-many-waiting": Kind(
        *(429, "same-key", 1, errors.LimitExceeded),
        "Too many requests wait for this key",
        "too many requests wait for key {key} already; retry after {retry_after_s} s with the same "
        "key",
    ),
    "too-many-keys": Kind(
        *(429, "same-key", 60, errors.LimitExceeded),
        "Too many keys in use",
        "this caller has reached its limit of keys, so nothing was executed; a key counts until "
        "its window ends: retry after {retry_after_s} s with the same key, and send fewer new keys",
    ),
    "too-many-attempts": Kind(
        *(409, "never", None, errors.OutcomeUnknown),
        "Every attempt at this operation has failed",
        "the operation with key {key} is not tried again: {reason}; contact support with the "
        "reference",
    ),
    "store-unavailable": Kind(
        *(503, "same-key", 1, errors.StoreUnavailable),
        "The idempotency store is unavailable",
        "{reason}; retry with the same key",
    ),
}


# Added to "key-reused" where the session may be the difference: clients look for it in the body.
SESSION_IS_COMPARED = (
    "the session in its Cookie header is compared, too, because nothing else identifies the caller "
    "of this request"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal; the policy may set another `status` than that of its kind."""

    code: Code
    detail: str
    status: int
    reference: str | None
    retry_after_s: int | None

    @property
    def kind(self) -> Kind:
        """What all problems with this code have in common."""
        return KINDS[self.code]

    def document(self, docs_url: str) -> bytes:
        """The body of the response: application/problem+json."""
        members: dict[str, str | int] = {
            "type": f"{docs_url}#{self.code}",
            "title": self.kind.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retry": self.kind.retry,
        }
        if self.reference is not None:
            members["reference"] = self.reference
        return json.dumps(members).encode()

    def error(self) -> errors.CoatcheckError:
        """The same refusal as an exception, for guarded functions."""
        error = self.kind.error
        return error(self) if issubclass(error, errors.Refused) else error(self.detail)


def problem(
    code: Code,
    *,
    key: str = "",
    id: bytes | None = None,
    reason: str = "",
    status: int = 0,
    retry_after_s: int = 0,
) -> Problem:
    """The problem of *code*; *status* and *retry_after_s* replace those of its kind."""
    kind = KINDS[code]
    after_s = retry_after_s or kind.retry_after_s
    detail = kind.words.format(key=redacted(key), reason=reason, retry_after_s=after_s)
    reference = None if id is None else reference_of(id)
    return Problem(code, detail, status or kind.status, reference, after_s)
