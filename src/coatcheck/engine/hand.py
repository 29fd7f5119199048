"""The hand of an operation: what its handler writes down while it runs (L7).

Performs the flows of `core/steps.py` on the claim that the heart renews at the same time: whoever
is second writes on top of the first. Made when a handler first asks for it, for one attempt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from coatcheck.core.flow import Effect, run, run_async
from coatcheck.core.progress import NOTE_BYTES_MAX, Note, Progress, Report
from coatcheck.core.record import Record, Swap, is_same_write
from coatcheck.core.replay import decode_value, encode_value
from coatcheck.core.steps import Plan, Probe, Unmet, remember, take
from coatcheck.engine.desk import Desk, ending_of_reconcile, logger
from coatcheck.engine.held import Held
from coatcheck.engine.patience import Patience
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt, StoreUnavailable
from coatcheck.operation import StepAsked

# How long a write is tried while the store is away: what a step did is worth remembering.
PATIENCE_S = 2.0
# 100: a name is for people, and is written anew with every step.
NAME_CHARS_MAX = 100


class Hand:
    """Writes into one claim, in the thread of whoever asks."""

    def __init__(self, desk: Desk, held: Held, write: Callable[[Swap], Record | None]) -> None:
        self._desk = desk
        self._held = held
        self._written = held.claim
        self._write = write
        self._taken: set[str] = set()
        self._under_way: set[str] = set()
        self.asked: set[str] = set()  # those, and the ones that have failed
        self.doubt: Unmet | None = None  # a step's outcome is not known, and may not be tried again

    @property
    def claim(self) -> Record:
        """The claim as it stands, as far as is known here."""
        # The heart may hear late of a renewal, when something was written on top of that already.
        held, written = self._held.claim, self._written
        return written if written.version > held.version else held

    @property
    def is_lost(self) -> bool:
        """Another attempt has taken over."""
        return self._held.is_lost

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Have *callback* called when another attempt has taken over."""
        self._held.on_lost(callback)

    def step(self, asked: StepAsked) -> Any:  # noqa: ANN401 - what the step returned
        """Take a step once."""

        def perform(effect: Effect[Any]) -> Any:  # noqa: ANN401 - whatever the effect results in
            if isinstance(effect, Swap):
                return self._swap(effect)
            if isinstance(effect, Probe):
                assert asked.probe is not None
                return ending_of_reconcile(asked.probe(), as_value=True)
            return _encoded(asked.name, asked.call())

        plan = self._begin(asked)
        try:
            _, value = run(take(self.claim, plan), perform)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._under_way.discard(asked.name)
        return self._end(plan, value)

    def note(self, what: object) -> Any:  # noqa: ANN401 - None, awaited where that has to be
        """Write down what is about to be done."""
        note = self._note_of(what)
        return self._remember(lambda progress: progress.with_note(note))

    def report(self, fraction: float | None, words: str) -> Any:  # noqa: ANN401 - as above
        """Write down how far it is."""
        report = Report(fraction, words)
        return self._remember(lambda progress: progress._replace(report=report))

    def _remember(self, change: Callable[[Progress], Progress]) -> Any:  # noqa: ANN401 - as above
        try:
            run(remember(self.claim, change), self._swap)
        except ClaimLost as error:
            self._fail(error)
            raise

    def _swap(self, effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        patience = Patience(PATIENCE_S)
        while True:
            try:
                return self._noticed(effect, self._write(effect))
            except StoreUnavailable as failure:
                pause_s = patience.pause_s(effect, failure)
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    # --- what both kinds have in common -------------------------------------------------------

    def _begin(self, asked: StepAsked) -> Plan:
        name = asked.name
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise Misconfigured(f"a step has a name of 1 to {NAME_CHARS_MAX} characters: {name!r}")
        if name in self._taken or name in self._under_way:
            raise Misconfigured(
                f"the step {name!r} is taken twice: each needs a name of its own, in a loop "
                "for example f'ship-{number}'"
            )
        self._under_way.add(name)
        self.asked.add(name)
        return Plan(
            name,
            at_most_once=asked.at_most_once,
            has_probe=asked.probe is not None,
            now_ms=self._desk.now_ms(),
            asked=frozenset(self.asked),
            beside=lambda: tuple(sorted(self._under_way - {name})),
        )

    def _end(self, plan: Plan, value: bytes) -> Any:  # noqa: ANN401 - what the step returned
        self._taken.add(plan.name)
        return decode_value(value)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, StepInDoubt):
            self.doubt = error
            if error.__cause__ is not None:  # and that is its probe's own
                logger.error("%s", error, exc_info=error.__cause__)
        elif isinstance(error, ClaimLost):
            self._held.lose()

    def _noticed(self, swap: Swap, lost: Record | None) -> Record | None:
        """
        *lost*, unless it is what was to be written: then it was, and nobody heard of it.

        What was written stands from now on, also where the step fails that it announces: whoever
        takes that step again must meet what the first time has left.
        """
        claim = swap.record
        assert claim is not None
        if lost is not None and not is_same_write(lost, claim):
            return lost
        if claim.version > self._written.version:
            self._written = claim
        if claim.version > self._held.claim.version:
            self._held.claim = claim
        return None

    def _note_of(self, what: object) -> Note:
        try:
            size = len(json.dumps(what, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise Misconfigured(f"a note is text or another JSON value: {error}") from error
        if size > NOTE_BYTES_MAX:
            raise Misconfigured(f"a note has at most {NOTE_BYTES_MAX} bytes; this has {size}")
        return Note(self._desk.now_ms(), self.claim.attempt, what)


class AsyncHand(Hand):
    """Writes into one claim from an event loop; from any other thread, like `Hand`."""

    def __init__(
        self,
        desk: Desk,
        held: Held,
        write: Callable[[Swap], Record | None],
        write_async: Callable[[Swap], Awaitable[Record | None]],
    ) -> None:
        super().__init__(desk, held, write)
        self._write_async = write_async

    def step(self, asked: StepAsked) -> Any:  # noqa: ANN401 - what the step returned, or to be awaited
        """Take a step once; on an event loop, to be awaited."""
        return self._step_async(asked) if _is_on_a_loop() else super().step(asked)

    async def _step_async(self, asked: StepAsked) -> Any:  # noqa: ANN401 - what the step returned
        async def perform(effect: Effect[Any]) -> Any:  # noqa: ANN401 - whatever the effect results in
            if isinstance(effect, Swap):
                return await self._swap_async(effect)
            if isinstance(effect, Probe):
                assert asked.probe is not None
                return ending_of_reconcile(await _awaited(asked.probe()), as_value=True)
            return _encoded(asked.name, await _awaited(asked.call()))

        plan = self._begin(asked)
        try:
            _, value = await run_async(take(self.claim, plan), perform)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._under_way.discard(asked.name)
        return self._end(plan, value)

    def _remember(self, change: Callable[[Progress], Progress]) -> Any:  # noqa: ANN401 - None, awaited
        return self._remember_async(change) if _is_on_a_loop() else super()._remember(change)

    async def _remember_async(self, change: Callable[[Progress], Progress]) -> None:
        try:
            await run_async(remember(self.claim, change), self._swap_async)
        except ClaimLost as error:
            self._fail(error)
            raise

    async def _swap_async(self, effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        patience = Patience(PATIENCE_S)
        while True:
            try:
                return self._noticed(effect, await self._write_async(effect))
            except StoreUnavailable as failure:
                pause_s = patience.pause_s(effect, failure)
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)


def _encoded(name: str, result: object) -> bytes | Misconfigured:
    """The bytes that say a step's *result*, or why there are none."""
    value = encode_value(result)
    if value is not None:
        return value
    return Misconfigured(
        f"the step {name!r} returned a {type(result).__name__}, which is neither JSON nor "
        "bytes, so that it cannot be remembered; return what the next attempt needs of it"
    )


async def _awaited(result: Any) -> Any:  # noqa: ANN401 - what a user's function returned
    return await result if inspect.isawaitable(result) else result


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
