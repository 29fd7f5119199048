"""The crash injector: a fault at a named point of a guarded operation.

    injector = crash.Injector("after effect", crash.kill)
    engine = Engine(injector.store(open_store(url)))
    charge = injector.effect(charge)  # in the handler
    app = injector.asgi(app)  # or .wsgi(app), outermost

It wraps the store, the effect and the application, so the code under test is the code that runs in
production. Each injector strikes once.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from coatcheck.core.progress import NOTHING, Step, readable_progress_of
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.errors import Misconfigured
from coatcheck.stores import Finding, Page, Query, Store
from coatcheck.stores.contract import SWEEP_BATCH

P = ParamSpec("P")
T = TypeVar("T")

# Where a fault can strike. `POINTS` has all of them.
Point: TypeAlias = Literal[
    "before claim",
    "after claim",
    "in step",
    "after effect",
    "after step",
    "after complete",
    "before response",
]
POINTS: tuple[Point, ...] = get_args(Point)

Message: TypeAlias = MutableMapping[str, Any]
AsgiApp: TypeAlias = Callable[..., Awaitable[None]]
WsgiApp: TypeAlias = Callable[..., Iterable[bytes]]


class Injected(Exception):
    """Raised by the fault `fail`: stands for any exception of a handler."""


def kill() -> None:
    """Kill this process with SIGKILL, as the kernel does when memory runs out."""
    _strike(signal.SIGKILL)


def freeze() -> None:
    """Stop this process until it receives SIGCONT."""
    _strike(signal.SIGSTOP)


def _strike(number: signal.Signals) -> None:
    # Sent to this thread: a signal to the process may be delivered to another thread first, and
    # this one would go on.
    signal.pthread_kill(threading.get_ident(), number)


def fail() -> None:
    """Raise `Injected`."""
    raise Injected("a fault that coatcheck.verify.crash has injected")


class Injector:
    """
    Calls *fault* once, when an operation reaches *point*.

    Steps are seen in what is written to the store: "in step" is after the write that a step begins
    (only a step with `at_most_once` or a probe has one), "after step" after the write of its
    result. With a key ring, steps are not seen, because they are encrypted.

    Args:
        point: one of `POINTS`.
        fault: `kill`, `freeze`, `fail`, or any function.
        number: strike when the point is reached for this time: 3 for the third step.
    """

    def __init__(self, point: Point, fault: Callable[[], object], number: int = 1) -> None:
        if point not in POINTS:
            raise Misconfigured(f"there is no point {point!r}; the points are: {', '.join(POINTS)}")
        self.point = point
        self._fault = fault
        self._left = number
        self._mutex = threading.Lock()
        self.has_struck = False

    def reach(self, point: Point) -> None:
        """Call the fault, if *point* is the injector's point and it is its turn."""
        if point != self.point:
            return
        with self._mutex:
            self._left -= 1
            if self._left != 0:
                return
            self.has_struck = True
        self._fault()

    def store(self, store: Store) -> Store:
        """Wrap *store*, with the points around claims, steps and completions."""
        return _WatchedStore(store, self)

    def effect(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap *function*, sync or async, with the point after it."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def effect_async(*args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 - its own
                result = await function(*args, **kwargs)
                self.reach("after effect")
                return result

            return effect_async  # type: ignore[return-value]  # a coroutine function, too

        @functools.wraps(function)
        def effect(*args: P.args, **kwargs: P.kwargs) -> T:
            result = function(*args, **kwargs)
            self.reach("after effect")
            return result

        return effect

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """Wrap *app* outside its middleware, with the point before the response is sent."""

        async def watched_app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
            async def watched_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.reach("before response")
                await send(message)

            await app(scope, receive, watched_send)

        return watched_app

    def wsgi(self, app: WsgiApp) -> WsgiApp:
        """Wrap *app* outside its middleware, with the point before the response is sent."""

        def watched_app(environ: Any, start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's own
            def watched_start(*args: Any) -> Any:  # noqa: ANN401 - as above
                self.reach("before response")
                return start_response(*args)

            return app(environ, watched_start)

        return watched_app


class _WatchedStore:
    """A store that reaches the points before and after its writes."""

    def __init__(self, store: Store, injector: Injector) -> None:
        self._store = store
        self._reach = injector.reach
        self._steps: dict[bytes, frozenset[Step]] = {}  # of each running operation

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write, and reach the points before and after it."""
        if any(_is_claim(swap) for swap in swaps):
            self._reach("before claim")
        conflicts = self._store.swap(swaps)
        for swap, conflict in zip(swaps, conflicts, strict=True):
            if conflict is None:
                self._reach_after(swap)
        return conflicts

    def _reach_after(self, swap: Swap) -> None:
        record = swap.record
        if record is None:
            return
        if _is_claim(swap):
            self._reach("after claim")
        if record.state == RUNNING:
            self._reach_steps(record)
            return
        self._steps.pop(record.id, None)
        if record.state == COMPLETED:
            self._reach("after complete")

    def _reach_steps(self, record: Record) -> None:
        """Reach the point of a step, if *record* has one that was not there before."""
        steps = _steps_of(record)
        before = self._steps.get(record.id, steps)
        self._steps[record.id] = steps
        values = [step.value for step in steps - before]
        if values:
            self._reach("in step" if None in values else "after step")

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Read records."""
        return self._store.get(ids)

    def find(self, query: Query) -> Page:
        """Find records for operators."""
        return self._store.find(query)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows."""
        return self._store.sweep(now_ms, limit)

    def check(self) -> Sequence[Finding]:
        """Return what the doctor finds."""
        return self._store.check()

    def now_ms(self) -> int:
        """Return the time of the store's clock."""
        return self._store.now_ms()

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _is_claim(swap: Swap) -> bool:
    """*swap* is the claim of a new key; renewals and steps replace an existing record."""
    record = swap.record
    return record is not None and record.state == RUNNING and swap.expected == 0


def _steps_of(record: Record) -> frozenset[Step]:
    """The steps in *record*; empty if they are encrypted."""
    return frozenset((readable_progress_of(record) or NOTHING).steps)
