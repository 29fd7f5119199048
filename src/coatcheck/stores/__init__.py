"""Stores: where records live. One contract, one law-suite, every store chosen by URL.

`contract` says what a store is; `batching` groups the calls of threads, `looped` and `threaded`
those of event loops, for all of them; then one file each.
Stores do not know each other, and nothing here knows what a request is.
"""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.stores.batching import Batcher
from coatcheck.stores.contract import (
    AsyncStore,
    Finding,
    HasWire,
    Page,
    Query,
    Store,
)
from coatcheck.stores.declared import BY_SCHEME
from coatcheck.stores.looped import LoopedStore
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
    The store that *url* names, for sync code: `sqlite:///path`, `postgresql://host/db` and so on.

    Where *create* is False it must be there already: who looks must not make what is looked for.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise Misconfigured(f"{url!r} is not a URL: {error}") from error
    declared = BY_SCHEME.get(scheme)
    if declared is None:
        known = ", ".join(f"{scheme}://" for scheme in BY_SCHEME)
        raise Misconfigured(f"no store is known for {scheme or url!r}; there are {known}")
    try:
        module = import_module(f"coatcheck.stores.{declared.module}")
    except ModuleNotFoundError as error:
        if not declared.extra:
            raise
        raise MissingExtra(declared.extra, error.name or declared.title) from error
    store: Store = getattr(module, declared.name).from_url(url, create=create)
    return store


def open_async_store(url: str) -> AsyncStore:
    """The store that *url* names, for async code."""
    store = open_store(url)
    if isinstance(store, MemoryStore):
        return AsyncMemoryStore(store)
    return LoopedStore(store) if isinstance(store, HasWire) else ThreadedStore(store)
