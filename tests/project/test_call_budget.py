"""How many of our own Python functions a request passes: exact, and without a clock.

Frames, attributes and dispatch are half of what a guarded request costs. A limit on calls keeps the
path short, on every machine alike.
"""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Self

import coatcheck
from coatcheck import AsyncEngine, Engine
from coatcheck.server.asgi import IdempotencyMiddleware

SOURCE = str(Path(coatcheck.__file__).parent)

NEW_KEY_MAX = 51
# The first replay also computes the fingerprint and decodes the response; both are remembered.
FIRST_REPLAY_MAX = 30
REPLAY_MAX = 20
RUN_MAX = 47


class Calls:
    """Counts the calls of functions in our package; a generator that goes on is no new call."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self._frames: list[FrameType] = []  # kept, so that no two calls have the same one

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame, event, _argument):
        is_ours = event == "call" and frame.f_code.co_filename.startswith(SOURCE)
        if is_ours and not any(known is frame for known in self._frames):
            self._frames.append(frame)
            place = Path(frame.f_code.co_filename).stem
            self.names[f"{place}.{frame.f_code.co_qualname}"] += 1

    @property
    def total(self) -> int:
        return self.names.total()

    def __str__(self) -> str:
        lines = (f"{count:3} {name}" for name, count in self.names.items())
        return "\n".join((f"{self.total} calls", *lines))


async def app(scope, receive, send):
    await receive()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"order":1}'})


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/orders",
    "raw_path": b"/orders",
    "query_string": b"",
    "scheme": "http",
}


# Named as in uvicorn, which cancels no request, so that the exchange needs no task of its own.
NAMES: dict[str, Any] = {"__name__": "uvicorn.protocols.http.h11_impl"}
exec(
    """
class RequestResponseCycle:
    async def run_asgi(app, asgi_scope, receive, send):
        await app(asgi_scope, receive, send)
""",
    NAMES,
)
RUN_ASGI = NAMES["RequestResponseCycle"].run_asgi


async def post(guarded, key: bytes) -> Calls:
    headers = [
        (b"host", b"shop.example"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer token"),
        (b"idempotency-key", key),
    ]

    async def receive():
        return {"type": "http.request", "body": b'{"item":"coat","count":1}'}

    async def send(message):
        assert message

    with Calls() as calls:
        await RUN_ASGI(guarded, {**SCOPE, "headers": headers}, receive, send)
    return calls


def test_a_new_key_and_a_replay_over_asgi_pass_few_functions():
    async def main():
        async with AsyncEngine("memory://") as engine:
            guarded = IdempotencyMiddleware(app, engine=engine)
            for key in (b"warm-1", b"warm-2"):
                await post(guarded, key)
            return [await post(guarded, b"new") for _ in range(3)]

    new, first_replay, replay = asyncio.run(main())
    assert new.total <= NEW_KEY_MAX, new
    assert first_replay.total <= FIRST_REPLAY_MAX, first_replay
    assert replay.total <= REPLAY_MAX, replay


def place(order: int) -> int:
    return order


def test_a_guarded_function_passes_few_functions():
    with Engine("memory://") as engine:
        for key in ("warm-1", "warm-2"):
            engine.run(key, place, 1)
        with Calls() as calls:
            engine.run("new", place, 1)
    assert calls.total <= RUN_MAX, calls
