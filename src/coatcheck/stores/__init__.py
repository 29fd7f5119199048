"""Stores: where records live. One contract, one law-suite, every store chosen by URL.

`contract` says what a store is; `batching` groups the calls of threads and `threaded` those of
event loops, for all of them; then one file each.
Stores do not know each other, and nothing here knows what a request is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from coatcheck.errors import Misconfigured
from coatcheck.stores.batching import Batcher
from coatcheck.stores.contract import (
    AsyncStore,
    Finding,
    Page,
    Query,
    Store,
)
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from coatcheck.stores.threaded import ThreadedStore

__all__ = [
    "AsyncStore",
    "Batcher",
    "Finding",
    "Page",
    "Query",
    "Store",
    "ThreadedStore",
    "open_async_store",
    "open_store",
]


def open_store(url: str, *, create: bool = True) -> Store:
    """
    The store that *url* names, for sync code: `memory://` or `sqlite:///path`.

    Where *create* is False it must be there already: who looks must not make what is looked for.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise Misconfigured(f"{url!r} is not a URL: {error}") from error
    if scheme == "memory":
        if not create:
            raise Misconfigured("memory:// ends with its process, so there is nothing to look at")
        return MemoryStore()
    if scheme == "sqlite":
        from coatcheck.stores.sqlite import SqliteStore  # noqa: PLC0415 - opened only if asked for

        return SqliteStore.from_url(url, create=create)
    message = f"no store is known for {scheme or url!r}; use memory:// or sqlite:///path"
    raise Misconfigured(message)


def open_async_store(url: str) -> AsyncStore:
    """The store that *url* names, for async code."""
    store = open_store(url)
    return AsyncMemoryStore(store) if isinstance(store, MemoryStore) else ThreadedStore(store)
