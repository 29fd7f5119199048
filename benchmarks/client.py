"""What the client adds to a call that succeeds at once, beside the plain library.

All send the same small POST to the same server on loopback, one call after the other, in turn.
Processor time is that of the client, which is steadier than wall time on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import httpx2

import coatcheck.client.httpx2
from benchmarks.measuring import interleave
from benchmarks.report import TIMES, Figures, Table, Target

# Many short slots: a disturbance then affects all contenders alike.
CALLS = 50
ROUNDS, ROUNDS_QUICK = 60, 20
RATIO_MAX = 1.10  # of the plain library, in wall time
TARGETED = "client of coatcheck"
OF = f"{TIMES} httpx2"
CLOCKS = {"wall time": time.perf_counter, "processor time": time.process_time}

ANSWER = (
    b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 13\r\n"
    b'Location: /charges/1\r\n\r\n{"charge": 1}'
)


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    with server() as url, contextlib.ExitStack() as clients:
        plain = clients.enter_context(httpx2.Client(base_url=url))
        ours = clients.enter_context(coatcheck.client.httpx2.Client(base_url=url))
        transport = coatcheck.client.httpx2.Transport()
        over = clients.enter_context(httpx2.Client(base_url=url, transport=transport))

        def by_hand(path: str, json: object) -> httpx2.Response:
            headers = {"Idempotency-Key": str(uuid.uuid4())}
            return plain.post(path, json=json, headers=headers)

        contenders = {
            "httpx2": plain.post,
            "a key by hand": by_hand,
            TARGETED: ours.post,
            "transport of coatcheck": over.post,
        }
        rows = [row for clock in CLOCKS for row in _rows(clock, contenders, quick=quick)]
    return Table(
        name="client",
        question="one call of a client that succeeds at once",
        rows=rows,
        head=("", "httpx2, µs", "with, µs", OF),
        notes=["one call at a time, to a server that only sends the same response"],
    )


def _rows(
    clock: str, contenders: dict[str, Callable[..., httpx2.Response]], *, quick: bool
) -> Iterator[Figures]:
    slots = {name: calls(post, CLOCKS[clock]) for name, post in contenders.items()}
    taken = interleave(slots, ROUNDS_QUICK if quick else ROUNDS)
    plain = taken.pop("httpx2")
    for name, samples in taken.items():
        ratio = samples.over(plain)
        target = Target(measured=ratio, bound="≤", limit=RATIO_MAX, unit=OF)
        yield Figures(
            what=f"{name}, {clock}",
            columns={"httpx2, µs": plain, "with, µs": samples, OF: ratio},
            targets=[target] if name == TARGETED and clock == "wall time" else (),
        )


def calls(post: Callable[..., httpx2.Response], clock: Callable[[], float]) -> Callable[[], float]:
    """A slot: the microseconds of one call."""

    def slot() -> float:
        began_s = clock()
        for _ in range(CALLS):
            assert post("/charges", json={"amount": 5}).status_code == 201
        return (clock() - began_s) / CALLS * 1e6

    return slot


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server in a process of its own, which answers the same to every request."""
    command = [sys.executable, "-m", "benchmarks.client"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def serve() -> None:
    class Answers(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self._transport = transport
            self._data = b""

        def data_received(self, data: bytes) -> None:
            self._data += data
            if self._data.endswith(b"}"):  # the end of the only body that is sent
                self._data = b""
                self._transport.write(ANSWER)

    listening = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
