"""Resolving: a person's decision about an operation in doubt, with who, when and why (L6).

What both engines have in common of it, which is all but the waiting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coatcheck.core.flow import Flow
from coatcheck.core.key import parse_reference, prefix_of, reference_of
from coatcheck.core.policy import changed
from coatcheck.core.progress import Resolution, is_sealed, progress_of
from coatcheck.core.record import COMPLETED, RUNNING, Record, is_lease_over, mark_of
from coatcheck.core.replay import Fate, decode_value
from coatcheck.core.resolve import Resolved, Stands, rerun, resolve
from coatcheck.core.serve import Ending, Execute, Executed, Seen
from coatcheck.engine.desk import Desk, ending_of_reconcile, logger
from coatcheck.engine.functions import ending_of_result
from coatcheck.engine.reconciler import is_of_function
from coatcheck.errors import ClaimLost, Misconfigured, NotResolved, Unreadable
from coatcheck.operation import DidNotHappen, Happened
from coatcheck.stores import Query

# 100 and 500: a name or an address; and a reason that somebody else will read.
BY_CHARS_MAX = 100
WHY_CHARS_MAX = 500

_id_digits = re.compile("[0-9a-f]{32}").fullmatch


def query_of(reference: str) -> Query:
    """What finds the operation that a person means by *reference*: it may be a whole id, too."""
    named = parse_reference(reference)
    if named is not None:
        return Query(id_prefix=prefix_of(named))
    if _id_digits(reference) is not None:
        return Query(id_prefix=bytes.fromhex(reference))
    raise NotResolved(f"{reference!r} is not a reference such as 7D3F-92AB-1C4E, nor an id")


def id_among(reference: str, records: Sequence[Record]) -> bytes:
    """The only one of *records* that is meant by *reference*."""
    named = parse_reference(reference)
    ids = [record.id for record in records if named in (None, reference_of(record.id))]
    if not ids:
        raise _unknown(reference)
    if len(ids) > 1:
        each = ", ".join(id.hex() for id in ids)
        raise NotResolved(f"{reference} stands for several operations: give the id of one: {each}")
    return ids[0]


class Case:
    """One operation that a person decides about."""

    def __init__(self, desk: Desk, seen: Seen, *, by: str, why: str, abandoned: bool) -> None:
        record = seen.record
        if record.version == 0:
            raise _unknown("of this id")
        if is_sealed(record):
            raise Unreadable("what was noted of it is sealed: resolve it where the key ring is")
        _check("by", by, BY_CHARS_MAX)
        _check("why", why, WHY_CHARS_MAX)
        self._desk = desk
        self._seen = seen
        self._by = by
        self._why = why
        self._abandoned = abandoned
        # Whoever is not sure that nothing happened leaves it in doubt: a person looks after it.
        self.policy = changed(desk.policy, {"recovery": "manual", "reconcile": None})
        self.ticket = desk.ticket(
            record.id,
            record.fingerprint,
            key=record.key,
            caller=record.scope,
            route=record.label,
            mark=mark_of(record.nonce),  # if this dies, its own service goes on with it
        )

    def resolve(self, outcome: object) -> Flow[Resolved | Stands]:
        """The flow that ends the doubt as *outcome* says."""
        ending = _ending_of_outcome(outcome, self._seen.record)
        resolution = self._resolution("happened" if ending.fate is Fate.KEEP else "did not happen")
        return resolve(self._seen, ending, resolution, abandoned=self._abandoned)

    def resolved(self, answer: Resolved | Stands | Execute) -> Record:
        """What stands now; raises where we were too late."""
        assert not isinstance(answer, Execute)
        if isinstance(answer, Stands):
            raise self._not_in_doubt(answer.record)
        self._log(answer.record)
        return answer.record

    def rerun(self) -> Flow[Executed | Stands]:
        """The flow of another attempt, now."""
        resolution = self._resolution("run again")
        return rerun(self._seen, resolution, self.ticket, self.policy, abandoned=self._abandoned)

    def claimed(self, answer: Execute | Executed | Stands) -> Record:
        """The claim of that attempt; raises where we were too late."""
        assert not isinstance(answer, Executed)
        if isinstance(answer, Stands):
            raise self._not_in_doubt(answer.record)
        self._log(answer.claim)
        return answer.claim

    def ending_of(self, result: object) -> Ending:
        """What the *result* of that attempt means for its claim."""
        as_value = is_of_function(self._seen.record)
        if isinstance(result, Happened):
            return ending_of_reconcile(result, as_value=as_value)
        if as_value or not self._seen.record.label:
            return ending_of_result(self.ticket, result, self.policy)
        logger.error(
            "%s is a request, and was answered with a %s, not with Happened(status, headers, "
            "body): it is not kept, and a retry is told so",
            *(self.ticket.label, type(result).__name__),
        )
        return Ending(Fate.KEEP)

    def result_of(
        self,
        answer: Execute | Executed | Stands,
        ending: Ending,
        result: Any,  # noqa: ANN401 - what the user's function returned
    ) -> Any:  # noqa: ANN401 - as above
        """What whoever ran it again gets: what every retry gets from now on."""
        assert not isinstance(answer, Execute)
        if isinstance(answer, Stands):
            raise ClaimLost(f"{self._reference} was taken over while it ran; that one counts")
        self._desk.tell(self.ticket, answer)
        if isinstance(result, Happened) or ending.response is None:
            return result
        return decode_value(ending.response)

    @property
    def _reference(self) -> str:
        return reference_of(self._seen.record.id)

    def _resolution(self, outcome: str) -> Resolution:
        return Resolution(self._seen.now_ms, outcome, self._by, self._why)

    def _log(self, record: Record) -> None:
        # As a literal, because a person may have written anything, and a log has lines.
        outcome = progress_of(record).resolutions[-1].outcome
        told = (self._reference, record.label, outcome, self._by, self._why)
        logger.info("resolved %s %s: %s, by %r: %r", *told)

    def _not_in_doubt(self, standing: Record) -> NotResolved:
        """Why nothing is decided about *standing*."""
        if standing.version == 0:
            return _unknown(self._reference)
        if standing.state == COMPLETED:
            words = "is completed already"
        elif standing.state != RUNNING:
            words = "was given back, and the next retry runs it"
        elif is_lease_over(standing, self._desk.now_ms()):
            words = (
                f"is not in doubt yet: attempt {standing.attempt} has let its lease run out. "
                "If you know that it is dead, say that it is abandoned"
            )
        else:
            words = f"is being executed, by attempt {standing.attempt}"
        decided = progress_of(standing).resolutions
        by = f" (resolved by {decided[-1].by!r}: {decided[-1].why!r})" if decided else ""
        return NotResolved(f"{self._reference} {words}{by}", standing)


def _unknown(reference: str) -> NotResolved:
    return NotResolved(f"no operation {reference} is known")


def _check(name: str, text: object, chars_max: int) -> None:
    if not isinstance(text, str) or not text.strip() or len(text) > chars_max:
        raise Misconfigured(f"{name} is {text!r:.120}; it is a text of 1 to {chars_max} characters")


def _ending_of_outcome(outcome: object, record: Record) -> Ending:
    if isinstance(outcome, DidNotHappen):
        return Ending(Fate.RELEASE)
    if not isinstance(outcome, Happened):
        raise Misconfigured(f"{outcome!r} is not an outcome: say Happened(...) or DidNotHappen()")
    ending = ending_of_reconcile(outcome, as_value=_is_value(outcome, record))
    if ending.response is None:
        raise Misconfigured(f"{outcome.value!r:.120} is neither JSON nor bytes, so it is not kept")
    return ending


def _is_value(outcome: Happened, record: Record) -> bool:
    """*record* is completed with a value; an *outcome* that does not fit it is refused."""
    has_value = outcome.value is not None
    has_answer = outcome.status != 200 or bool(outcome.headers) or bool(outcome.body)
    if not record.label:  # a compact store does not say what it was
        if has_value == has_answer:
            raise Misconfigured("say Happened(value=…) of a function, status and body of a request")
        return has_value
    as_value = is_of_function(record)
    if as_value and has_answer and not has_value:
        raise Misconfigured(f"{record.label!r} is a function: say Happened(value=…)")
    if not as_value and has_value and not has_answer:
        raise Misconfigured(f"{record.label!r} is a request: say Happened(status, headers, body)")
    return as_value
