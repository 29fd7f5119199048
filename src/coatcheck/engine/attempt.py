"""One attempt as a context manager, for code that is not one function.

    with engine.attempt("order-42", scope="orders", fingerprint=order) as attempt:
        if not attempt.is_replay:
            attempt.complete(place(order))
        return attempt.result

A block that raises, or ends without `complete`, has failed: its claim ends as the policy says.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, cast

from coatcheck.core.keep import Outcome
from coatcheck.core.lifecycle import Answer, ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.values import Codec, check_codec
from coatcheck.engine.functions import outcome_of_call, value_of
from coatcheck.errors import Misconfigured
from coatcheck.operation import AsyncOperation, Operation, enter, leave


class Seam(Protocol):
    """The engine, as far as an attempt needs it; everything is awaited in async code."""

    def ensure_started(self) -> Any:  # noqa: ANN401 - None, or awaited
        """Read the store's clock, if that was not done yet."""
        ...

    def begin(self, request: ClaimRequest, policy: Policy, /) -> Any:  # noqa: ANN401 - see `Attempts`
        """Claim *request*."""
        ...

    def complete(self, operation: Operation, outcome: Outcome, /) -> Any:  # noqa: ANN401 - as above
        """End *operation* with *outcome*."""
        ...

    def fail(self, operation: Operation, error: BaseException, /) -> Any:  # noqa: ANN401 - as above
        """End *operation*, whose handler raised."""
        ...


class _Attempt:
    """What both kinds share."""

    def __init__(
        self,
        engine: Seam,
        make_request: functools.partial[ClaimRequest],
        policy: Policy,
        codec: Codec[Any] | None,
    ) -> None:
        if policy.mode == "transaction":
            raise Misconfigured("attempt() has no transaction: use engine.transaction(...)")
        if codec is not None:
            check_codec(codec)
        self._engine = engine
        self._make_request = make_request
        self._policy = policy
        self._codec = codec
        self._operation: Operation | None = None
        self._has_result = False
        self._result: Any = None
        self._token: Any = None
        self.is_replay = False

    @property
    def operation(self) -> Operation:
        """The operation that runs; there is none for a replay."""
        if self._operation is None:
            raise Misconfigured("nothing runs in this attempt: it is a replay, or not entered")
        return self._operation

    @property
    def result(self) -> Any:  # noqa: ANN401 - the application's own
        """What `complete` was given, now or by the first attempt."""
        if not self._has_result:
            raise Misconfigured("this attempt has no result yet: call attempt.complete(result)")
        return self._result

    def _started(self, started: Operation | Replay | Refuse) -> None:
        if isinstance(started, Operation):
            self._operation = started
            self._token = enter(started)
        else:
            self._set_result(value_of(started, self._codec), is_replay=True)

    def _outcome_of(self, result: object) -> Outcome:
        if self._has_result:
            raise Misconfigured("this attempt is complete already")
        return outcome_of_call(self.operation, result, self._codec)

    def _completed(self, answer: Answer, outcome: Outcome, result: object) -> None:
        value = value_of(answer, self._codec, outcome, result)
        self._set_result(value, is_replay=isinstance(answer, Replay))

    def _set_result(self, result: object, *, is_replay: bool) -> None:
        self._result, self._has_result, self.is_replay = result, True, is_replay

    def _failure(self, error: BaseException | None) -> BaseException | None:
        """What the operation failed with, if it is to be ended now."""
        if self._token is not None:
            with suppress(ValueError):  # a generator was closed in another context than it began
                leave(self._token)
            self._token = None
        if self._operation is None or self._has_result:
            return None
        return error or Misconfigured(
            "the block of engine.attempt(...) ended without attempt.complete(result)"
        )


class Attempt(_Attempt):
    """A guarded block; see `Engine.attempt`."""

    def __enter__(self) -> Self:
        self._engine.ensure_started()
        self._started(self._engine.begin(self._make_request(), self._policy))
        return self

    def complete(self, result: object) -> None:
        """Store *result*, which every retry gets: JSON, bytes, or what the codec takes."""
        outcome = self._outcome_of(result)
        self._completed(self._engine.complete(self.operation, outcome), outcome, result)

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        failure = self._failure(error)
        if failure is not None:
            self._engine.fail(self.operation, failure)
            if error is None:
                raise failure


class AsyncAttempt(_Attempt):
    """A guarded block in async code; see `AsyncEngine.attempt`."""

    @property
    def operation(self) -> AsyncOperation:
        """The operation that runs; there is none for a replay."""
        return cast("AsyncOperation", super().operation)

    async def __aenter__(self) -> Self:
        await self._engine.ensure_started()
        self._started(await self._engine.begin(self._make_request(), self._policy))
        return self

    async def complete(self, result: object) -> None:
        """Store *result*, which every retry gets: JSON, bytes, or what the codec takes."""
        outcome = self._outcome_of(result)
        self._completed(await self._engine.complete(self.operation, outcome), outcome, result)

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        failure = self._failure(error)
        if failure is not None:
            await self._engine.fail(self.operation, failure)
            if error is None:
                raise failure
