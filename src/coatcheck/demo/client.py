"""The client and the bad network: sends each order until it is confirmed.

The client retries by the rules of `coatcheck.client`, over the HTTP of the standard library. With
keys, every attempt at one order has the same key. Without keys, `methods_without_key` allows what
the rules forbid: the only other choice would be to lose the order.

The orders, and what the network does to each, come from the seed alone, so the key is the only
difference between the two halves of the demo.
"""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import Any

from coatcheck.client.call import Action, Exchange
from coatcheck.client.settings import Clock, settings_of
from coatcheck.core.client.retry_policy import RetryBudget, RetryPolicy
from coatcheck.core.client.send import Answer, Lost, Send

# A third: far worse than a real network, so that a few hundred orders show every case.
LOSS_SHARE = 1 / 3
# At most 6 lost responses per order, so that every order is confirmed in the end.
LOSSES_MAX = 6
# One order in eight is sent twice at the same time, as a double click or a proxy does.
REPEAT_SHARE = 1 / 8
CENTS_MIN, CENTS_MAX = 5_00, 200_00

# 8 orders in flight: enough that a kill always hits some of them.
CONCURRENCY = 8
# Pauses of up to 100 ms: a restarted shop is found soon, and not asked all the time. At most
# 250 ms, whatever Retry-After says, because a person is watching. An order that is not confirmed
# after 20 s, ten times what the longest one of a normal run takes, is given up.
RETRY = RetryPolicy(
    attempts_max=1_000,
    deadline="20s",
    timeout="10s",
    backoff_base="100ms",
    backoff_max="100ms",
    retry_after_max="250ms",
    methods_without_key={"POST"},
)
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
        # A budget that does not end: a third of all responses is lost.
        budget = RetryBudget(1_000_000)
        clock = Clock(sleep=self._pause)
        self._settings = settings_of(retry=RETRY, preset="ietf", budget=budget, clock=clock)
        self._pool = ThreadPoolExecutor(CONCURRENCY, "client")
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._stopping = threading.Event()
        self._deliveries: list[Future[None]] = []

    def start(self) -> None:
        """Begin to send the orders."""
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
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)

    def unanswered(self) -> set[str]:
        """Return the orders that were sent and have no response yet."""
        return {r.order.name for r in self.receipts if r.requests and not r.responses}

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise _Stopped

    def _deliver(self, receipt: Receipt) -> None:
        barrier, twin = None, None
        if receipt.order.is_repeated:
            barrier = threading.Barrier(2, timeout=CONNECT_TWIN_S_MAX)
            twin = threading.Thread(target=self._send, args=(receipt, barrier))
            twin.start()
        action: Action[Response] = Action(
            self._settings,
            key=receipt.order.key if self._sends_keys else None,
            send_key=self._sends_keys,
        )
        exchange: Exchange[Response] = _Delivery(action, "POST", "/orders", None)

        def attempt(effect: Send) -> Answer | Lost:
            response = self._send(receipt, barrier if effect.attempt == 1 else None)
            if isinstance(response, Exception):
                return exchange.lost(response)
            header = response.headers.get
            return exchange.answered(response, response.status, header, response.body)

        try:
            with suppress(*NETWORK_ERRORS, _Stopped):  # the receipt says that it is not confirmed
                exchange.run(attempt)
        finally:
            if twin is not None:
                twin.join()
            with self._mutex:
                self.finished += 1
                if self.finished == len(self.receipts):
                    self._ended.set()

    def _send(
        self, receipt: Receipt, barrier: threading.Barrier | None = None
    ) -> Response | Exception:
        """
        Send the order once; return the response, or what the network did instead.

        With *barrier*, the same request is sent on another connection at the same time.
        """
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
        except NETWORK_ERRORS as error:
            return error
        with receipt.mutex:
            is_received = _note(receipt, response)
        return response if is_received else ConnectionResetError("the network lost the response")


class _Stopped(Exception):
    """The demo ends."""


class _Delivery(Exchange["Response"]):
    """All attempts at one order."""

    @staticmethod
    def origin_of(url: Any) -> str:  # noqa: ANN401 - as in the base class
        """There is one origin."""
        return str(url)


def _note(receipt: Receipt, response: Response) -> bool:
    """Write down *response*; return False if the network loses it."""
    is_lost = receipt.responses < LOSSES_MAX and receipt.order.losses[receipt.responses]
    receipt.responses += 1
    receipt.responses_lost += is_lost
    if response.status == 201:
        receipt.numbers.add(str(response.document.get("number")))
        receipt.is_confirmed = receipt.is_confirmed or not is_lost
    return not is_lost


@dataclass
class Response:
    """The response to one request."""

    status: int
    headers: Message
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document in the body; empty if there is none."""
        is_json = "json" in self.headers.get("Content-Type", "")
        return dict(json.loads(self.body)) if is_json else {}


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
    return Response(response.status, response.headers, body)
