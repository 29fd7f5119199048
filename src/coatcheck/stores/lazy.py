"""A store that is opened at its first use: a server can start while its store is unreachable.

An engine that gets a URL uses this. The URL is checked at once, because a mistake in it must stop
the server from starting. The store is opened by the first call; if that fails, later calls try
again. A store that cannot be reached and then turns out to be unsafe stays unavailable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Store
from coatcheck.stores.fork import renew_after_fork

# 1 s: calls that come within it get the failure of the last try. Without it, all requests that wait
# for an unreachable store would try one after the other, each for the whole timeout.
RETRY_S = 1.0


class LazyStore:
    """
    A store that *open* opens, which raises `StoreUnavailable` if it cannot be reached.

    *must_be_checked*: only the store itself can tell that it must not be used.
    """

    def __init__(
        self,
        open: Callable[[], Store],
        *,
        must_be_checked: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.must_be_checked = must_be_checked
        self._open = open
        self._monotonic = monotonic
        self._store: Store | None = None
        self._failure: StoreUnavailable | None = None
        self._failed_s = 0.0
        self._is_closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._mutex = threading.Lock()

    def opened(self) -> Store:
        """Return the store; open it first if that was not done yet."""
        store = self._store
        if store is None:
            with self._mutex:
                store = self._store = self._store or self._try_to_open()
        return store

    def _try_to_open(self) -> Store:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        if self._failure is not None and self._monotonic() - self._failed_s < RETRY_S:
            raise StoreUnavailable(str(self._failure)) from self._failure
        try:
            return self._open()
        except StoreUnavailable as error:
            self._failure, self._failed_s = error, self._monotonic()
            raise
        except Misconfigured as mistake:
            if self._failure is None:
                raise
            # The store was down when the server started, so the server runs, and it must refuse
            # requests until the store may be used.
            self._failure, self._failed_s = StoreUnavailable(str(mistake)), self._monotonic()
            raise self._failure from mistake

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what the store has beside the contract
        if name.startswith("__"):  # Python looks these up by itself, such as when it copies
            raise AttributeError(name)
        return getattr(self.opened(), name)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return self.opened().swap(swaps)

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return self.opened().get(ids)

    def find(self, query: Query) -> Page:
        """Find records for operators; see `Store.find`."""
        return self.opened().find(query)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete records whose retention is over; see `Store.sweep`."""
        return self.opened().sweep(now_ms, limit)

    def check(self) -> Sequence[Finding]:
        """Check the store's settings; see `Store.check`."""
        try:
            return self.opened().check()
        except StoreUnavailable as error:
            return [Finding("error", str(error))]

    def now_ms(self) -> int:
        """Read the store's clock; see `Store.now_ms`."""
        return self.opened().now_ms()

    def close(self) -> None:
        """Close the store, if it was opened."""
        with self._mutex:
            self._is_closed = True
            store = self._store
        if store is not None:
            store.close()
