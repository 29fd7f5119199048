"""The client and the bad network: sends each order until it is confirmed.

The client retries after a lost response, a broken connection, 409 and 503. With keys, every attempt
at one order has the same key. Without keys, the only other choice would be to lose the order.

The orders, and what the network does to each, come from the seed alone, so the key is the only
difference between the two halves of the demo.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import Any, NamedTuple

# A third: far worse than a real network, so that a few hundred orders show every case.
LOSS_SHARE = 1 / 3
# At most 6 lost responses per order, so that every order is confirmed in the end.
LOSSES_MAX = 6
# One order in eight is sent twice at the same time, as a double click or a proxy does.
REPEAT_SHARE = 1 / 8
CENTS_MIN, CENTS_MAX = 5_00, 200_00

# 8 orders in flight: enough that a kill always hits some of them.
CONCURRENCY = 8
# 50 ms between attempts: a restarted shop is found soon, and not asked all the time.
PAUSE_S = 0.05
# At most 250 ms, whatever Retry-After says, because a person is watching.
RETRY_AFTER_S_MAX = 0.25
# Give up after 20 s without any confirmation, ten times the longest pause of a normal run.
STALL_S_MAX = 20.0
# 1 s for the second of two simultaneous requests to connect; after that the first one is sent.
CONNECT_TWIN_S_MAX = 1.0
# 10 s: a response takes 20 ms, and one that waits for another attempt two seconds.
RESPONSE_S_MAX = 10.0

# What a network does to a request: refused, reset, timed out, or cut off.
NETWORK_ERRORS = (OSError, HTTPException)


@dataclass(frozen=True, slots=True)
class Order:
    """One order, and what the network does to it."""

    name: str
    cents: int
    key: str  # made once, before the first attempt; sent only in the second half
    losses: tuple[bool, ...]  # whether the first, second … response is lost
    is_repeated: bool  # its first request is sent twice at the same time


def draw_orders(count: int, seed: int) -> list[Order]:
    """Return *count* orders, always the same ones for one seed."""
    chance = random.Random(seed)  # noqa: S311 - repeatable on purpose
    return [
        Order(
            name=f"order-{number:04}",
            cents=chance.randint(CENTS_MIN, CENTS_MAX),
            key=str(uuid.UUID(int=chance.getrandbits(128), version=4)),
            losses=tuple(chance.random() < LOSS_SHARE for _ in range(LOSSES_MAX)),
            is_repeated=chance.random() < REPEAT_SHARE,
        )
        for number in range(1, count + 1)
    ]


@dataclass(slots=True)
class Receipt:
    """What happened to one order, as the client and the network saw it."""

    order: Order
    requests: int = 0
    responses: int = 0  # all that the shop sent, including lost ones
    responses_lost: int = 0
    numbers: set[str] = field(default_factory=set)  # every order number in any response
    is_confirmed: bool = False
    mutex: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """Sends all orders, a few at the same time."""

    def __init__(
        self, orders: Sequence[Order], shop_port: Callable[[], int], *, sends_keys: bool
    ) -> None:
        self.receipts = [Receipt(order) for order in orders]
        self.finished = 0
        self._shop_port = shop_port  # called for each request: a restart changes the port
        self._sends_keys = sends_keys
        self._pool = ThreadPoolExecutor(CONCURRENCY, "client")
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._give_up_at_s = 0.0
        self._is_stopped = False
        self._deliveries: list[Future[None]] = []

    def start(self) -> None:
        """Begin to send the orders."""
        self._give_up_at_s = time.monotonic() + STALL_S_MAX
        self._deliveries = [self._pool.submit(self._deliver, r) for r in self.receipts]

    def wait(self, timeout_s: float) -> bool:
        """Wait up to *timeout_s*; return whether all orders are finished."""
        if not self._ended.wait(timeout_s):
            return False
        for delivery in self._deliveries:
            delivery.result()  # raises, so that a bug does not look like a lost order
        return True

    def stop(self) -> None:
        """Give up the orders that are not finished."""
        self._is_stopped = True
        self._pool.shutdown(cancel_futures=True)

    def unanswered(self) -> set[str]:
        """Return the orders that were sent and have no response yet."""
        return {r.order.name for r in self.receipts if r.requests and not r.responses}

    def _deliver(self, receipt: Receipt) -> None:
        try:
            if receipt.order.is_repeated:
                self._send_twice(receipt)
            while not receipt.is_confirmed and not self._gives_up():
                self._send(receipt)
            if receipt.is_confirmed:
                self._give_up_at_s = time.monotonic() + STALL_S_MAX
        finally:
            with self._mutex:
                self.finished += 1
                if self.finished == len(self.receipts):
                    self._ended.set()

    def _gives_up(self) -> bool:
        return self._is_stopped or time.monotonic() > self._give_up_at_s

    def _send_twice(self, receipt: Receipt) -> None:
        """Send the same request twice at the same time, on two connections."""
        barrier = threading.Barrier(2, timeout=CONNECT_TWIN_S_MAX)
        twin = threading.Thread(target=self._send, args=(receipt, barrier))
        twin.start()
        self._send(receipt, barrier)
        twin.join()

    def _send(self, receipt: Receipt, barrier: threading.Barrier | None = None) -> None:
        order = receipt.order
        document = {"order": order.name, "cents": order.cents}
        try:
            with closing(connect(self._shop_port())) as connection:
                with receipt.mutex:
                    receipt.requests += 1
                if barrier is not None:
                    with suppress(threading.BrokenBarrierError):  # the other has no connection
                        barrier.wait()
                key = order.key if self._sends_keys else None
                response = post(connection, "/orders", document, key)
        except NETWORK_ERRORS:
            time.sleep(PAUSE_S)
            return
        with receipt.mutex:
            is_received = _note(receipt, response)
        if is_received and response.status != 201:
            time.sleep(min(response.retry_after_s, RETRY_AFTER_S_MAX) or PAUSE_S)


def _note(receipt: Receipt, response: Response) -> bool:
    """Write down *response*; return False if the network loses it."""
    is_lost = receipt.responses < LOSSES_MAX and receipt.order.losses[receipt.responses]
    receipt.responses += 1
    receipt.responses_lost += is_lost
    if response.status == 201:
        receipt.numbers.add(str(response.document.get("number")))
        receipt.is_confirmed = receipt.is_confirmed or not is_lost
    return not is_lost


class Response(NamedTuple):
    """The response to one request."""

    status: int
    document: dict[str, Any]
    retry_after_s: float


def connect(port: int) -> HTTPConnection:
    """Connect to a server on this machine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=RESPONSE_S_MAX)
    connection.connect()
    return connection


def post(
    connection: HTTPConnection, path: str, document: dict[str, Any], key: str | None
) -> Response:
    """Send *document*, with *key* if there is one, and wait for the complete response."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = f'"{key}"'
    connection.request("POST", path, json.dumps(document), headers)
    response = connection.getresponse()
    body = response.read()
    if response.getheader("Content-Length", "") != str(len(body)):
        # Cut off within its headers, which `http.client` does not notice: a 201, but not complete.
        raise IncompleteRead(body)
    is_json = "json" in response.getheader("Content-Type", "")
    retry_after_s = float(response.getheader("Retry-After", "0"))
    return Response(response.status, json.loads(body) if is_json else {}, retry_after_s)
