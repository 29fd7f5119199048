"""Resolution: an operator's decision about an operation in doubt, with who, when and why.

Also here: erasing, the other change of records that only a person orders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.flow import Flow
from coatcheck.core.identity import scope_of_caller
from coatcheck.core.keep import COMPLETE, Outcome, OutcomeKind
from coatcheck.core.key import parse_reference, prefix_of, reference_of
from coatcheck.core.lifecycle import Executed, Refuse, Snapshot
from coatcheck.core.policy import Policy, changed
from coatcheck.core.progress import Resolution, is_sealed, progress_of
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap, can_erase, is_lease_over
from coatcheck.core.recovery import (
    DID_NOT_HAPPEN,
    HAPPENED,
    Unchanged,
    can_correct,
    can_resolve,
    rerun,
    resolve,
)
from coatcheck.core.saga.actions import LABEL_PREFIX
from coatcheck.core.values import Codec
from coatcheck.engine.attempts import Attempts, is_of_function
from coatcheck.engine.functions import outcome_of_call, refuse_unstarted, value_of
from coatcheck.engine.outcomes import logger, outcome_of_reconcile
from coatcheck.errors import ClaimLost, Misconfigured, NotResolved, Unreadable
from coatcheck.operation import Operation
from coatcheck.stores.contract import SWEEP_BATCH, Query, Store

# 100 and 500: a name or an address; and a reason that a colleague will read.
BY_CHARS_MAX = 100
WHY_CHARS_MAX = 500

# One key may be in use by many callers and on many routes; more than this is not readable.
LOOKUP_LIMIT = 100

_id_digits = re.compile("[0-9a-f]{32}").fullmatch


def find_operations(store: Store, text: str) -> list[Record]:
    """Return the operations that *text* names: by reference, by id, otherwise by key."""
    if not text:  # a compact store has no keys: all of its records would match
        return []
    reference = parse_reference(text)
    if reference is not None:
        page = store.find(Query(id_prefix=prefix_of(reference), limit=LOOKUP_LIMIT))
        found = [record for record in page.records if reference_of(record.id) == reference]
    elif _id_digits(text) is not None:
        found = list(store.find(Query(id_prefix=bytes.fromhex(text))).records)
    else:
        found = []
    return found or list(store.find(Query(key=text, limit=LOOKUP_LIMIT)).records)


def query_of(reference: str) -> Query:
    """The query for the operation of *reference*, which may be a whole id."""
    named = parse_reference(reference)
    if named is not None:
        return Query(id_prefix=prefix_of(named))
    if _id_digits(reference) is not None:
        return Query(id_prefix=bytes.fromhex(reference))
    raise NotResolved(f"{reference!r} is not a reference such as 7D3F-92AB-1C4E, nor an id")


def id_among(reference: str, records: Sequence[Record]) -> bytes:
    """The id of the only one of *records* that has this *reference*."""
    named = parse_reference(reference)
    ids = [record.id for record in records if named in (None, reference_of(record.id))]
    if not ids:
        raise _unknown(reference)
    if len(ids) > 1:
        each = ", ".join(id.hex() for id in ids)
        raise NotResolved(
            f"several operations have the reference {reference}: give the id of one: {each}"
        )
    return ids[0]


class ResolutionRequest:
    """One operation that an operator decides about."""

    def __init__(
        self,
        attempts: Attempts,
        policy: Policy,
        read: Snapshot,
        *,
        by: str,
        why: str,
        abandoned: bool,
    ) -> None:
        record = read.record
        if record.version == 0:
            raise _unknown("with this id")
        if is_sealed(record):
            raise Unreadable(
                "its notes are encrypted: resolve it in a process that has the key ring"
            )
        check_who(by=by, why=why)
        if record.label.startswith(LABEL_PREFIX):
            raise NotResolved(
                "it is a saga, and has more than one step: decide with coatcheck sagas show "
                f"{reference_of(record.id)}",
                record,
            )
        self._attempts = attempts
        self._read = read
        self._by = by
        self._why = why
        self._abandoned = abandoned
        # A rerun that fails leaves it in doubt again: an operator is looking after it.
        # And the store is there, or it could not have been read.
        manual = {"recovery": "manual", "reconcile": None, "on_outage": "refuse"}
        self._policy = changed(policy, manual)

    def resolve(self, outcome: object, *, correct: bool = False) -> Flow[Record]:
        """
        End the doubt as *outcome* says; the record afterwards. Raises `NotResolved`.

        *correct*: replace an earlier decision instead.
        """
        known = _outcome_of(outcome, self._read.record)
        resolution = self._resolution(HAPPENED if known.kind is COMPLETE else DID_NOT_HAPPEN)
        flow = resolve(self._read, known, resolution, abandoned=self._abandoned, correct=correct)
        answer: Any = yield from self._attempts.advance(flow, self._policy)
        if isinstance(answer, Unchanged):
            raise self._refused(answer.record, correct=correct)
        record: Record = answer.record
        self._attempts.replay_cache.forget(record.id)  # another process may correct it
        self._log(record)
        return record

    def begin_rerun(self) -> Flow[Operation]:
        """Claim another attempt, now. Raises `NotResolved`."""
        request = self._attempts.request_for(self._read.record)
        resolution = self._resolution("run again")
        flow = rerun(self._read, resolution, request, self._policy, abandoned=self._abandoned)
        started = yield from self._attempts.begin(request, self._policy, flow=flow)
        if isinstance(started, Refuse):
            raise started.cause or started.problem.error()
        if isinstance(started, Unchanged):
            raise self._refused(started.record)
        assert isinstance(started, Operation)
        self._log(started.claim)
        return started

    @property
    def is_of_function(self) -> bool:
        """The operation is the call of a function, not a request."""
        return is_of_function(self._read.record)

    def outcome_of(
        self, operation: Operation, result: object, codec: Codec[Any] | None = None
    ) -> Outcome:
        """What the *result* of that attempt means for its claim."""
        if isinstance(result, Happened):
            return outcome_of_reconcile(result, as_value=self.is_of_function)
        if self.is_of_function:
            return outcome_of_call(operation, result, codec, may_differ=True)
        refuse_unstarted(result)
        logger.error(
            "coatcheck: operation %s (%s) is a request, and its rerun returned a value of type "
            "%s, not Happened(status, headers, body): it is not kept, and a retry gets 409 "
            "result-unavailable",
            *(operation.reference, operation.label, type(result).__name__),
        )
        return Outcome(COMPLETE)

    def finish_rerun(
        self,
        operation: Operation,
        outcome: Outcome,
        result: object,
        codec: Codec[Any] | None = None,
    ) -> Flow[Any]:
        """Store the result of that attempt; what every retry gets from now on."""
        # 400: an operator may have it take other steps than the attempts before.
        answer = yield from self._attempts.complete(operation, outcome, status=400)
        if isinstance(answer, Unchanged):
            raise ClaimLost(f"{self._reference} was taken over while it ran; that attempt counts")
        if isinstance(answer, Refuse):
            raise answer.cause or answer.problem.error()
        assert isinstance(answer, Executed)
        if isinstance(result, Happened) or not self.is_of_function:
            return result
        return value_of(answer, codec, outcome, result)

    @property
    def _reference(self) -> str:
        return reference_of(self._read.record.id)

    def _resolution(self, outcome: str) -> Resolution:
        return Resolution(self._read.now_ms, outcome, self._by, self._why)

    def _log(self, record: Record) -> None:
        # As literals: an operator may have typed line breaks, and a log has lines.
        outcome = progress_of(record).resolutions[-1].outcome
        what = (self._reference, record.label, outcome, self._by, self._why)
        logger.info("coatcheck: operation %s (%s) was resolved: it %s, says %r: %r", *what)

    def _refused(self, current: Record, *, correct: bool = False) -> NotResolved:
        """Why nothing was changed; *current*: as it is now."""
        if current.version == 0:
            return _unknown(self._reference)
        if correct:
            return _not_decided(current)
        return _not_in_doubt(Snapshot(current, self._attempts.now_ms()))


def refusal_of(
    read: Snapshot, *, abandoned: bool = False, correct: bool = False
) -> NotResolved | None:
    """Why an operator cannot decide about the record that was *read*; None: it can be decided."""
    if correct:
        return None if can_correct(read.record) else _not_decided(read.record)
    return None if can_resolve(read, abandoned=abandoned) else _not_in_doubt(read)


def _not_in_doubt(read: Snapshot) -> NotResolved:
    """Why there is nothing to decide about what was *read*."""
    current = read.record
    reference = reference_of(current.id)
    if current.state == COMPLETED:
        words = "is completed already"
    elif current.state != RUNNING:
        words = "was released, and the next retry runs it"
    elif is_lease_over(current, read.now_ms):
        words = (
            f"is not in doubt yet: the lease of attempt {current.attempt} has expired. "
            "If its process is dead, add --abandoned (in Python: abandoned=True)"
        )
    else:
        words = f"is being executed, by attempt {current.attempt}"
    decided = progress_of(current).resolutions
    by = f" (resolved by {decided[-1].by!r}: {decided[-1].why!r})" if decided else ""
    if can_correct(current):
        by += "; to replace that decision, add --correct (in Python: correct=True)"
    return NotResolved(f"{reference} {words}{by}", current)


def _not_decided(current: Record) -> NotResolved:
    """Why there is no decision about *current* that could be corrected."""
    words = "was not ended by a decision of a person, so there is nothing to correct"
    return NotResolved(f"{reference_of(current.id)} {words}", current)


def _unknown(reference: str) -> NotResolved:
    return NotResolved(f"there is no operation {reference}")


def check_who(*, by: str, why: str) -> None:
    """Refuse a decision without its author or its reason."""
    _check("by", by, BY_CHARS_MAX)
    _check("why", why, WHY_CHARS_MAX)


def _check(name: str, text: object, chars_max: int) -> None:
    if not isinstance(text, str) or not text.strip() or len(text) > chars_max:
        raise Misconfigured(
            f"{name} is {text!r:.120}; it must be a text of 1 to {chars_max} characters"
        )


def _outcome_of(outcome: object, record: Record) -> Outcome:
    if isinstance(outcome, DidNotHappen):
        return Outcome(OutcomeKind.RELEASE)
    if not isinstance(outcome, Happened):
        raise Misconfigured(f"{outcome!r} is not an outcome: give Happened(...) or DidNotHappen()")
    known = outcome_of_reconcile(outcome, as_value=_is_value(outcome, record))
    if known.response is None:
        raise Misconfigured(f"{outcome.value!r:.120} is neither JSON nor bytes, so it is not kept")
    return known


def _is_value(outcome: Happened, record: Record) -> bool:
    """*record* is completed with a value; refuses an *outcome* that does not fit."""
    has_value = outcome.value is not None
    has_answer = outcome.status != 200 or bool(outcome.headers) or bool(outcome.body)
    as_value = is_of_function(record)
    if as_value and has_answer and not has_value:
        raise Misconfigured(f"{record.label!r} is a function: give Happened(value=…)")
    if not as_value and has_value and not has_answer:
        raise Misconfigured(f"{record.label!r} is a request: give Happened(status, headers, body)")
    return as_value


class Erased(NamedTuple):
    """What `erase` did."""

    records: int  # how many were deleted, or would be
    left: tuple[str, ...]  # the references of those that run, or have just changed


def erase(attempts: Attempts, store: Store, caller: str, *, dry_run: bool) -> Erased:
    """
    Delete the records of *caller*; *dry_run*: only count them.

    A running operation is left alone: its attempt would store its answer again, and a retry would
    run beside it. Another process that executed an operation may still replay its answer from
    memory, until newer answers take its place or that process ends.
    """
    if not caller:
        raise Misconfigured("caller is empty: give what a caller= function returned, or a digest")
    query = Query(scope=scope_of_caller(caller, attempts.secret), limit=SWEEP_BATCH)
    count, left, now_ms = 0, [], store.now_ms()
    while True:
        records, next_after_id = store.find(query)
        swaps = [Swap(r.id, r.version, None) for r in records if can_erase(r, now_ms)]
        conflicts = [None] * len(swaps) if dry_run else store.swap(swaps) if swaps else ()
        erased = {
            swap.id
            for swap, kept in zip(swaps, conflicts, strict=True)
            if not kept or not kept.version
        }
        if not dry_run:
            for id in erased:
                attempts.replay_cache.forget(id)
        count += len(erased)
        left += [reference_of(record.id) for record in records if record.id not in erased]
        if next_after_id is None:
            break
        query = replace(query, after_id=next_after_id)
    if not count and not left and any(len(r.scope) == 1 for r in store.find(Query()).records):
        raise Misconfigured("the store is compact: it does not keep whose its records are")
    return Erased(count, tuple(left))
