"""One run of a saga: what its function gets, and how it is undone.

The function runs again from its beginning in each attempt. A step that is recorded returns its
stored result, so the attempt comes to where the last one ended. If that attempt had begun to undo,
no new step begins: the function only names the undos, which then run in reverse order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from coatcheck.core.answers import Happened
from coatcheck.core.flow import Call, Effect, Flow, Sleep
from coatcheck.core.policy import Duration
from coatcheck.core.progress import PROGRESS_BYTES_MAX, STEP_BYTES_MAX, Progress, progress_of
from coatcheck.core.response import encode_value
from coatcheck.core.saga.actions import (
    PIVOT,
    UNDOING,
    Act,
    ActionPlan,
    Ask,
    Blocked,
    Confirm,
    Ended,
    Failure,
    NotStored,
    Now,
    Retry,
    act,
    decode_ended,
    decode_step,
    encode_ended,
    encoded_result,
    failure_of,
)
from coatcheck.core.steps import ALWAYS_MS
from coatcheck.engine.outcomes import outcome_of_reconcile
from coatcheck.engine.steps import performed
from coatcheck.errors import Misconfigured, StepFailed, StepsChanged
from coatcheck.operation import Operation, StepCall
from coatcheck.saga.action import Action, Given, Options, Setting, action_of, called, undo_of
from coatcheck.saga.branches import gather_in_threads, gather_on_loop

T = TypeVar("T")

# 32 KiB of the progress are left free, beside the room for each undo: for what people decide, and
# why the saga was blocked or undone.
RESERVED_BYTES = 32 * 1024
# How often to look whether a step has ended that its function did not wait for.
POLL_S = 0.02

_NOTHING = encode_value(None) or b""


class Stopped(BaseException):
    """
    Ends the saga's function: the run is over, and the saga knows why.

    Not an `Exception`, so that the function does not take it for a failure of its own.
    """


class Saga:
    """One run of a saga; in async code, what these methods return is awaited."""

    def __init__(self, setting: Setting, operation: Operation) -> None:
        self._setting = setting
        self._operation = operation
        self._actions: list[Action] = []  # in the order in which the function asked for them
        self._running: set[str] = set()  # the names of those that are being called
        self._gathers = 0  # how many of `gather` run now, one within the other
        self._lock = threading.Lock()  # branches may begin and end at the same time
        self._has_ended = False  # the function has, so that nothing new begins
        self._problem: Exception | None = None  # why the run is over, if it is no failure
        self._cancelled = ""  # a step that the function has cancelled
        undoing = self._progress.step(UNDOING)
        # Why an earlier attempt has begun to undo; None: none has.
        self._cause = decode_step(undoing.value).failure if undoing and undoing.value else None
        self._is_past_pivot = self._progress.step(PIVOT) is not None
        self._is_pivot_asked = False

    @property
    def key(self) -> str:
        """The key of the saga."""
        return self._operation.key

    @property
    def operation(self) -> Operation:
        """The operation that the saga is."""
        return self._operation

    @property
    def _progress(self) -> Progress:
        """What this attempt and earlier ones have recorded."""
        return progress_of(self._operation.claim)

    # --- what its function does -----------------------------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        undo: Callable[..., Any] | None = None,
        probe: Callable[..., Any] | None = None,
        retry: int | Retry | None = None,
        timeout: Duration | None = None,
        at_most_once: bool = False,
        remembered_for: Duration | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for this saga, and remember its result, to 64 KiB.

        If the saga fails later, *undo* is called with the same arguments. Both get their own key
        if they have a parameter `key`; an undo can also have `result`, what the function returned,
        and `action_key`, the key of the function. *probe* is called with the arguments and the
        `key` of the function, if the outcome of a call is not known, and returns
        `Happened(value=…)`, `DidNotHappen()` or `Unknown()`.

        Raises `StepFailed` if the function raised an error, and so had no effect: after *retry*
        calls, 1 unless given. An error of the kinds `Uncertain`, `TimeoutError` and
        `ConnectionError`, and a call that takes longer than *timeout*, leave the outcome unknown:
        the function is called again with the same key within the time it is *remembered_for*, or
        without limit if there is neither that nor a probe; otherwise the probe decides, or a
        person. With *at_most_once* it is never called again without such a decision.
        """
        action = action_of(
            *(self._setting, self.key, name, Given(function, args, kwargs), undo),
            probe=probe,
            options=Options(retry, timeout, at_most_once, remembered_for),
        )
        return cast("T", self._setting.run(self._step(action)))

    def pivot(self) -> Awaitable[None]:
        """
        Mark the point of no return: from here on the saga only goes forward.

        Steps after it are retried until they succeed, and nothing is undone any more.
        """
        self._is_past_pivot = True
        return _DONE

    def gather(self, *branches: Any) -> Any:  # noqa: ANN401 - their results, or an awaitable
        """
        Run *branches* at the same time, and return their results in order.

        In async code they are awaitables, such as `saga.step(…)`; in sync code they are functions
        without arguments, each of which runs in a thread. All of them end before the first failure
        is raised.
        """
        if self._setting.is_async:
            return self._gather_on_loop(branches)
        for branch in branches:
            if not callable(branch):
                raise Misconfigured(
                    "the branches of saga.gather in a sync saga are functions: write "
                    "saga.gather(lambda: saga.step(…), …)"
                )
        with self._branching():
            return gather_in_threads(branches)

    async def _gather_on_loop(self, branches: tuple[Any, ...]) -> list[Any]:
        with self._branching():
            return await gather_on_loop(branches)

    @contextmanager
    def _branching(self) -> Iterator[None]:
        with self._lock:
            self._gathers += 1
        try:
            yield
        finally:
            with self._lock:
                self._gathers -= 1

    # --- a step ---------------------------------------------------------------------------------

    def _step(self, action: Action) -> Flow[Any]:
        if self._problem is not None or self._has_ended:
            raise Stopped from self._problem
        if any(action.name == other.name for other in self._actions):
            raise Misconfigured(
                f"the step {action.name!r} is taken twice: each needs a name of its own, in a loop "
                "for example f'ship-{number}'"
            )
        known = self._progress.step(action.name)
        if known is None:
            if self._cause is not None:
                raise Stopped  # the saga is being undone: nothing new begins
            self._check_room(action)
        action.was_begun = known is not None and known.value is None
        yield from self._record_pivot()
        self._actions.append(action)
        action.ended = yield from self._taken(action)
        if action.ended.failure is not None:
            failure = action.ended.failure
            raise StepFailed(failure.step, failure.error, failure.text) from action.error
        try:
            return action.result()
        except Blocked as problem:
            self._stop(problem)

    def _check_room(self, action: Action) -> None:
        """Raise `Misconfigured` if the record has no room for one more step and its undo."""
        if self._room(action) < action.entry_bytes:
            raise Misconfigured(
                f"no further step of this saga can be stored: all of them have "
                f"{PROGRESS_BYTES_MAX // 1024} KiB, of which a part is left free for undos"
            )

    def _record_pivot(self) -> Flow[None]:
        """Record that the pivot is passed, before the first step after it."""
        if self._is_past_pivot and not self._is_pivot_asked:
            self._is_pivot_asked = True
            value = encode_ended(Ended(self._setting.now_ms(), _NOTHING))
            yield from self._recorded(StepCall(PIVOT, _constant(value), is_parallel=True))

    def _taken(self, action: Action) -> Flow[Ended]:
        """How the step has ended: in an earlier attempt, or now."""
        call = StepCall(
            action.name,
            functools.partial(self._acted, action),
            action.at_most_once,
            None if action.probe is None else functools.partial(self._probed, action),
            action.remembered_ms,
            self._gathers > 0,
        )
        self._running.add(action.name)
        try:
            return decode_ended((yield from self._recorded(call)))
        except (Exception, Stopped):
            raise
        except BaseException:
            self._cancelled = self._cancelled or action.name
            raise
        finally:
            action.result_bytes = 0
            self._running.discard(action.name)

    def _recorded(self, call: StepCall) -> Flow[Any]:
        """The result of a recorded step; whatever keeps it from being recorded ends the run."""
        try:
            return (yield from self._record(call))
        except Misconfigured:  # a mistake in the saga's function: it fails
            raise
        except Exception as error:  # noqa: BLE001 - the saga is blocked, lost, or its store is down
            self._stop(error)

    def _record(self, call: StepCall) -> Flow[Any]:
        return (yield from Call(self._operation.record_step, (call,)))

    def _stop(self, problem: Exception) -> NoReturn:
        """End the run: this attempt cannot go on, and it is no failure of the saga."""
        self._problem = self._problem or problem
        raise Stopped from problem

    # --- its function is called -----------------------------------------------------------------

    def _acted(self, action: Action) -> Any:  # noqa: ANN401 - bytes, or an awaitable of them
        return self._setting.run(self._act(action))

    def _act(self, action: Action) -> Flow[bytes]:
        begun = self._progress.step(action.name)
        until_ms = ALWAYS_MS if begun is None else begun.again_until_ms
        plan = ActionPlan(
            action.name,
            self._retry_of(action),
            retries_errors=action.retry is not None,
            must_succeed=action.is_undo or self._is_past_pivot,
            has_probe=action.probe is not None,
            again_until_ms=until_ms,
            # After that time, its probe has said that it did not happen.
            was_begun=action.was_begun and self._setting.now_ms() < until_ms,
            unknown_errors=self._setting.unknown_errors,
        )
        ended = yield from performed(act(plan), functools.partial(self._perform, action))
        return encode_ended(ended)

    def _retry_of(self, action: Action) -> Retry:
        return action.retry or self._setting.retry

    def _perform(self, action: Action, effect: Effect[Any]) -> Flow[Any]:
        if isinstance(effect, Act):
            return (yield from self._returned(action))
        if isinstance(effect, Confirm):
            return (yield from Call(self._setting.confirm, (self._operation,)))
        if isinstance(effect, Ask):
            answer = yield from self._answered(action)
            return outcome_of_reconcile(answer, as_value=True)
        if isinstance(effect, Now):
            return self._setting.now_ms()
        assert isinstance(effect, Sleep)
        return (yield from effect)

    def _returned(self, action: Action) -> Flow[bytes]:
        """What the function of *action* returns, as a step stores it."""
        try:
            result = yield from Call(called, (self._setting, action, action.call))
        except Exception as error:
            action.error = error
            raise
        if action.is_undo:
            return _NOTHING
        return self._stored(action, result)

    def _probed(self, action: Action) -> Any:  # noqa: ANN401 - an answer, or an awaitable of it
        return self._setting.run(self._answered(action))

    def _answered(self, action: Action) -> Flow[object]:
        """What the probe of *action* answers, with its value as a step stores it."""
        answer = yield from self._asked(action)
        if not isinstance(answer, Happened):
            return answer
        try:
            stored = self._stored(action, answer.value)
        except NotStored:  # it is no such value: JSON is stored as it is
            stored = self._stored(action, answer.value, is_plain=True)
        return Happened(value=encode_ended(Ended(self._setting.now_ms(), stored)))

    def _asked(self, action: Action) -> Flow[object]:
        """What the probe of *action* returns; a probe that raises is called again."""
        assert action.probe is not None
        retry, tries = self._retry_of(action), 0
        while True:
            tries += 1
            try:
                return (yield from Call(called, (self._setting, action, action.probe)))
            except Exception:
                if tries >= retry.tries:
                    raise
            yield from Sleep(retry.pause_s(tries))

    def _stored(self, action: Action, result: object, *, is_plain: bool = False) -> bytes:
        """*result* as a step stores it; its room is taken at once, before a branch beside it."""
        encode = None if is_plain or action.codec is None else action.codec.encode
        with self._lock:
            # Stored bytes are written with 4 characters for 3 of them.
            bytes_max = min(STEP_BYTES_MAX - 16, self._room(action) * 3 // 4)
            stored = encoded_result(result, encode, bytes_max)
            action.result_bytes = len(stored) * 4 // 3
        return stored

    def _room(self, action: Action) -> int:
        """How many bytes of the record are free for *action*."""
        used = len(self._operation.claim.progress or b"")
        others = [other for other in self._actions if other is not action]
        results = sum(other.result_bytes for other in others)
        undos = action.undo_bytes + sum(other.undo_bytes for other in others)
        return PROGRESS_BYTES_MAX - RESERVED_BYTES - used - results - undos

    # --- how it ends ----------------------------------------------------------------------------

    def end(self, raised: BaseException | None) -> Flow[None]:
        """
        The function has returned, or *raised*: let nothing new begin, and wait for its steps.

        A function that runs steps in tasks or threads of its own may end before they do.
        """
        self._has_ended = True
        if raised is not None and _is_interruption(raised):
            raise raised
        while self._running:
            yield from Sleep(POLL_S)

    def failure_after(self, raised: BaseException | None) -> Failure | None:
        """
        Why the saga is to be undone, after its function has *raised*; None: it is done.

        Raises what keeps it from being either: it is blocked, lost, or its store is unavailable.
        """
        if self._problem is not None:
            raise self._problem
        if self._cancelled:
            raise Blocked(
                self._cancelled,
                "its function cancelled it, so its outcome is not known: limit its time with "
                "timeout=, and run branches with saga.gather",
            )
        if self._cause is not None or raised is None:
            return self._cause
        if self._is_past_pivot:
            failure = failure_of("", raised)
            why = f"after its pivot it raised {failure.error}: {failure.text}".rstrip(": ")
            raise Blocked("", why) from raised
        if isinstance(raised, StepFailed):
            return Failure(raised.step, raised.error, raised.text)
        return failure_of("", raised)

    def undo(self, failure: Failure) -> Flow[bytes]:
        """Run the undos in reverse order; the answer of the saga, which names its *failure*."""
        self._check_steps()
        mark = encode_ended(Ended(self._setting.now_ms(), failure=failure))
        yield from self._record(StepCall(UNDOING, _constant(mark), is_parallel=True))
        for action in reversed(self._actions):
            if action.undo is not None and self._may_have_happened(action):
                undo = undo_of(self._setting, self.key, action)
                acted = functools.partial(self._acted, undo)
                yield from self._record(StepCall(undo.name, acted, is_parallel=True))
        return encode_ended(Ended(self._setting.now_ms(), failure=failure))

    def _check_steps(self) -> None:
        """Block the saga if its function did not name a step whose undo may have to run."""
        asked = {action.name for action in self._actions}
        recorded = (step.name for step in self._progress.steps)
        missing = [name for name in recorded if ":" not in name and name not in asked]
        if missing:
            raise Blocked("", str(StepsChanged(None, missing[0])))

    def _may_have_happened(self, action: Action) -> bool:
        if action.ended is not None and action.ended.failure is not None:
            return action.ended.failure.may_have_happened
        return self._progress.step(action.name) is not None


if TYPE_CHECKING:

    class AsyncSaga(Saga):
        """A saga as async code sees it; when the program runs, it is another name of `Saga`."""

        @overload  # type: ignore[override]  # awaited
        async def step(
            self, name: str, function: Callable[..., Awaitable[T]], /, *args: Any, **options: Any
        ) -> T: ...
        @overload
        async def step(
            self, name: str, function: Callable[..., T], /, *args: Any, **options: Any
        ) -> T: ...
        async def step(self, name: str, function: Any, /, *args: Any, **options: Any) -> Any:
            """See `Saga.step`."""
            ...

        async def gather(self, *branches: Any) -> list[Any]:
            """See `Saga.gather`."""
            ...
else:
    AsyncSaga = Saga


class _Done:
    """May be awaited, and need not be."""

    def __await__(self) -> Generator[None, None, None]:
        return iter(())  # type: ignore[return-value]  # it ends at once


_DONE = _Done()


def _constant(value: bytes) -> functools.partial[bytes]:
    return functools.partial(bytes, value)


def _is_interruption(raised: BaseException) -> bool:
    """*raised* comes from outside: the saga was cancelled, or its process ends."""
    if isinstance(raised, BaseExceptionGroup):  # of `asyncio.TaskGroup`
        _, others = raised.split((Exception, Stopped))
        return others is not None
    return not isinstance(raised, (Exception, Stopped))
