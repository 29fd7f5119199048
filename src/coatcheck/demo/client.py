"""The client: sends every order, a few at a time, and again until each has a definite answer.

It does what a careful client does on a bad network: no answer, a broken connection, "not yet" and
"not now" all mean to try again. With keys every try of one order carries the same key; without
them it has no better choice than to try again all the same, or to lose the order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from coatcheck.demo.fates import LOSSES_MAX, Order
from coatcheck.demo.wire import BROKEN, Answer, connect, exchange

# 8 orders on their way at once: enough that a kill always meets some of them.
HANDS = 8
# 50 ms: a shop that restarts is asked again soon, but not all the time.
PAUSE_S = 0.05
# 250 ms at most between two tries, whatever Retry-After says: an audience is waiting.
RETRY_AFTER_S_MAX = 0.25
# 20 s in which no order at all is confirmed: ten times the longest pause of a healthy run. After
# that nobody waits any longer, and what is not confirmed counts as broken.
STALL_S_MAX = 20.0
# 1 s for the second of two requests to be ready; without it the first goes alone.
TOGETHER_S_MAX = 1.0


@dataclass(slots=True)
class Receipt:
    """What became of one order, as the client and the network between saw it."""

    order: Order
    requests: int = 0
    answers: int = 0  # all that came out of the shop, also those that the network lost
    answers_lost: int = 0
    connections_broken: int = 0
    numbers: set[str] = field(default_factory=set)  # every order number in any of the answers
    reference: str = ""
    is_confirmed: bool = False
    mutex: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """Everybody who orders; `start` begins, `wait` says whether all is done."""

    def __init__(
        self, orders: Sequence[Order], shop_port: Callable[[], int], *, sends_keys: bool
    ) -> None:
        self.receipts = [Receipt(order) for order in orders]
        self.finished = 0
        self._shop_port = shop_port  # asked for every request: a restarted shop has another
        self._sends_keys = sends_keys
        self._pool = ThreadPoolExecutor(HANDS, "client")
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._gives_up_s = 0.0
        self._is_stopped = False
        self._deliveries: list[Future[None]] = []

    def start(self) -> None:
        """Send the orders, in their order."""
        self._gives_up_s = time.monotonic() + STALL_S_MAX
        self._deliveries = [self._pool.submit(self._deliver, r) for r in self.receipts]

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end for *timeout_s*; True once it has come."""
        if not self._ended.wait(timeout_s):
            return False
        for delivery in self._deliveries:
            delivery.result()  # a bug of ours must not look like a broken promise
        return True

    def stop(self) -> None:
        """Give up whatever is not done."""
        self._is_stopped = True
        self._pool.shutdown(cancel_futures=True)

    def unanswered(self) -> set[str]:
        """The orders that are on their way to the shop for the first time."""
        return {r.order.name for r in self.receipts if r.requests and not r.answers}

    def _deliver(self, receipt: Receipt) -> None:
        try:
            if receipt.order.is_repeated:
                self._send_twice(receipt)
            while not receipt.is_confirmed and not self._gives_up():
                self._send(receipt)
            if receipt.is_confirmed:
                self._gives_up_s = time.monotonic() + STALL_S_MAX
        finally:
            with self._mutex:
                self.finished += 1
                if self.finished == len(self.receipts):
                    self._ended.set()

    def _gives_up(self) -> bool:
        return self._is_stopped or time.monotonic() > self._gives_up_s

    def _send_twice(self, receipt: Receipt) -> None:
        """The same request two times at the same instant, on two connections."""
        together = threading.Barrier(2)
        twin = threading.Thread(target=self._send, args=(receipt, together))
        twin.start()
        self._send(receipt, together)
        twin.join()

    def _send(self, receipt: Receipt, together: threading.Barrier | None = None) -> None:
        order = receipt.order
        asked = {"order": order.name, "cents": order.cents}
        try:
            with closing(connect(self._shop_port())) as connection:
                with receipt.mutex:
                    receipt.requests += 1
                if together is not None:
                    _meet(together)
                key = order.key if self._sends_keys else None
                answer = exchange(connection, "/orders", asked, key)
        except BROKEN:
            with receipt.mutex:
                receipt.connections_broken += 1
            time.sleep(PAUSE_S)
            return
        with receipt.mutex:
            comes_through = _note(receipt, answer)
        if comes_through and answer.status != 201:
            time.sleep(min(answer.retry_after_s, RETRY_AFTER_S_MAX) or PAUSE_S)


def _note(receipt: Receipt, answer: Answer) -> bool:
    """Write down *answer*; False where the network loses it, and the client knows nothing."""
    is_lost = receipt.answers < LOSSES_MAX and receipt.order.losses[receipt.answers]
    receipt.answers += 1
    receipt.reference = answer.reference or receipt.reference
    is_confirmed = answer.status == 201
    if is_confirmed:
        receipt.numbers.add(str(answer.document.get("number")))
    if is_lost:
        receipt.answers_lost += 1
        return False
    receipt.is_confirmed = receipt.is_confirmed or is_confirmed
    return True


def _meet(together: threading.Barrier) -> None:
    try:
        together.wait(TOGETHER_S_MAX)
    except threading.BrokenBarrierError:
        return  # the other found no connection
