"""What people do about sagas: list and show them, and decide about blocked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.flow import Effect, run
from coatcheck.core.key import parse_reference, prefix_of, reference_of
from coatcheck.core.progress import Progress, Resolution, is_sealed, progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING, Record, State, Swap
from coatcheck.core.recovery import Resolved, Unchanged
from coatcheck.core.response import encode_value
from coatcheck.core.saga.actions import LABEL_PREFIX
from coatcheck.core.saga.decisions import (
    CHANGE_ACCEPTED,
    DID_NOT_HAPPEN,
    HAPPENED,
    RESUMED,
    SKIPPED,
    decide,
    is_blocked,
    open_steps,
    with_step_done,
    without_definition,
    without_step,
)
from coatcheck.core.saga.view import SagaRun, is_saga, saga_run
from coatcheck.engine.outcomes import logger
from coatcheck.engine.resolution import check_who
from coatcheck.errors import Misconfigured, NotResolved, Unreadable
from coatcheck.stores.contract import Query, Store

SagaState = Literal["running", "blocked", "waiting", "completed"]
# "completed" also has those that were undone, and "running" those that undo.
STATES: dict[str, State] = {
    "running": RUNNING,
    "blocked": IN_DOUBT,
    "waiting": FAILED,
    "completed": COMPLETED,
}
# At most this many records are read for one list: a search by label needs to know the whole label.
SEARCHED_MAX = 20_000
FOUND_MAX = 100


def list_sagas(
    store: Store,
    now_ms: int,
    *,
    name: str | None = None,
    state: str | None = None,
    limit: int = 50,
) -> list[SagaRun]:
    """The sagas in *store*, the newest first."""
    if state is not None and state not in STATES:
        raise Misconfigured(f"state is {state!r}; it must be one of {', '.join(STATES)}")
    query = Query(
        state=None if state is None else STATES[state],
        label=None if name is None else LABEL_PREFIX + name,
        newest_first=True,
        limit=SEARCHED_MAX if name is None else limit,
    )
    records = [record for record in store.find(query).records if is_saga(record)]
    return [saga_run(record, now_ms) for record in records[:limit]]


def find_saga(store: Store, key: str, name: str | None = None) -> Record:
    """The record of the saga that *key* names: its key, "checkout:42", or its reference."""
    records = [*_found(store, key), *_found_by_both(store, key)]
    found = {r.id: r for r in records if is_saga(r) and name in (None, _name_of(r))}
    if not found:
        raise NotResolved(f"there is no saga {key!r}")
    if len(found) > 1:
        each = ", ".join(f"{_name_of(r)}:{r.key} ({reference_of(r.id)})" for r in found.values())
        raise NotResolved(f"{key!r} is several sagas: give one of {each}")
    (record,) = found.values()
    return _whole(store, record)


def _name_of(record: Record) -> str:
    return record.label.removeprefix(LABEL_PREFIX)


def _found(store: Store, text: str) -> Sequence[Record]:
    reference = parse_reference(text)
    if reference is not None:
        page = store.find(Query(id_prefix=prefix_of(reference), limit=FOUND_MAX))
        found = [record for record in page.records if reference_of(record.id) == reference]
        if found:
            return found
    return store.find(Query(key=text, limit=FOUND_MAX)).records if text else ()


def _found_by_both(store: Store, text: str) -> Sequence[Record]:
    name, colon, key = text.partition(":")
    if not colon or not key:
        return ()
    return store.find(Query(label=LABEL_PREFIX + name, key=key, limit=FOUND_MAX)).records


def _whole(store: Store, record: Record) -> Record:
    """The record itself: what a search returns may be encrypted, or cut."""
    (whole,) = store.get((record.id,))
    return record if whole is None else whole


class Decisions:
    """The decisions of one person about one saga."""

    def __init__(self, store: Store, record: Record, now_ms: int, *, by: str, why: str) -> None:
        check_who(by=by, why=why)
        if is_sealed(record):
            raise Unreadable("its steps are encrypted: decide in a process that has the key ring")
        self._store = store
        self._record = record
        self._by = by
        self._why = why
        self._now_ms = now_ms

    def resume(self, *, accept_change: bool = False) -> Record:
        """Have it continue; *accept_change*: with the definition that it has now."""
        record = self._record
        if accept_change:
            return self._decided(lambda: without_definition(record), CHANGE_ACCEPTED)
        return self._decided(lambda: progress_of(record), RESUMED)

    def skip(self, step: str) -> Record:
        """Have it continue as if *step* were done, without a result."""
        return self._decided(lambda: self._with_done(step, None), f"{SKIPPED} {step}")

    def resolve(self, step: str, outcome: object) -> Record:
        """Have it continue with what happened to *step*."""
        match outcome:
            case Happened():
                words = f"{step} {HAPPENED}"
                return self._decided(lambda: self._with_done(step, outcome.value), words)
            case DidNotHappen():
                words = f"{step} {DID_NOT_HAPPEN}"
                return self._decided(lambda: self._without(step), words)
        raise Misconfigured(f"{outcome!r} is not an outcome: give Happened(...) or DidNotHappen()")

    def _with_done(self, step: str, value: object) -> Progress:
        self._check_step(step)
        result = encode_value(value)
        if result is None:
            raise Misconfigured(f"{value!r:.120} is neither JSON nor bytes, so it is not kept")
        return with_step_done(self._record, step, result, self._now_ms)

    def _without(self, step: str) -> Progress:
        self._check_step(step)
        return without_step(self._record, step)

    def _check_step(self, step: str) -> None:
        steps = open_steps(self._record)
        if step not in steps:
            known = f"decide about one of {', '.join(steps)}" if steps else "resume it"
            raise NotResolved(f"{step!r} is not open in this saga: {known}", self._record)

    def _decided(self, change: Callable[[], Progress], outcome: str) -> Record:
        record = self._record
        answer: Resolved | Unchanged = Unchanged(record)
        if is_blocked(record):
            resolution = Resolution(self._now_ms, outcome, self._by, self._why)
            answer = run(decide(record, change(), resolution), self._perform)
        if isinstance(answer, Unchanged):
            state = saga_run(answer.record, self._now_ms).state if answer.record.version else "gone"
            raise NotResolved(f"the saga is not blocked: it is {state}", answer.record)
        logger.info(
            "coatcheck: saga %s (%s) continues: %s, says %r: %r",
            *(reference_of(record.id), record.label, outcome, self._by, self._why),
        )
        return answer.record

    def _perform(self, effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        return self._store.swap((effect,))[0]
