"""A worker that kills itself at a point of a delivery, and the law that its message is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from tests.consumer.law import DEADLINE_S, Ledger, Source, Workers

POINTS = ("before the claim", "in the handler", "before the acknowledgement")
VARIABLE = "COATCHECK_WORKER_DIES"


def reach(point: str) -> None:
    """Kill this process, if this is its point."""
    if os.environ.get(VARIABLE) == point:
        os.kill(os.getpid(), signal.SIGKILL)


def dying(handler: Any) -> Any:
    """Have *handler* reach the points before and after it handles a message."""
    handle = handler.handle

    async def handle_and_die(message: Any, **more: Any) -> Any:
        reach("before the claim")
        action = await handle(message, **more)
        reach("before the acknowledgement")
        return action

    handler.handle = handle_and_die
    return handler


def no_crash_loses_or_repeats_an_effect(source: Source, ledger: Ledger) -> None:
    """A worker dies at each point; the next one finishes what is left."""
    for number, point in enumerate(POINTS):
        source.publish([(f"event-{number}", b"body")])
        words = ["-m", "tests.consumer.worker", *source[:3], ledger.url]
        died = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, VARIABLE: point},
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL, point
    source.publish([("event-last", b"body")])
    expected = {*(f"event-{number}" for number in range(len(POINTS))), "event-last"}
    deadline = time.monotonic() + DEADLINE_S
    with Workers(source, ledger, 1):
        while set(effects := ledger.effects()) != expected:
            assert time.monotonic() < deadline, effects
            time.sleep(0.02)
    assert ledger.effects() == Counter(expected)
