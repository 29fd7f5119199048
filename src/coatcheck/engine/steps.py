"""Steps: what a handler writes into its claim while it runs.

Runs the flows of `core/steps.py` on the claim that the heartbeat renews at the same time; the
second of two writers writes on top of the first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from coatcheck.core.flow import Call, Effect, Flow, Sleep
from coatcheck.core.progress import NOTE_BYTES_MAX, Note, Progress, Report
from coatcheck.core.record import Record, Swap, is_same_write
from coatcheck.core.response import decode_value
from coatcheck.core.signatures import codec_of_call
from coatcheck.core.steps import Probe, Run, StepPlan, again_until_ms, remember, take
from coatcheck.core.values import Codec
from coatcheck.engine.outcomes import logger, outcome_of_reconcile, stored_result
from coatcheck.engine.write_retry import WriteRetry
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt, StoreUnavailable
from coatcheck.operation import Operation, StepCall

# How long a write is retried while the store is down: what a step did is worth remembering.
RETRY_S = 2.0
# 100: a name is shown to operators, and written again with every step.
NAME_CHARS_MAX = 100


class UnrecordedSteps:
    """
    The steps of an operation that has no record: they run, and nothing is written.

    Args:
        run: as for a `StepWriter`.
    """

    def __init__(self, run: Callable[[Flow[Any]], Any]) -> None:
        self._run = run

    def step(self, _operation: Operation, call: StepCall) -> Any:  # noqa: ANN401 - what the step returned
        """Run a step."""
        return self._run(_performed(Call(call.call)))

    def note(self, _operation: Operation, _what: object) -> Any:  # noqa: ANN401 - None, awaited on a loop
        """Write nothing."""
        return self._run(_performed(Sleep(0)))

    def report_progress(self, _operation: Operation, _fraction: float | None, _words: str) -> Any:  # noqa: ANN401 - as above
        """Write nothing."""
        return self._run(_performed(Sleep(0)))


def _performed(effect: Effect[Any]) -> Flow[Any]:
    return (yield from effect)


class StepWriter:
    """
    Writes into the claims of one engine's operations.

    Args:
        now_ms: the store's clock.
        run: runs a flow here and now: it returns the result, or an awaitable on an event loop.
    """

    def __init__(self, now_ms: Callable[[], int], run: Callable[[Flow[Any]], Any]) -> None:
        self._now_ms = now_ms
        self._run = run

    def step(self, operation: Operation, call: StepCall) -> Any:  # noqa: ANN401 - what the step returned
        """Run a step once."""
        return self._run(self._step(operation, call))

    def note(self, operation: Operation, what: object) -> Any:  # noqa: ANN401 - None, awaited on a loop
        """Write down what is about to be done."""
        note = self._note_of(operation, what)
        return self._run(self._remember(operation, lambda progress: progress.with_note(note)))

    def report_progress(
        self,
        operation: Operation,
        fraction: float | None,
        words: str,
    ) -> Any:  # noqa: ANN401 - as above
        """Write down how far the work is."""
        report = Report(fraction, words)
        return self._run(
            self._remember(operation, lambda progress: progress._replace(report=report))
        )

    def confirm(self, operation: Operation) -> Any:  # noqa: ANN401 - as above
        """Renew the lease; raises `ClaimLost` if another attempt has taken over."""
        return self._run(self._remember(operation, lambda progress: progress, has_limit=False))

    # --- as flows -------------------------------------------------------------------------------

    def _step(self, operation: Operation, call: StepCall) -> Flow[Any]:
        codec = codec_of_call(call.call)
        plan = self._begin(operation, call)
        try:
            flow = take(operation.claim, plan)
            _, value = yield from performed(
                flow, lambda effect: self._perform(operation, call, codec, effect)
            )
        except Exception as error:
            self._note_failure(operation, error)
            raise
        finally:
            operation.steps_running.discard(call.name)
        operation.steps_done.add(call.name)
        stored = decode_value(value)
        return stored if codec is None else codec.decode(stored)

    def _remember(
        self,
        operation: Operation,
        change: Callable[[Progress], Progress],
        *,
        has_limit: bool = True,
    ) -> Flow[None]:
        try:
            flow = remember(operation.claim, change, has_limit=has_limit)
            yield from performed(flow, lambda effect: self._written(operation, effect))
        except ClaimLost as error:
            self._note_failure(operation, error)
            raise

    def _perform(
        self,
        operation: Operation,
        call: StepCall,
        codec: Codec[Any] | None,
        effect: Effect[Any],
    ) -> Flow[Any]:
        if isinstance(effect, Probe):
            assert call.probe is not None
            answer = yield from Call(call.probe)
            return outcome_of_reconcile(answer, as_value=True)
        if isinstance(effect, Run):
            return _encoded(call.name, (yield from Call(call.call)), codec)
        return (yield from self._written(operation, effect))

    def _written(self, operation: Operation, effect: Effect[Any]) -> Flow[Record | None]:
        """
        Write into the claim, and renew its lease in the same write.

        Many steps in a row would otherwise make each renewal of the heartbeat lose against them,
        until the lease has expired.
        """
        assert isinstance(effect, Swap)
        record = effect.record
        assert record is not None
        until_ms = max(record.lease_until_ms, self._now_ms() + operation.lease_ms)
        renewed = record._replace(lease_until_ms=until_ms)
        return (yield from written(operation, Swap(effect.id, effect.expected, renewed)))

    def _begin(self, operation: Operation, call: StepCall) -> StepPlan:
        name, running = call.name, operation.steps_running
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise Misconfigured(
                f"a step has a name of 1 to {NAME_CHARS_MAX} characters, not {name!r}"
            )
        if name in operation.steps_done or name in running:
            raise Misconfigured(
                f"the step {name!r} is taken twice: each needs a name of its own, in a loop "
                "for example f'ship-{number}'"
            )
        running.add(name)
        operation.steps_asked.add(name)
        now_ms = self._now_ms()
        return StepPlan(
            name,
            at_most_once=call.at_most_once,
            has_probe=call.probe is not None,
            now_ms=now_ms,
            asked=frozenset(operation.steps_asked),
            beside=lambda: tuple(sorted(running - {name})),
            again_until_ms=again_until_ms(now_ms, call.remembered_ms),
            is_parallel=call.is_parallel,
        )

    def _note_failure(self, operation: Operation, error: Exception) -> None:
        if isinstance(error, StepInDoubt):
            operation.step_problem = error
            if error.__cause__ is not None:  # raised by its probe
                logger.error("coatcheck: %s", error, exc_info=error.__cause__)
        elif isinstance(error, ClaimLost):
            operation.lose()

    def _note_of(self, operation: Operation, what: object) -> Note:
        try:
            size = len(json.dumps(what, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise Misconfigured(f"a note is text or another JSON value: {error}") from error
        if size > NOTE_BYTES_MAX:
            raise Misconfigured(f"a note has at most {NOTE_BYTES_MAX} bytes; this has {size}")
        return Note(self._now_ms(), operation.attempt, what)


def performed(flow: Flow[Any], perform: Callable[[Effect[Any]], Flow[Any]]) -> Flow[Any]:
    """Run *flow*, each effect of which *perform* turns into a flow of its own."""
    try:
        effect = next(flow)
        while True:
            try:
                result = yield from perform(effect)
            except Exception as error:  # noqa: BLE001 - the flow decides what it means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        return done.value


def written(operation: Operation, effect: Effect[Any]) -> Flow[Record | None]:
    """Write into the claim of *operation*; retried while the store does not answer."""
    assert isinstance(effect, Swap)
    retry = WriteRetry(RETRY_S, time.monotonic())
    while True:
        try:
            conflict = yield from effect
        except StoreUnavailable as failure:
            pause_s = retry.pause_s(effect, failure)
            if pause_s is None:
                raise
            yield from Sleep(pause_s)
        else:
            break
    record = effect.record
    assert record is not None
    if conflict is not None and not is_same_write(conflict, record):
        return conflict
    # Written, also if the step fails that this announces: the next one must find what it left.
    operation.advance_to(record)
    return None


def _encoded(name: str, result: object, codec: Codec[Any] | None) -> bytes | Misconfigured:
    """The bytes that a step's *result* is stored as, or why it cannot be stored."""
    try:
        return stored_result(result, codec)
    except Misconfigured as error:
        return Misconfigured(f"the step {name!r}: {error}")
