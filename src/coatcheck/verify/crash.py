"""The crash-window injector: a fault at a named point of a guarded operation.

    injector = crash.Injector("after effect", crash.kill)
    engine = Engine(injector.store(open_store(url)))
    charge = injector.effect(charge)  # in the handler
    app = injector.asgi(app)  # or .wsgi(app), outermost

It stands around the store, the effect and the application, so that what is tested is what runs in
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

# Where a fault can strike; `POINTS` is all of them.
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
    """The fault `fail`: an ordinary exception, in the place of whatever a handler may raise."""


def kill() -> None:
    """End this process at once, as the kernel does when memory runs out."""
    _strike(signal.SIGKILL)


def freeze() -> None:
    """Stop this process until somebody sends it SIGCONT."""
    _strike(signal.SIGSTOP)


def _strike(number: signal.Signals) -> None:
    # At this thread: a signal for the process may meet another one first, and we would go on.
    signal.pthread_kill(threading.get_ident(), number)


def fail() -> None:
    """Raise."""
    raise Injected("injected")


class Injector:
    """
    Strikes once, with *fault*, where an operation reaches *point*.

    A step is seen in the store: "in step" is when it is written down that it begins (one that may
    happen at most once, or has a probe), "after step" when its result is. So with a key ring they
    are not seen: what is sealed cannot be read.

    Args:
        point: one of `POINTS`.
        fault: what happens there: `kill`, `freeze`, `fail`, or any function.
        number: which of the times that the point is reached: 3 for the third step.
    """

    def __init__(self, point: Point, fault: Callable[[], object], number: int = 1) -> None:
        if point not in POINTS:
            raise Misconfigured(f"there is no point {point!r}; there are: {', '.join(POINTS)}")
        self.point = point
        self._fault = fault
        self._left = number
        self._mutex = threading.Lock()
        self.has_struck = False

    def reach(self, point: Point) -> None:
        """An operation is at *point*."""
        if point != self.point:
            return
        with self._mutex:
            self._left -= 1
            if self._left != 0:
                return
            self.has_struck = True
        self._fault()

    def store(self, store: Store) -> Store:
        """*store*, with the points around claims, steps and completions."""
        return _Around(store, self)

    def effect(self, function: Callable[P, T]) -> Callable[P, T]:
        """*function*, sync or async, with the point after it."""
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
        """*app*, middleware and all, with the point before its response leaves."""

        async def around(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.reach("before response")
                await send(message)

            await app(scope, receive, sent)

        return around

    def wsgi(self, app: WsgiApp) -> WsgiApp:
        """*app*, middleware and all, with the point before its response leaves."""

        def around(environ: Any, start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's own
            def started(*said: Any) -> Any:  # noqa: ANN401 - as above
                self.reach("before response")
                return start_response(*said)

            return app(environ, started)

        return around


class _Around:
    """A store, with points before and after what it writes."""

    def __init__(self, store: Store, injector: Injector) -> None:
        self._store = store
        self._reach = injector.reach
        self._steps: dict[bytes, frozenset[Step]] = {}  # of each operation that runs

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write, and reach the points on the way."""
        if any(_is_claim(swap) for swap in swaps):
            self._reach("before claim")
        lost = self._store.swap(swaps)
        for swap, standing in zip(swaps, lost, strict=True):
            if standing is None:
                self._reach_after(swap)
        return lost

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
        """Reach the points of a step, if *record* tells of one that was not there before."""
        steps = _steps_of(record)
        before = self._steps.get(record.id, steps)
        self._steps[record.id] = steps
        values = [step.value for step in steps - before]
        if values:
            self._reach("in step" if None in values else "after step")

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand."""
        return self._store.get(ids)

    def find(self, query: Query) -> Page:
        """Records for operators."""
        return self._store.find(query)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows."""
        return self._store.sweep(now_ms, limit)

    def check(self) -> Sequence[Finding]:
        """What the doctor sees."""
        return self._store.check()

    def now_ms(self) -> int:
        """The store's clock."""
        return self._store.now_ms()

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _is_claim(swap: Swap) -> bool:
    """A new claim: the first writes of an attempt have neither a step nor a longer lease yet."""
    record = swap.record
    return record is not None and record.state == RUNNING and swap.expected == 0


def _steps_of(record: Record) -> frozenset[Step]:
    """None, where they are sealed."""
    return frozenset((readable_progress_of(record) or NOTHING).steps)
