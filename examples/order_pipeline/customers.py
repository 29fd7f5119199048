"""The customers: they send each order until it has an answer, always with the key of the order."""

import asyncio
from collections.abc import Callable

from coatcheck.client import RetryPolicy, result_of
from coatcheck.client.httpx2 import AsyncClient
from examples.order_pipeline.ledger import handled
from examples.order_pipeline.settings import PORT

CLIENTS = 4
# So many orders may be placed and not handled yet, so that all processes have work until the end.
BACKLOG = 4
POLL_S = 0.02
RETRY = RetryPolicy(deadline="120s", attempts_max=100, timeout="10s")


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - other processes change it
        await asyncio.sleep(POLL_S)


class Customers:
    """Place orders; all attempts of one order have one key."""

    def __init__(self, orders: int) -> None:
        self.placed = self.attempts = 0
        self._numbers = iter(range(1, orders + 1))

    async def send_all(self) -> None:
        async with AsyncClient(base_url=f"http://127.0.0.1:{PORT}", retry=RETRY) as client:
            await asyncio.gather(*(self._send_some(client) for _ in range(CLIENTS)))

    async def _send_some(self, client: AsyncClient) -> None:
        for number in self._numbers:
            await until(lambda: self.placed < handled().total() + BACKLOG)
            async with client.action(reference=f"place-order-{number}") as action:
                response = await action.post("/orders", json={"number": number})
            response.raise_for_status()
            self.attempts += result_of(response).attempts
            self.placed += 1
