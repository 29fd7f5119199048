"""Keep: which answers are kept, and what an answer means for its claim.

Final answers are kept and replayed. An answer that means "not now" is not kept: the same request
may succeed later. An answer that refuses the request before any work was done frees the key for a
corrected request.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from coatcheck.core.callables import refuse_awaitable
from coatcheck.core.response import Response

Keep: TypeAlias = "Literal['final', 'all'] | Callable[[Response], bool]"


class OutcomeKind(Enum):
    """What happens to a claim when its attempt has ended."""

    COMPLETE = "completed with this answer"
    RELEASE = "released: nothing final happened, and the next retry runs again"
    REJECT = "released, also for a corrected request: refused before the handler did any work"
    IN_DOUBT = "it may have happened: the recovery policy decides"


# A global, because Python 3.11 is slow to read an attribute of an Enum class.
COMPLETE = OutcomeKind.COMPLETE


class Outcome(NamedTuple):
    """How an execution ended, and the bytes to store, if any."""

    kind: OutcomeKind
    response: bytes | None = None
    status: int = 200  # of the response; a function's result counts as a success
    failure: str = ""  # for operators, if there is no final answer: "raised TimeoutError"
    policy: str = ""  # for operators, with the failure: `Policy.words`
    trace: str = ""  # the trace context of the execution, if it is traced; stored with the answer


# "Not now": the same request may succeed later, so the answer must not be replayed for a day.
_TRANSIENT = frozenset({408, 425, 429})
# Refused before any work. The client corrects the request and retries with the same key.
_REFUSED_EARLY = frozenset({401, 403, 407, 413, 415})

CLIENT_ERROR = 400
_SERVER_ERROR = 500


def outcome_kind_of(response: Response, keep: Keep, *, reruns: bool) -> OutcomeKind:
    """
    What *response* means for its claim.

    *reruns*: the policy allows another run after an unclear end. If not, an answer that is neither
    kept nor "not now" leaves the operation in doubt.
    """
    status = response.status
    if callable(keep):
        is_kept = keep(response)
        refuse_awaitable("keep", is_kept)  # a coroutine would count as True
    elif status < CLIENT_ERROR:
        is_kept = True
    elif status in _TRANSIENT or status in _REFUSED_EARLY:
        is_kept = False
    else:
        is_kept = status < _SERVER_ERROR or keep == "all"
    if is_kept:
        return COMPLETE
    if status in _REFUSED_EARLY:
        return OutcomeKind.REJECT
    if status in _TRANSIENT or reruns:
        return OutcomeKind.RELEASE
    return OutcomeKind.IN_DOUBT
