"""The rules: what must hold, whatever goes wrong.

They look at what happened, never at why: at what the store accepts, at what clients get, and
at the ledger downstream. What is promised of effects depends on the kind of route:

    retry        one effect where no fault outlasts a lease; otherwise the handler may run again
    derived      retry, with a derived key downstream: one effect, always
    reconcile    one effect, but for those that come after a later attempt has asked for them
    fenced       reconcile, with a downstream that refuses old fences: one effect, always
    manual       one effect, always; a zombie's included
    transaction  one effect, always, and it is there if and only if the record is
    deferred     retry, reconcile or manual, of deferred work: as above
    resolved     reconcile or manual, and operators decide: one effect of those they could ask for
    steps        any recovery, and each step its own promise: see `stepping`
    saga         all of its steps happen, or none of them stays: see `booking`

Steps, deferred work and decisions have rules of their own, in `progress_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Answer, Executed, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    IN_DOUBT,
    RUNNING,
    Record,
    is_lease_over,
    is_retention_over,
    legal_moves,
)
from coatcheck.core.response import decode_value

from .downstream import Downstream, Effect, Generation, generation_of
from .faults import AHEAD_LEASES_MAX
from .progress_rules import ProgressRules
from .stepping import BY_HAND, results_in
from .world import World

if TYPE_CHECKING:
    from .served import ServedRequest


class Rules(ProgressRules):
    """What happened so far, and whether it was right."""

    def __init__(self, world: World, policy: Policy, *, is_calm: bool) -> None:
        super().__init__(world)
        self._policy = policy
        self._is_calm = is_calm
        self._ahead_ms = int(AHEAD_LEASES_MAX * policy.lease_ms)
        self._current: dict[bytes, Record] = {}  # what the store has acknowledged
        self._versions: dict[bytes, int] = {}  # the highest there was
        self._executions: set[tuple[Generation, int, bool]] = set()
        self.completed: dict[Generation, bytes | None] = {}
        self._over: set[Generation] = set()  # swept, or another generation has begun
        self._finals: dict[Generation, bytes] = {}  # the answers that clients got

    # --- what the store accepts ---------------------------------------------------------------

    def accepted(self, before: Record | None, record: Record, writer: object, now_ms: int) -> str:
        """*writer* has put *record* in the place of *before*; the name of that move."""
        require = self.require
        require(before == self._current.get(record.id), "what was acknowledged is kept")
        self._current[record.id] = record
        ahead_ms = now_ms + self._ahead_ms
        moves = legal_moves(before, record, ahead_ms)
        require(moves, "every change is a legal move")
        is_new_generation = before is None or before.created_ms != record.created_ms
        names = [
            m.name for m in moves if (m.name in ("claim", "new generation")) == is_new_generation
        ]
        require(names, "a new generation begins when the window is over, and not before")
        is_heartbeat = str(writer).startswith("heartbeat")
        is_begun = record.state == RUNNING and names[0] != "renew"
        require(not (is_heartbeat and is_begun), "a heartbeat claims nothing")
        is_own = before is None or before.nonce == record.nonce
        require(is_own or not is_heartbeat, "a heartbeat writes only what its own process holds")
        highest = self._versions.get(record.id, 0)
        require(record.version > highest, "versions only grow, also across generations")
        self._versions[record.id] = record.version
        if before is not None:
            if is_new_generation:
                self._over.add(generation_of(before))
            else:
                self._check_generation(before, record, names[0])
                self.check_written(before, record, writer)
                self.check_doubt(before, record, writer, asks=self._policy.recovery == "reconcile")
            if names[0] == "defer":
                self.check_handed(before)
            else:
                self._check_holder(before, record, writer, ahead_ms)
        if record.state == RUNNING:
            longest_ms = ahead_ms + max(self._policy.lease_ms, self.offered_ms(record.nonce))
            require(record.lease_until_ms <= longest_ms, "no claim holds longer than its lease")
        if record.state == COMPLETED:
            require(generation_of(record) not in self.completed, "a generation is completed once")
            self.completed[generation_of(record)] = record.response
        return names[0]

    def _check_generation(self, before: Record, record: Record, move: str) -> None:
        is_same = before.window_until_ms == record.window_until_ms
        is_same = is_same and before.expires_ms == record.expires_ms
        self.require(is_same, "the times of a generation are set once")
        # By the move, not by the nonce: if the answer to a claim was lost, and an operator has ended
        # that attempt, the same request may begin the next one.
        is_next = record.state == RUNNING and move not in ("renew", "defer")
        is_counted = record.attempt == before.attempt + is_next
        self.require(is_counted, "attempts are counted one by one")
        is_open = b"" in (before.fingerprint, record.fingerprint)
        is_same = record.fingerprint == before.fingerprint
        self.require(is_same or is_open, "another request never continues a generation")

    def _check_holder(self, before: Record, record: Record, writer: object, ahead_ms: int) -> None:
        if before.state != RUNNING or getattr(writer, "nonce", before.nonce) == before.nonce:
            return
        self.require(not self._is_calm, "a living executor keeps its claim")
        is_operator = getattr(writer, "is_operator", False)
        # Lease in its own process, when it decided to write.
        is_free = is_operator or getattr(writer, "beside", None) != before.nonce
        self.require(is_free, "no request takes over from an attempt that its own process executes")
        is_parked = is_operator or record.state in (RUNNING, IN_DOUBT)
        is_parked = is_parked and is_lease_over(before, ahead_ms)
        self.require(is_parked, "only its holder ends an attempt, unless its lease has run out")

    def swept(self, record: Record, now_ms: int) -> None:
        """*record* is forgotten."""
        is_over = is_retention_over(record, now_ms + self._ahead_ms)
        self.require(is_over, "nothing is swept before its retention is over")
        self._current.pop(record.id, None)
        self._over.add(generation_of(record))

    # --- what clients get ---------------------------------------------------------------------

    def begun(self, claim: Record, *, is_work: bool) -> None:
        """The attempt that *claim* names executes; or its deferred work, if *is_work*."""
        if self._policy.mode == "transaction":  # it is no attempt before it is committed
            return
        execution = (generation_of(claim), claim.attempt, is_work)
        self.require(execution not in self._executions, "an attempt executes at most once")
        self._executions.add(execution)

    def answered(self, served: ServedRequest, answer: Answer, current: Record) -> None:
        """A request ends with *answer*, while *current* is in the store."""
        if current.nonce == served.nonce:
            is_ended = current.state != RUNNING
            self.require(is_ended, "a request that is answered holds no claim")
        match answer:
            case Executed(claim):
                assert served.outcome is not None
                self._executed(generation_of(claim), served.outcome)
            case Replay(record, response):
                is_own = response.endswith(b" for " + served.request.fingerprint)
                self.require(is_own, "no request gets the answer to another one")
                is_in_time = served.request.now_ms < record.window_until_ms + self._ahead_ms
                self.require(is_in_time, "no request gets an answer whose window is over")
                self._final(generation_of(record), response)
            case Refuse():
                is_right = served.claim is None or current.nonce != served.nonce
                is_right = is_right or current.state in (FAILED, IN_DOUBT)
                self.require(is_right, "a request that completed is not refused")

    def _executed(self, generation: Generation, outcome: Outcome) -> None:
        if outcome.kind is not OutcomeKind.COMPLETE:
            return
        if generation not in self.completed:  # it slept until this generation was over
            self.require(generation in self._over, "an answer leaves after its record is safe")
        elif outcome.response is not None:
            self._final(generation, outcome.response)

    def _final(self, generation: Generation, response: bytes) -> None:
        is_kept = self.completed.get(generation) == response
        self.require(is_kept, "an answer leaves after its record is safe")
        known = self._finals.setdefault(generation, response)
        self.require(known == response, "a generation has one final answer")

    # --- what comes of it ---------------------------------------------------------------------

    def check_effects(self, kind: str, downstream: Downstream) -> None:
        """All is over: what has happened downstream is what was promised."""
        count, promise = COUNTED[kind]
        if kind == "deferred":
            count = COUNTED[self._policy.recovery][0]
        is_promised = kind not in ("retry", "deferred") or not self._policy.reruns
        if is_promised or self._is_calm:
            self._check_count(downstream, count, promise)
        for generation, response in self._finals.items():
            answers = [effect.response for effect in downstream.effects.get(generation, ())]
            self.require(
                decode_value(response) in answers,
                "an effect exists for every success that a client got",
            )
        if kind == "transaction":
            is_same = set(downstream.effects) == set(self.completed)
            self.require(is_same, "transaction: record and effect are there together, or neither")

    def check_steps(self, ledgers: dict[str, Downstream]) -> None:
        """All is over: each step has happened as often as was promised of it."""
        for name, (count, promise) in COUNTED_STEPS.items():
            if name != "reserve" or self._is_calm:
                self._check_count(ledgers[name], count, promise)
        for generation, response in self._finals.items():
            for name, result in results_in(decode_value(response)).items():
                answers = [effect.response for effect in ledgers[name].effects.get(generation, ())]
                is_true = result in answers or result.endswith(BY_HAND)
                self.require(is_true, "every step of a success that a client got has happened")

    def _check_count(
        self, downstream: Downstream, count: Callable[[list[Effect]], int], promise: str
    ) -> None:
        most = max(map(count, downstream.effects.values()), default=0)
        self.require(most <= 1, promise)


def _in_time(effects: list[Effect]) -> int:
    return sum(not effect.is_late for effect in effects)


COUNTED: dict[str, tuple[Callable[[list[Effect]], int], str]] = {
    "retry": (len, "retry: one effect where nothing outlasts a lease"),
    "derived": (len, "derived: one effect, because downstream knows the key"),
    "reconcile": (_in_time, "reconcile: one effect, of those that could be asked for"),
    "fenced": (len, "fenced: one effect, because downstream refuses old fences"),
    "manual": (len, "manual: one effect"),
    "transaction": (len, "transaction: one effect"),
    "deferred": (len, "deferred: one effect, as its recovery promises"),
    "resolved": (_in_time, "resolved: one effect, of those that operators could ask for"),
}
COUNTED_STEPS: dict[str, tuple[Callable[[list[Effect]], int], str]] = {
    "reserve": (len, "steps: a plain step happens once where nothing outlasts a lease"),
    "charge": (len, "steps: at most once is once, always"),
    "ship": (_in_time, "steps: at most once, of what a probe could ask for"),
}
