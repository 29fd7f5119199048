"""A store for async code that a test uses like one for threads."""

import asyncio
from collections.abc import Callable, Sequence

from coatcheck.core.record import Record, Swap
from coatcheck.stores import Query, Store, open_async_store, open_store
from tests.support.servers import START_S_MAX


class LoopStore:
    """A store for async code on an event loop of its own, used like one for threads."""

    def __init__(self, url: str) -> None:
        self._store = open_async_store(url)
        self._runner = asyncio.Runner()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        async def call() -> Sequence[Record | None]:
            await notice_closed_connections()
            async with asyncio.timeout(START_S_MAX):
                return await self._store.swap(swaps)

        return list(self._runner.run(call()))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        async def call() -> Sequence[Record | None]:
            await notice_closed_connections()
            return await self._store.get(ids)

        return list(self._runner.run(call()))

    def find(self, query: Query) -> object:
        return self._runner.run(self._store.find(query))

    def sweep(self, now_ms: int) -> int:
        return self._runner.run(self._store.sweep(now_ms))

    def check(self) -> object:
        return self._runner.run(self._store.check())

    def now_ms(self) -> int:
        return self._runner.run(self._store.now_ms())

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()


async def notice_closed_connections() -> None:
    """Take some turns of the loop, as one does that runs all the time."""
    for _ in range(3):
        await asyncio.sleep(0)


BOTH_WAYS: dict[str, Callable[[str], Store]] = {"threads": open_store, "loop": LoopStore}
