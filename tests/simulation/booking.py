"""A saga of four steps with undos, and the agency that its functions call.

    flight   a plain step: an unknown outcome is sent again, with the same key
    hotel    a step with a probe, which is asked
    charge   a plain step, which the agency sometimes refuses
    ticket   after the pivot: the agency is sometimes busy, and the step is retried

The flight and the hotel are branches, which run at the same time.
The agency decides once for each key, and calls are late, lost or answered too late, as elsewhere.
The saga may also fail outside of its steps, and not again in the next attempt: what has begun to
undo must not go forward again. It does not fail before a step that an earlier attempt has begun: the
function of a saga takes all of them again. Its functions are retried for as long as it takes, so
that no saga is blocked here.

    without faults, each function is called once; that of the ticket until the agency is not busy
    nothing is undone after the ticket was asked for
    the hotel is not called again, in this attempt or a later one, before its probe was asked
    no function is called again by an attempt that has not confirmed its claim since the last call
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.progress import progress_of
from coatcheck.core.record import Record
from coatcheck.core.saga.actions import Blocked, Retry
from coatcheck.errors import StepsChanged
from coatcheck.operation import Operation
from coatcheck.saga.action import Setting
from coatcheck.saga.branches import raise_first
from coatcheck.saga.run import Saga

from .downstream import Downstream, Generation, generation_of
from .handlers import Ended, Handlers
from .runner import Doing, done
from .world import Host, Pause, Resume, Violation

if TYPE_CHECKING:
    from .served import ServedRequest

BRANCHES = ("flight", "hotel")
STEPS = (*BRANCHES, "charge", "ticket")
# The share of charges that are refused, and of tickets for which the agency is busy; of sagas that fail before a step or at the end, and of calls
# in which trouble comes.
REFUSED = 0.3
FAILS = 0.15
STRUCK = 0.4
# More than any schedule needs: a call is lost seldom, and the faults end.
RETRY = Retry(tries=200, pause=0.05, pause_max=0.5)


class RefusedError(Exception):
    """The agency has refused."""


class Booking:
    """The saga, the same in every process."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers
        self.world = handlers.world
        self._ledger = Downstream(self.world)
        self._answers: dict[str, bytes | None] = {}  # by key; None: refused
        self._is_calm = True  # there were no faults yet
        self._calls: defaultdict[str, list[int]] = defaultdict(list)  # by key: their attempts
        self._asked_for: set[tuple[str, int]] = set()  # by key and attempt, since the last call
        self._versions: dict[tuple[str, int], int] = {}  # of the claim, at the last call
        self._past_pivot: set[Generation] = set()
        self._effects: defaultdict[Generation, list[str]] = defaultdict(list)

    def execute(self, served: ServedRequest, claim: Record, operation: Operation) -> Ended:
        """Run the saga for *claim*, as `SagaFunction` does."""
        if not progress_of(claim).steps:
            refusal = yield from self.handlers.begin(claim)
            if refusal is not None:
                return refusal
        attempts = served.process.attempts
        run: Callable[[Any], Any] = attempts.steps._run
        name = f"{claim.id.hex()}.{claim.created_ms}"
        setting = Setting(
            *(name, run, attempts.now_ms, attempts.steps.confirm, attempts.reconcile_calls),
            is_async=False,
            retry=RETRY,
        )
        saga = Saga(setting, operation)
        error: BaseException | None = None
        try:
            yield from self._book(served, claim, saga)
        except (GeneratorExit, Violation):  # its process has crashed
            raise
        except BaseException as raised:  # noqa: BLE001 - the saga decides what it means
            error = raised
        try:
            yield from done(run(saga.end(error)))
            failure = saga.failure_after(error)
        except StepsChanged as changed:
            raise Blocked("", str(changed)) from changed
        if failure is not None:
            self.world.happened("saga", "undoes", claim, failure)
            yield from done(run(saga.undo(failure)))
        word = b"done" if failure is None else b"undone"
        return self.handlers.answered(201, word + b" for " + claim.fingerprint)

    def _book(
        self, served: ServedRequest, claim: Record, saga: Saga
    ) -> Generator[Pause, Any, None]:
        with saga._branching():
            branches = [self._step(served, claim, saga, name) for name in BRANCHES]
            yield from together(served.process, branches)
        yield from self._step(served, claim, saga, "charge")
        self._fail_sometimes(saga, "ticket")
        saga.pivot()
        yield from self._step(served, claim, saga, "ticket", may_fail=False)

    def _step(
        self,
        served: ServedRequest,
        claim: Record,
        saga: Saga,
        name: str,
        *,
        may_fail: bool = True,
    ) -> Generator[Pause, Any, None]:
        yield self.handlers.delay_ms()
        if may_fail:
            self._fail_sometimes(saga, name)
        called = functools.partial(self._called, served, claim, saga.operation)
        options: dict[str, Any] = {"undo": functools.partial(self._undone, called, claim, name)}
        if name == "hotel":
            options["probe"] = functools.partial(self._probed, claim)
        step: Any = saga.step(name, called, **options)
        yield from done(step)

    def _fail_sometimes(self, saga: Saga, before: str) -> None:
        """Raise an error, unless an earlier attempt has come further."""
        is_new = progress_of(saga.operation.claim).step(before) is None and not saga._is_past_pivot
        if is_new and self.world.chance(FAILS):
            raise KeyError(before)

    # --- the agency -----------------------------------------------------------------------------

    def _called(
        self, served: ServedRequest, claim: Record, operation: Operation, *, key: str
    ) -> Any:
        """An action or an undo; its result is that of `Doing`."""
        self.world.happened("saga", "calls", claim, key)
        self._check_call(claim, operation, key)
        if key.endswith(":ticket"):
            self._past_pivot.add(generation_of(claim))
        if self.world.chance(STRUCK):
            served.process.setting.strike(served.process)
        return Doing(self._answered(claim, key))

    def _undone(self, called: Callable[..., Any], claim: Record, name: str, *, key: str) -> Any:
        self.world.require(key.endswith(f":{name}:undo"), "saga: an undo has a key of its own")
        is_past_pivot = generation_of(claim) in self._past_pivot
        self.world.require(not is_past_pivot, "saga: nothing is undone after the pivot")
        return called(key=key)

    def _check_call(self, claim: Record, operation: Operation, key: str) -> None:
        calls = self._calls[key]
        calls.append(claim.attempt)
        self._is_calm = self._is_calm and self.handlers.faults.is_calm
        self.world.require(
            len(calls) == 1 or not self._is_calm or key.endswith(":ticket"),
            "saga: without faults, each function is called once",
        )
        is_again = min(calls) < claim.attempt or calls.count(claim.attempt) > 1
        if key.endswith(":hotel") and is_again:
            is_asked = (key, claim.attempt) in self._asked_for
            self.world.require(is_asked, "saga: a probe is asked before its step is repeated")
        self._asked_for.discard((key, claim.attempt))
        version = operation.claim.version
        is_ours = version > self._versions.get((key, claim.attempt), 0)
        self.world.require(is_ours, "saga: a call is repeated after its claim was confirmed")
        self._versions[key, claim.attempt] = version

    def _answered(self, claim: Record, key: str) -> Generator[Pause, Any, bytes]:
        answer: bytes | None = yield functools.partial(self._send, claim, key)
        if answer is None:
            raise RefusedError
        return answer

    def _send(self, claim: Record, key: str, resume: Resume) -> None:
        world, faults = self.world, self.handlers.faults
        act = functools.partial(self._act, claim, key)
        if world.chance(faults.fails_late / 2):  # it arrives late, or never
            world.happened("downstream", "does not answer", claim)
            if world.chance(0.7):
                world.later(faults.timeout_ms + world.between(0, faults.late_ms_max), act)
            world.later(faults.timeout_ms, resume, None, TimeoutError("no answer"))
        else:
            world.later(self.handlers.delay_ms(), self._arrive, act, resume)

    def _arrive(self, act: Callable[[], bytes | None], resume: Resume) -> None:
        self.world.later(self.handlers.delay_ms(), resume, act())

    def _act(self, claim: Record, key: str) -> bytes | None:
        """Decide, once for *key*, unless the agency is busy."""
        if key.endswith(":ticket") and key not in self._answers and self.world.chance(REFUSED):
            return None
        if key not in self._answers:
            is_refused = key.endswith(":charge") and self.world.chance(REFUSED)
            self._answers[key] = None if is_refused else key.encode()
            if not is_refused:
                self._ledger.add(claim, key.encode())
                self._effects[generation_of(claim)].append(key.partition(":")[2].partition(":")[2])
        return self._answers[key]

    def _probed(self, claim: Record, *, key: str) -> Doing[object]:
        return Doing(self._asked(claim, key))

    def _asked(self, claim: Record, key: str) -> Generator[Pause, Any, object]:
        yield self.handlers.delay_ms()
        known = self._answers.get(key)
        self._asked_for.add((key, claim.attempt))
        yield self.handlers.delay_ms()
        self.world.happened("probe", "says no" if known is None else "says yes", claim)
        return DidNotHappen() if known is None else Happened(value=known)

    # --- what comes of it -----------------------------------------------------------------------

    def check(self, answers: dict[Generation, bytes | None]) -> None:
        """All is over: each saga that has ended has happened as a whole, or not at all."""
        for generation, answer in answers.items():
            effects = self._effects[generation]
            acted = [name for name in effects if ":" not in name]
            undone = [name.partition(":")[0] for name in effects if ":" in name]
            if answer is None or b"undone for" not in answer:
                is_whole = in_order(acted) == list(STEPS) and not undone
                self.world.require(is_whole, "saga: each step has happened, and none was undone")
                continue
            is_empty = set(acted) <= set(undone)
            self.world.require(is_empty, "saga: of a saga that was undone, nothing is left")
            in_reverse = [name for name in STEPS if name in undone]
            self.world.require(
                in_order(undone[::-1]) == in_reverse, "saga: undos run in reverse order, each once"
            )
            for name in acted:
                is_before = effects.index(name) < effects.index(f"{name}:undo")
                self.world.require(is_before, "saga: nothing acts after it was undone")


def in_order(names: list[str]) -> list[str]:
    """*names*, with the branches in their order if the first two are both of them."""
    return [*sorted(names[:2]), *names[2:]] if set(names[:2]) == set(BRANCHES) else names


def together(host: Host, bodies: list[Generator[Pause, Any, None]]) -> Generator[Pause, Any, None]:
    """Run *bodies* at the same time, as `saga.gather` does."""
    errors: list[BaseException | None] = []

    def branch(body: Generator[Pause, Any, None], resume: Resume) -> Generator[Pause, Any, None]:
        try:
            yield from body
        except (GeneratorExit, Violation):
            raise
        except BaseException as error:  # noqa: BLE001 - raised when all have ended
            errors.append(error)
        else:
            errors.append(None)
        if len(errors) == len(bodies):
            resume()

    def start(resume: Resume) -> None:
        for body in bodies:
            host.start(branch(body, resume))

    yield start
    raise_first(errors)
