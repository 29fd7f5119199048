"""Problems: every refusal as a problem document (RFC 9457), from one table.

Sixth step of the path. A client must be able to act on a refusal without reading prose, so each
has a stable `code` and says in `retry` what to do: try again with the same key, start again with
a new one, or neither. A problem never tells anything of the stored request or response.
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
    "too-many-waiting",
    "too-many-keys",
    "too-many-attempts",
    "store-unavailable",
]


class Kind(NamedTuple):
    """What all problems of one code have in common; *words* become the detail."""

    status: int
    retry: Retry
    retry_after_s: int | None
    error: type[errors.CoatcheckError]
    title: str
    words: str


# "new-key" is said only where nothing ran for this key and nothing will, so that a new key cannot
# do it twice. Retry-After is 1 s: what outlives the wait is usually nearly done, and a polite
# client adds its own backoff and jitter. But no work's end frees a place among a caller's keys,
# only that of a window, which may be hours away: a minute keeps those who ask anyway from a flood.
KINDS: dict[Code, Kind] = {
    "key-missing": Kind(
        *(400, "new-key", None, errors.KeyRejected),
        "Idempotency key missing",
        "this operation must be safe to retry: send one {reason} header, for example a new UUID, "
        "and the same one again with each retry",
    ),
    "key-invalid": Kind(
        *(400, "new-key", None, errors.KeyRejected),
        "Idempotency key invalid",
        "{reason}",
    ),
    "key-reused": Kind(
        *(422, "never", None, errors.KeyReused),
        "Idempotency key reused with a different request",
        "key {key} was used for a different request; send that request again, or use a new key "
        "for a new action",
    ),
    "in-progress": Kind(
        *(409, "same-key", 1, errors.KeyBusy),
        "The first request is still in progress",
        "key {key} is still running ({reason}); retry after 1 s with the same key",
    ),
    "outcome-unknown": Kind(
        *(409, "never", None, errors.OutcomeUnknown),
        "The outcome of this operation is not known",
        "an attempt with key {key} ended in the middle and it is not known what it did; it is not "
        "run again by itself: ask support, with the reference",
    ),
    "result-unavailable": Kind(
        *(409, "never", None, errors.ResultUnavailable),
        "Done once, but the response cannot be given again",
        "the operation of key {key} happened once; {reason}",
    ),
    "key-expired": Kind(
        *(409, "never", None, errors.KeyExpired),
        "Idempotency key expired",
        "key {key} is past its window and what it did is no longer replayed; check whether the "
        "action happened before using a new key",
    ),
    "body-incomplete": Kind(
        *(400, "same-key", None, errors.KeyRejected),
        "Request body incomplete",
        "{reason}, so nothing was run; send it again",
    ),
    "body-too-large": Kind(
        *(413, "never", None, errors.LimitExceeded),
        "Request body too large",
        "{reason}",
    ),
    "too-many-waiting": Kind(
        *(429, "same-key", 1, errors.LimitExceeded),
        "Too many requests wait for this key",
        "as many requests as may wait for key {key} already do; retry after 1 s",
    ),
    "too-many-keys": Kind(
        *(429, "same-key", 60, errors.LimitExceeded),
        "Too many keys in use",
        "this caller has as many keys in use as it may have, each until its window is over, so "
        "nothing was run; retry after 60 s, and slow down",
    ),
    "too-many-attempts": Kind(
        *(409, "never", None, errors.OutcomeUnknown),
        "Every attempt at this operation has failed",
        "the operation of key {key} is not tried again: {reason}; ask support, with the reference",
    ),
    "store-unavailable": Kind(
        *(503, "same-key", 1, errors.StoreUnavailable),
        "The idempotency store is unavailable",
        "{reason}; retry with the same key",
    ),
}


# Said with "key-reused" where it may be the difference, and the client looks for it in the body.
COOKIE_IS_COMPARED = (
    "the Cookie header is part of what is compared, because nothing else says who sends this"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal; `status` differs from its kind's where the policy says so."""

    code: Code
    detail: str
    status: int
    reference: str | None

    @property
    def kind(self) -> Kind:
        """What it has in common with others of its code."""
        return KINDS[self.code]

    def document(self, docs_url: str) -> bytes:
        """The body of the answer: application/problem+json."""
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
        """The same refusal for code that calls functions, not URLs."""
        error = self.kind.error
        return error(self) if issubclass(error, errors.Refused) else error(self.detail)


def problem(
    code: Code, *, key: str = "", id: bytes | None = None, reason: str = "", status: int = 0
) -> Problem:
    """A problem of the table, with its kind's status unless another is given."""
    kind = KINDS[code]
    detail = kind.words.format(key=redacted(key), reason=reason)
    reference = None if id is None else reference_of(id)
    return Problem(code, detail, status or kind.status, reference)
