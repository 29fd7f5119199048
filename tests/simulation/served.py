"""A request in a process, from `begin` to `complete` or `fail`.

What a door does around production's flows: it claims, runs the handler if it got an operation, and
ends that. Also the other ways to an operation: work that was deferred, what an operator decides, and
recovery in the background.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.flow import Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Answer, ClaimRequest, Executed, Refuse, Snapshot
from coatcheck.core.policy import Policy
from coatcheck.core.record import RUNNING, Record, is_lease_over
from coatcheck.core.recovery import recover
from coatcheck.engine.deferred import DeferredWork, defer
from coatcheck.engine.resolution import ResolutionRequest
from coatcheck.engine.transactions import OperationTransaction
from coatcheck.errors import (
    ClaimLost,
    NotResolved,
    OutcomeUnknown,
    StepInDoubt,
    StoreUnavailable,
    Uncertain,
)
from coatcheck.operation import Operation

from .handlers import HandlerError
from .runner import Doing, Runner
from .transactions import SimulatedAccess
from .world import Pause

if TYPE_CHECKING:
    from .process import Process

R = TypeVar("R")

# What a handler may raise.
ERRORS = (HandlerError, ClaimLost, StepInDoubt, StoreUnavailable, Uncertain)
# The label of every operation: that of a guarded function, whose results are values.
LABEL = "work"


class ServedRequest:
    """One request in one process; or one delivery of its work, or an operator's decision about it."""

    def __init__(
        self, process: Process, id: bytes, fingerprint: bytes, *, is_operator: bool = False
    ) -> None:
        self.process = process
        self.policy = process.setting.policy
        self.is_operator = is_operator
        self.is_work = False
        self.is_deferred = False
        self.claim: Record | None = None  # what it executed, and how that ended
        self.outcome: Outcome | None = None
        self.beside: int | None = None  # whose claim its process held when it last decided to write
        self._operation: Operation | None = None
        self._attempts = process.attempts
        self._run_flow = Runner(process, lambda _swap: self, self).run
        self.becomes(self._attempts.new_request(id, fingerprint, key="key", caller="", label=LABEL))

    def __str__(self) -> str:
        return f"{self.process} served {self.nonce % 10_000:04}"

    def becomes(self, request: ClaimRequest) -> None:
        """Go on as *request*, which production has made for the record itself."""
        self.request = request
        self.process.served[request.nonce] = self

    @property
    def nonce(self) -> int:
        """What names its attempt."""
        return self.request.nonce

    def is_about_to_write(self, id: bytes) -> None:
        """Note whose claim of *id* its process holds now."""
        lease = self._attempts.heartbeat.leases.get(id)
        self.beside = None if lease is None else lease.claim.nonce

    def _run(self, flow: Flow[R]) -> Generator[Pause, Any, R]:
        return self._run_flow(flow)

    # --- as a request, and as work --------------------------------------------------------------

    def run(self) -> Generator[Pause, Any, Answer | None]:
        """The answer; None: an error, or it comes later."""
        self.process.world.happened(self, "begins")
        begin = self._attempts.begin(self.request, self.policy, self._transaction())
        started = yield from self._run(begin)
        return (yield from self._executed(started))

    def _transaction(self) -> OperationTransaction | None:
        if self.policy.mode != "transaction":
            return None
        access = SimulatedAccess(self)
        return OperationTransaction(self._attempts, access.database, access)

    def work(self, text: str) -> Generator[Pause, Any, Answer | None]:
        """Do the deferred work that *text* names. The answer; None: an error."""
        self.is_work = True
        self.process.world.happened(self, "takes up work")
        work = DeferredWork(self._attempts, text, self.policy)
        try:
            started = yield from self._run(work.begin())
        except StoreUnavailable:
            return None
        return (yield from self._executed(started))

    def _executed(
        self, started: Operation | Answer | Refuse
    ) -> Generator[Pause, Any, Answer | None]:
        if not isinstance(started, Operation):
            return self._answered(started)
        try:
            outcome = yield from self._handled(started)
        except ERRORS as error:
            answer = yield from self._run(self._attempts.fail(started, error))
            if answer is None:
                self.process.world.happened(self, "ends in an error", str(error))
            return self._answered(answer)
        if self.is_deferred and outcome.kind is OutcomeKind.COMPLETE:
            self.process.world.happened(self, "gets: Accepted")
            return None
        return self._answered((yield from self._run(self._attempts.complete(started, outcome))))

    def _handled(self, operation: Operation) -> Generator[Pause, Any, Outcome]:
        """Run the handler."""
        setting, claim = self.process.setting, operation.claim
        self.claim, self._operation = claim, operation
        setting.rules.begun(claim, is_work=self.is_work)
        self.process.world.happened(self, "executes", claim)
        setting.strike(self.process)
        if operation.policy.mode == "transaction":
            connection = operation.connection
            self.outcome = yield from setting.handlers.execute(claim, connection.charge)
        else:
            operation.exchange = SimulatedExchange(self, operation)
            self.outcome = yield from setting.handle(self, claim, operation)
        return self.outcome

    def _answered(self, answer: Answer | None) -> Answer | None:
        if answer is None:
            return None
        if isinstance(answer, Refuse) and answer.problem.code == "store-unavailable":
            self.process.world.happened(self, "ends in an error", answer.problem.detail)
            return None
        setting = self.process.setting
        setting.rules.answered(self, answer, setting.store.get(self.request.id))
        what = answer.problem.code if isinstance(answer, Refuse) else type(answer).__name__
        self.process.world.happened(self, f"gets: {what}")
        return answer

    # --- as an operator ----------------------------------------------------------------------------

    def resolve(
        self, seen: Snapshot, outcome: Outcome, *, abandoned: bool
    ) -> Generator[Pause, Any, None]:
        """Say what became of what was *seen*; raises if the store does not answer."""
        is_happened = outcome.kind is OutcomeKind.COMPLETE
        known = Happened(value=outcome.response) if is_happened else DidNotHappen()
        what = "decides"
        try:
            yield from self._run(self._resolution(seen, abandoned=abandoned).resolve(known))
        except NotResolved:
            what = "decides too late"
        self.process.world.happened(self, what, known)

    def rerun(self, seen: Snapshot, *, abandoned: bool) -> Generator[Pause, Any, None]:
        """Run what was *seen* again, now; raises if the store does not answer."""
        request = self._resolution(seen, abandoned=abandoned)
        try:
            operation = yield from self._run(request.begin_rerun())
        except NotResolved:
            self.process.world.happened(self, "decides too late", "run again")
            return
        try:
            outcome = yield from self._handled(operation)
        except ERRORS as error:
            yield from self._run(self._attempts.fail(operation, error))
            self.process.world.happened(self, "ends in an error", str(error))
            return
        try:
            yield from self._run(request.finish_rerun(operation, outcome, None))
        except (ClaimLost, OutcomeUnknown) as error:
            self.process.world.happened(self, "decides too late", str(error))
        else:
            self._answered(Executed(operation.claim))

    def _resolution(self, seen: Snapshot, *, abandoned: bool) -> ResolutionRequest:
        why = "asked downstream"
        return ResolutionRequest(
            self._attempts, self.policy, seen, by=str(self), why=why, abandoned=abandoned
        )

    # --- in the background ----------------------------------------------------------------------

    def recover(self, policy: Policy) -> Generator[Pause, Any, None]:
        """
        Recover an abandoned operation; raises if the store does not answer.

        `Recovery._recover`, which reads and runs in a thread of its own.
        """
        record = yield from self.current(self.request.id)
        if not record.version:
            return
        self.process.advancing = self
        request = self._attempts.request_for(record)
        flow = recover(Snapshot(self._attempts.current(record), request.now_ms), request, policy)
        recovered = self.process.recovery._recovered(self._attempts, flow, policy)
        kind = yield from self._run(recovered)
        if kind is not None:
            self.process.world.happened(self, "recovers", kind.value)

    # --- what others ask it ---------------------------------------------------------------------

    def is_known_lost(self) -> bool:
        """Its lease is over, as it knows itself, and another attempt has its claim."""
        assert self._operation is not None
        claim, setting = self._operation.claim, self.process.setting
        current = setting.store.get(claim.id)
        is_ours = current.nonce == claim.nonce and current.state == RUNNING
        return is_lease_over(claim, self.process.now_ms()) and not is_ours

    def current(self, id: bytes) -> Generator[Pause, Any, Record]:
        """What the store has of *id*."""
        store = self.process.setting.store
        record: Record = yield store.ask(functools.partial(store.get, id))
        return record


class SimulatedExchange:
    """The HTTP exchange of one served; its client may have to ask later."""

    def __init__(self, served: ServedRequest, operation: Operation) -> None:
        self._served = served
        self._operation = operation

    def accept(self) -> Any:
        """No handler here asks for that."""
        raise NotImplementedError

    def defer(self, lease_ms: int | None) -> Doing[str]:
        """Leave the work to another process."""
        return Doing(self._defer(lease_ms or self._served.policy.lease_ms))

    def _defer(self, lease_ms: int) -> Generator[Pause, Any, str]:
        served = self._served
        served.process.setting.rules.offers(served.nonce, lease_ms)
        token = yield from served._run(defer(served.process.attempts, self._operation, lease_ms))
        served.is_deferred = True
        return token
