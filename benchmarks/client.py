"""What our client adds to a call that succeeds at once, beside the plain library.

    python -m benchmarks.client

All send the same small POST to the same server on loopback, one call after the other, in turn.
The figures are wall time, and processor time of the client, which is steadier on a busy machine.
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

# Many short slots: a disturbance then affects all contenders alike.
CALLS = 50
ROUNDS = 60
# Above this, the client is reported as too slow.
RATIO_MAX = 1.10

ANSWER = (
    b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 13\r\n"
    b'Location: /charges/1\r\n\r\n{"charge": 1}'
)


def main() -> int:
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
            "httpx2, key by hand": by_hand,
            "coatcheck client": ours.post,
            "coatcheck transport": over.post,
        }
        for clock in (time.process_time, time.perf_counter):
            slots = {name: calls(post, clock) for name, post in contenders.items()}
            taken = interleave(slots, ROUNDS)
            print(clock.__name__)
            for name, samples in taken.items():
                ratio = samples.over(taken["httpx2"]).median
                print(f"  {name:20} {samples.median:6.1f} µs a call   {ratio:.3f} × httpx2")
        is_met = taken["coatcheck client"].over(taken["httpx2"]).median <= RATIO_MAX
    print(f"target: {RATIO_MAX} × httpx2 in wall time:", "pass" if is_met else "MISS")
    return 0 if is_met else 1


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
    command = [sys.executable, "-m", "benchmarks.client", "--serve"]
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
    if sys.argv[1:] == ["--serve"]:
        asyncio.run(serve())
    sys.exit(main())
