"""How many of our own Python functions a request passes: exact, and without a clock.

Frames, attributes and dispatch are half of what a guarded request costs. A limit on calls keeps the
path short, on every machine alike.
"""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Self

import coatcheck
from coatcheck import AsyncEngine, Engine
from coatcheck.server.asgi import IdempotencyMiddleware

SOURCE = str(Path(coatcheck.__file__).parent)

# The limits to reach are 45, 22 and 40; each is lowered when the path gets shorter.
NEW_KEY_MAX = 100
REPLAY_MAX = 50
RUN_MAX = 73


class Calls:
    """Counts the calls of functions in our package, also each time a generator goes on."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
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
        await guarded({**SCOPE, "headers": headers}, receive, send)
    return calls


def test_a_new_key_and_a_replay_over_asgi_pass_few_functions():
    async def main():
        async with AsyncEngine("memory://") as engine:
            guarded = IdempotencyMiddleware(app, engine=engine)
            for key in (b"warm-1", b"warm-2"):
                await post(guarded, key)
            return await post(guarded, b"new"), await post(guarded, b"new")

    new, replay = asyncio.run(main())
    assert new.total <= NEW_KEY_MAX, new
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
