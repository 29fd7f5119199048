"""The world: virtual time, what happens next, and tasks that go on when their time has come.

Nothing here reads a clock or draws a number of its own: a world is made from a seed, everything in
it draws from that, in the order of events, and so the same seed gives the same world.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator
from random import Random
from typing import Any, NoReturn, Protocol, TypeAlias

# A hundred times what a schedule needs on the average: more is a world that never comes to rest.
STEPS_MAX = 50_000

# Everything that happened: when, to whom, what, and its details.
Trace: TypeAlias = list[tuple[Any, ...]]


class Violation(AssertionError):
    """A promise was broken, by the schedule of *seed* and *kind*."""

    def __init__(
        self, promise: str, seed: int = 0, kind: str = "", trace: Trace | None = None
    ) -> None:
        super().__init__(promise, seed, kind)
        self.promise = promise
        self.seed = seed
        self.kind = kind
        self.trace = trace

    def __str__(self) -> str:
        again = f'make simulate ARGS="--seed {self.seed} --kind {self.kind}"'
        return f"{self.promise}\nagain, with all that happened: {again}"


class Resume(Protocol):
    """Have a task go on, with a result or an error; only the first time counts."""

    def __call__(self, value: object = None, error: Exception | None = None) -> None: ...


# What a task yields: how many milliseconds it sleeps, or what makes it go on some time.
Pause: TypeAlias = float | Callable[[Resume], object]
Body: TypeAlias = Generator[Pause, Any, Any]


class World:
    """Everything that is going to happen, in its order."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.random = Random(seed)
        self.now_ms = 0.0
        self.steps = 0
        # How often each thing happened; and all of it with its time, for a reader.
        self.counts: Counter[str] = Counter()
        self.trace: Trace | None = [] if is_traced else None
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0
        self.running: Any = None  # the host whose task runs right now

    def later(self, delay_ms: float, action: Callable[..., object], *args: object) -> None:
        """Do *action* when *delay_ms* have passed."""
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._scheduled, action, args))

    def run(self) -> None:
        """Let everything happen that is going to."""
        queue = self._queue
        while queue:
            self.now_ms, _, action, args = heapq.heappop(queue)
            self.steps += 1
            if self.steps > STEPS_MAX:
                self.broken("the world comes to rest when no client asks any more")
            action(*args)

    def happened(self, who: object, what: str, *details: object) -> None:
        """Count *what* happened, and add it to the trace."""
        self.counts[what] += 1
        if self.trace is not None:
            self.trace.append((self.now_ms, who, what, *details))

    def require(self, holds: object, promise: str) -> None:
        """*promise* is kept, or the schedule ends here."""
        if not holds:
            self.broken(promise)

    def broken(self, promise: str) -> NoReturn:
        """The schedule ends here."""
        if self.trace is not None:
            self.trace.append((self.now_ms, "!", promise))
        raise Violation(promise)

    def between(self, low: float, high: float) -> float:
        """Some number from *low* to *high*."""
        return low + (high - low) * self.random.random()

    def chance(self, share: float) -> bool:
        """True in this *share* of cases."""
        return self.random.random() < share


class Host:
    """Where tasks run; it may freeze, and it may die."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.frozen_until_ms = 0.0

    def __str__(self) -> str:
        return self.name

    def start(self, body: Body) -> None:
        """Run *body* here, from now on."""
        Task(self, body).resume(0)


class Task:
    """One thread of execution on a host."""

    __slots__ = ("body", "host", "turn")

    def __init__(self, host: Host, body: Body) -> None:
        self.host = host
        self.body = body
        self.turn = 0

    def resume(self, turn: int, value: object = None, error: Exception | None = None) -> None:
        """Go on after the pause that *turn* numbers, soon: never within the step of another task."""
        self.host.world.later(0.0, self._step, turn, value, error)

    def _step(self, turn: int, value: object, error: Exception | None) -> None:
        host = self.host
        world = host.world
        if turn != self.turn or not host.is_alive:
            return
        if world.now_ms < host.frozen_until_ms:
            # All wake up at about the same time, and in any order.
            thaw_ms = host.frozen_until_ms - world.now_ms + world.random.random()
            world.later(thaw_ms, self._step, turn, value, error)
            return
        self.turn = turn = turn + 1
        world.running = host
        try:
            pause = self.body.send(value) if error is None else self.body.throw(error)
        except StopIteration:
            return
        if callable(pause):
            pause(_Resume(self, turn))
        else:
            world.later(pause, self._step, turn, None, None)


class _Resume:
    """`Resume` for one pause of one task."""

    __slots__ = ("task", "turn")

    def __init__(self, task: Task, turn: int) -> None:
        self.task = task
        self.turn = turn

    def __call__(self, value: object = None, error: Exception | None = None) -> None:
        self.task.resume(self.turn, value, error)
