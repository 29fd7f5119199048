"""The wire of the DynamoDB store: an event loop's own client, without a thread between.

Beside `dynamodb_line.py`, which is for threads; both perform the flows of `dynamodb_flow.py`. It
needs aiobotocore; where that is not installed, event loops ask through threads.

DynamoDB has no bulk write, so that there is nothing to be gained by leaving together: every swap
has a lane of its own, as long as there are lanes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from aiobotocore.config import AioConfig  # type: ignore[import-untyped]  # ships no types
from aiobotocore.session import AioSession  # type: ignore[import-untyped]  # ships no types
from aiohttp import ClientConnectionError, ClientConnectorError, ConnectionTimeoutError
from botocore.exceptions import BotoCoreError

from coatcheck.core.flow import Effect, Flow, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.dynamodb_faults import explained, note
from coatcheck.stores.dynamodb_flow import (
    Answer,
    Ask,
    Flows,
    Pause,
    Tell,
    each_of,
    in_order,
    portions_of,
)
from coatcheck.stores.dynamodb_session import prepared, settings_of
from coatcheck.stores.fates import results_of

logger = logging.getLogger("coatcheck")

T = TypeVar("T")
R = TypeVar("R")


class DynamoWire:
    """One event loop's client for one table."""

    def __init__(self, flows: Flows) -> None:
        self.lanes = flows.place.concurrency
        self._flows = flows
        self._place = flows.place
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._held = AsyncExitStack()  # what is to be let go of
        self._under_way = asyncio.Semaphore(flows.place.concurrency)
        self._is_closed = False

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands; all at the same time."""
        return results_of(await self._each(self._flows.swap, swaps))

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*; never an older one than was written."""
        return in_order(ids, await self._each(self._flows.read, portions_of(ids)))

    async def _each(
        self, flow_of: Callable[[T], Flow[R]], things: Sequence[T]
    ) -> list[R | Exception]:
        flows = [run_async(flow_of(thing), self._perform) for thing in things]
        if len(flows) == 1:
            return [await flows[0]]
        return each_of(await asyncio.gather(*flows, return_exceptions=True))

    async def _perform(self, effect: Effect[Any]) -> Answer | None:
        match effect:
            case Ask(operation, parameters):
                async with self._under_way:
                    send = getattr(self._client or await self._connected(), operation)
                    with explained(str(self._place)):
                        answer: Answer = await send(**parameters)
                return answer
            case Pause(s_max):
                await asyncio.sleep(random.uniform(0, s_max))  # noqa: S311 - no secret
            case Tell(message):
                logger.warning(message)
        return None

    async def _connected(self) -> Any:  # noqa: ANN401 - a client's class is made when it is
        async with self._opening:  # whoever comes meanwhile has the same client
            self._refuse_if_closed()
            if self._client is None:
                client = await self._opened()
                if self._is_closed:  # meanwhile
                    await self._held.aclose()
                    self._refuse_if_closed()
                self._client = client
            return self._client

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._place}: the store is closed")

    async def _opened(self) -> Any:  # noqa: ANN401 - as above
        place = self._place
        try:
            client: Any = await self._held.enter_async_context(
                prepared(AioSession(), place).create_client(
                    *("dynamodb", place.region),
                    endpoint_url=place.endpoint,
                    config=AioConfig(**settings_of(place)),
                )
            )
        except (BotoCoreError, ValueError) as error:  # it was well when the store was opened
            raise StoreUnavailable(f"{place}: {error}") from error
        client.meta.events.register("needs-retry.dynamodb", _note)
        return client

    async def close(self) -> None:
        """Let go of the connections for good."""
        self._is_closed = True
        self._client = None
        await self._held.aclose()


def _note(caught_exception: Exception | None = None, **told: Any) -> None:
    """Aiobotocore says that nobody was there also of a connection that has broken under way."""
    cause = getattr(caught_exception, "kwargs", {}).get("error")
    is_unsent = isinstance(cause, ClientConnectorError | ConnectionTimeoutError)
    if isinstance(cause, ClientConnectionError) and not is_unsent:
        caught_exception = cause
    note(caught_exception=caught_exception, **told)
