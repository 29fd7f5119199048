"""One defined saga: its calls, and its runs."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from coatcheck.core.callables import is_async_function
from coatcheck.core.flow import Flow
from coatcheck.core.identity import operation_id
from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy
from coatcheck.core.progress import progress_of
from coatcheck.core.record import Record
from coatcheck.core.response import decode_value
from coatcheck.core.saga.actions import (
    LABEL_PREFIX,
    Blocked,
    Ended,
    NotStored,
    decode_ended,
    encode_ended,
    encoded_result,
)
from coatcheck.core.saga.outline import OutlineStep, changed_words, read_outline, signature_of
from coatcheck.core.saga.view import (
    picture_of_definition,
    saga_run,
)
from coatcheck.core.signatures import check_result, codec_of_call
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.engine.functions import RegisteredFunction, key_of_call
from coatcheck.engine.settings import policy_of
from coatcheck.errors import (
    Misconfigured,
    OutcomeUnknown,
    SagaBlocked,
    SagaUndone,
    StepInDoubt,
    StepsChanged,
)
from coatcheck.operation import Operation, current_operation
from coatcheck.saga.action import Setting
from coatcheck.saga.inputs import Inputs
from coatcheck.saga.run import Saga

if TYPE_CHECKING:
    from coatcheck.saga.sagas import Sagas

P = ParamSpec("P")
T = TypeVar("T")

# A saga has 30 days to end, and a late call is refused for one more: it must not run again. A
# caller waits for longer than a lease, so that it takes over from a process that has died.
POLICY = Policy(window="30d", margin="1d", wait="30s", on_expired="refuse")


class SagaFunction(Generic[P, T]):
    """A saga that `Sagas.saga` has defined; a call of it runs, resumes or replays it."""

    def __init__(
        self,
        sagas: Sagas,
        name: str,
        function: Callable[..., Any],
        key: Callable[..., object],
        *,
        policy: Policy | None,
        version: str | int | None,
    ) -> None:
        check_result(functools.partial(function, None), None)
        functools.update_wrapper(self, function)
        self.name = name
        self.is_async = is_async_function(function)
        self.outline = _outline_of(function)
        steps = signature_of(self.outline) if version is None else [f"version {version}"]
        self._steps = steps
        self._function = function
        self._key = key
        self._inputs = Inputs(function)
        self._label = LABEL_PREFIX + name
        self._sagas = sagas
        self._engine: Any = sagas.async_engine if self.is_async else sagas.engine
        attempts = self._engine.attempts
        self._setting = Setting(
            name=name,
            run=self._engine.run_here,
            now_ms=attempts.now_ms,
            confirm=attempts.steps.confirm,
            calls=attempts.reconcile_calls,
            is_async=self.is_async,
            retry=sagas.retry,
            unknown_errors=sagas.unknown_errors,
        )
        run: Any = self._run_async if self.is_async else self._run
        self._registered: RegisteredFunction[Any] = self._engine.register(
            self._label,
            run,
            policy=self._engine.policy if policy is None else policy_of_saga(policy),
            also_failed=True,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Run the saga once for its key, and return its result; it is awaited if it is async.

        Raises `SagaUndone` if it failed and was undone, and `SagaBlocked` if a person must decide.
        """
        key = key_of_call(self._key(*args, **kwargs))
        given = self._inputs.encode(args, kwargs)
        call: Any = self._call_async if self.is_async else self._call
        result: T = call(key, given)
        return result

    def picture(self) -> str:
        """Return a picture of the definition, in Mermaid."""
        return picture_of_definition(self.name, self.outline)

    def _call(self, key: str, given: object) -> Any:  # noqa: ANN401 - what the function returns
        try:
            answer = self._registered.run(key, given, self._note())
        except Blocked as error:
            raise self._blocked(key, error.step, error.why) from error
        except OutcomeUnknown as error:
            record = self._engine.run_here(_read(self._engine, self._id(key)))
            raise self._blocked_by(record, error) from error
        return self._result_of(key, answer)

    async def _call_async(self, key: str, given: object) -> Any:  # noqa: ANN401 - as above
        try:
            answer = await self._registered.run(key, given, self._note())
        except Blocked as error:
            raise self._blocked(key, error.step, error.why) from error
        except OutcomeUnknown as error:
            record = await self._engine.run_here(_read(self._engine, self._id(key)))
            raise self._blocked_by(record, error) from error
        return self._result_of(key, answer)

    def _note(self) -> dict[str, Any]:
        """What is stored beside the input: the definition that the saga begins with."""
        return {"saga": self.name, "steps": self._steps}

    def _id(self, key: str) -> bytes:
        secret = self._engine.attempts.secret
        return operation_id(caller="", route=self._label, key=key, secret=secret)

    def _blocked(self, key: str, step: str, why: str) -> SagaBlocked:
        return SagaBlocked(self.name, reference_of(self._id(key)), step, why)

    def _blocked_by(self, record: Record, error: OutcomeUnknown) -> SagaBlocked:
        run = saga_run(record, self._engine.attempts.now_ms())
        why = run.blocked_because or str(error)
        return SagaBlocked(self.name, run.reference, run.blocked_at, why)

    def _result_of(self, key: str, answer: object) -> Any:  # noqa: ANN401 - as above
        ended = decode_ended(answer)
        if ended.failure is not None:
            step, error, text, _ = ended.failure
            raise SagaUndone(self.name, key, step, error, text)
        result = decode_value(ended.result)
        codec = codec_of_call(functools.partial(self._function))
        return result if codec is None else codec.decode(result)

    # --- one run --------------------------------------------------------------------------------

    def _run(self, given: Any) -> bytes:  # noqa: ANN401 - the stored input
        operation = _current()
        try:
            saga, args, kwargs = self._begun(operation, given)
            result: object = None
            raised: BaseException | None = None
            try:
                result = self._function(saga, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the saga decides what it means
                raised = error
            return cast("bytes", self._setting.run(self._answer(saga, result, raised)))
        except _BLOCKING as problem:
            with suppress(Exception):  # it is blocked in any case
                operation.note(_blocked_note(problem))
            raise _as_blocked(problem) from problem

    async def _run_async(self, given: Any) -> bytes:  # noqa: ANN401 - as above
        operation: Any = _current()
        try:
            saga, args, kwargs = self._begun(operation, given)
            result: object = None
            raised: BaseException | None = None
            try:
                result = await self._function(saga, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - as above
                raised = error
            return cast("bytes", await self._setting.run(self._answer(saga, result, raised)))
        except _BLOCKING as problem:
            with suppress(Exception):  # as above
                await operation.note(_blocked_note(problem))
            raise _as_blocked(problem) from problem

    def _begun(
        self,
        operation: Operation,
        given: Any,  # noqa: ANN401 - as above
    ) -> tuple[Saga, tuple[Any, ...], dict[str, Any]]:
        """The saga for this attempt, and the arguments of its function; raises `Blocked`."""
        notes = progress_of(operation.claim).notes
        began = notes[0].what.get("steps") if notes else None
        if began is not None and began != self._steps:
            raise Blocked("", changed_words(began, self._steps))
        args, kwargs = self._inputs.decode(given)
        return Saga(self._setting, operation), args, kwargs

    def _answer(self, saga: Saga, result: object, raised: BaseException | None) -> Flow[bytes]:
        """The answer of a saga whose function has ended; one that has failed is undone first."""
        yield from saga.end(raised)
        answer = b""
        if raised is None:
            try:
                answer = self._encoded(saga.operation, result)
            except NotStored as error:
                raised = error
        failure = saga.failure_after(raised)
        if failure is not None:
            try:
                answer = yield from saga.undo(failure)
            except Misconfigured as error:  # the record is full
                raise Blocked("", f"it cannot be undone: {error}") from error
        return self._checked(saga.operation, answer)

    def _encoded(self, operation: Operation, result: object) -> bytes:
        """The answer of a saga that is done."""
        codec = codec_of_call(functools.partial(self._function))
        encode = None if codec is None else codec.encode
        stored = encoded_result(result, encode, operation.policy.response_bytes_max - 16)
        return encode_ended(Ended(self._setting.now_ms(), stored))

    def _checked(self, operation: Operation, answer: bytes) -> bytes:
        """*answer*, unless an earlier attempt took a step that this one did not ask for."""
        if operation.has_notes:
            problem = operation.check_steps(may_differ=False)
            if problem is not None:
                raise problem
        return answer


# What leaves a saga to a person.
_BLOCKING = (Blocked, StepInDoubt, StepsChanged)


def _as_blocked(problem: Exception) -> Blocked:
    if isinstance(problem, Blocked):
        return problem
    step = problem.name if isinstance(problem, StepInDoubt) else ""
    return Blocked(step, str(problem))


def _blocked_note(problem: Exception) -> dict[str, str]:
    blocked = _as_blocked(problem)
    return {"blocked": blocked.step, "why": blocked.why[:1_000]}


def _current() -> Operation:
    operation = current_operation()
    assert operation is not None
    return operation


def _read(engine: Engine | AsyncEngine, id: bytes) -> Flow[Record]:
    return (yield from engine.attempts.read(id)).record


def _outline_of(function: Callable[..., Any]) -> tuple[OutlineStep, ...]:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):  # typed in, or without its source
        return ()
    return read_outline(source, is_method=inspect.ismethod(function))


def policy_of_saga(policy: Policy | None) -> Policy:
    """*policy*, or the usual one; raises `Misconfigured` if sagas cannot have it."""
    policy = POLICY if policy is None else policy_of(policy)
    if policy.mode != "record" or policy.recovery != "retry":
        raise Misconfigured(
            "the policy of a saga has mode='record' and recovery='retry': its steps decide what "
            "follows a crash"
        )
    if policy.on_outage == "execute":
        raise Misconfigured(
            "the policy of a saga has on_outage='refuse': without its store, no undo is registered"
        )
    return policy
