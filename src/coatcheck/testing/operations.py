"""Operations for tests that call a handler directly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from coatcheck.core.identity import label_of, operation_id
from coatcheck.core.messages.event import OutgoingEvent
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Note, encoded
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.engine.runner import AsyncRunner, Runner, run_here
from coatcheck.engine.steps import StepWriter
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation
from coatcheck.testing.engines import START_MS, AttemptKilled, AttemptKilledInLoop
from coatcheck.verify.crash import POINTS, AsgiApp, Injector, Point

_POLICY = Policy()


def kill_attempt() -> None:
    """
    Raise `AttemptKilled`: a fault for a crash injector in the process of the test.

    For the points "after effect" and "before response". The claim stays until its lease expires,
    as after `kill -9`. For all other points use `crash.kill` in a process of its own.
    """
    raise AttemptKilled("the test has ended this attempt")


# Where an exception can end an attempt as `kill -9` does. At the others it would be an error of the
# store, which the engine handles.
_IN_PROCESS: tuple[Point, ...] = ("after effect", "before response")


class _TestInjector(Injector):
    """An injector whose applications run in the event loop of a test client."""

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """Wrap *app*; see `AttemptKilledInLoop`."""
        watched = super().asgi(app)

        async def app_in_loop(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
            try:
                await watched(scope, receive, send)
            except AttemptKilled as killed:
                raise AttemptKilledInLoop(*killed.args) from killed

        return app_in_loop


def injector_of(point: Point, fault: Callable[[], object], number: int) -> Injector:
    """A crash injector, with a fault that can happen at *point*."""
    if fault is kill_attempt and point in POINTS and point not in _IN_PROCESS:
        raise Misconfigured(
            f"an attempt cannot be killed {point!r} in the process of the test: use crash.kill in "
            "a process of its own, or give another fault, such as crash.fail"
        )
    return _TestInjector(point, fault, number)


def new_operation(
    *,
    key: str = "test",
    label: str = "test",
    attempt: int = 1,
    notes: Iterable[object] = (),
    connection: object = None,
) -> Operation:
    """
    An operation that nothing stores, for a handler that a test calls directly.

    Its steps run and are remembered, its notes and reports can be read, and `derive` returns the
    same key each time. In async code `step`, `note` and `progress` are awaited, as usual.

    Args:
        key: as the client would have sent it.
        label: such as "POST /orders".
        attempt: which attempt this is.
        notes: what earlier attempts have noted.
        connection: `operation.connection`, for a handler in transaction mode. It has no steps
            then.
    """
    noted = tuple(Note(START_MS, max(1, attempt - 1), what) for what in notes)
    claim = Record(
        id=operation_id(caller="", route=label, key=key),
        version=START_MS + attempt,
        state=RUNNING,
        attempt=attempt,
        fingerprint=bytes(16),
        created_ms=START_MS,
        lease_until_ms=START_MS + _POLICY.lease_ms,
        window_until_ms=START_MS + _POLICY.window_ms,
        expires_ms=START_MS + _POLICY.retention_ms,
        nonce=attempt,
        label=label_of(label),
        scope="",
        key=key,
        progress=encoded(NOTHING._replace(notes=noted)) if noted else None,
        response=None,
    )
    return _operation(claim, connection)


def next_attempt_of(operation: Operation) -> Operation:
    """The operation as its next attempt sees it: with the steps and notes of the earlier ones."""
    claim = operation.claim
    attempt = claim.attempt + 1
    following = claim._replace(version=claim.version + 1, attempt=attempt, nonce=attempt)
    transaction: Any = operation._transaction  # noqa: SLF001 - set by `new_operation`
    return _operation(following, None if transaction is None else transaction.connection)


def _operation(claim: Record, connection: object) -> Operation:
    if connection is not None:
        return Operation(claim, _POLICY, transaction=_Open(connection))
    runner = Runner(lambda _swap: None, lambda _id: None)
    steps = StepWriter(lambda: START_MS, run_here(runner, AsyncRunner(_accept, _find_nothing)))
    return Operation(claim, _POLICY, steps=steps)


class _Open(NamedTuple):
    """The transaction of an operation."""

    connection: object

    def emit(self, event: OutgoingEvent) -> None:
        """Nothing is stored, so nothing is published."""
        del event

    def store_offset(self, offset: PartitionOffset) -> None:
        """Nothing is stored."""
        del offset


async def _accept(swaps: Sequence[Swap]) -> Sequence[Record | None]:
    return [None] * len(swaps)


async def _find_nothing(ids: Sequence[bytes]) -> Sequence[Record | None]:
    return [None] * len(ids)
