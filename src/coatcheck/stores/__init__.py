"""Stores: where records are kept. One contract, one law-suite, every store chosen by URL.

Read in this order: `contract` (what a store is), `memory` (the smallest one), `batching` (groups
the calls of threads), `async_batching` and `async_store` (the same for event loops),
`batch_errors` (when part of a batch fails), `lazy` (a store that is opened at its first use),
`encryption` (a store around a store), `record_counts` (for operators), `shared_connection` (for
SQL databases). Then one package for each database. `registry` has the capabilities of each store.
Stores do not import each other, and nothing here knows what a request is.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.stores.async_store import BatchedAsyncStore, ThreadedStore
from coatcheck.stores.batching import Batcher
from coatcheck.stores.contract import AsyncStore, Finding, Page, Query, Store
from coatcheck.stores.lazy import LazyStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from coatcheck.stores.migration import Migration
from coatcheck.stores.registry import BY_SCHEME, StoreInfo
from coatcheck.stores.url import did_you_mean, hide_password, refuse_no_text, shown

__all__ = [
    "AsyncStore",
    "Batcher",
    "Finding",
    "Migration",
    "Page",
    "Query",
    "Store",
    "ThreadedStore",
    "migrate_store",
    "open_async_store",
    "open_store",
]


def open_store(url: str, *, create: bool = True) -> Store:
    """
    Open the store that *url* names, for sync code: `sqlite:///path`, `postgresql://host/db`, ….

    With *create* set to False, or `create=0` in the URL, files and tables must exist already.
    Tools that only look must not create what they look for, and in production `coatcheck migrate`
    should do it.
    """
    refuse_no_text(url)
    with hide_password(url):
        url, may_create = _without_create(url)
        store: Store = _store_class(url).from_url(url, create=create and may_create)
        return store


def open_async_store(url: str) -> AsyncStore:
    """Open the store that *url* names, for async code."""
    return async_store_of(open_store(url))


def open_lazily(url: str) -> Store:
    """
    Return the store that *url* names, for sync code; it is opened at its first use.

    Raises at once if the URL or what is installed can never work.
    """
    refuse_no_text(url)
    with hide_password(url):
        plain, may_create = _without_create(url)
        store_class, info = _store_class(plain), _info_of(plain)
        if store_class is MemoryStore:
            return open_store(url)
        # A mistake in the options is found without a connection.
        import_module(f"coatcheck.stores.{info.module.partition('.')[0]}.url").parse_url(plain)
    must_be_checked = info.refuses_servers or not may_create
    return LazyStore(partial(open_store, url), must_be_checked=must_be_checked)


def open_async_lazily(url: str) -> AsyncStore:
    """Return the store that *url* names, for async code; see `open_lazily`."""
    return async_store_of(open_lazily(url))


def async_store_of(store: Store) -> AsyncStore:
    """Return *store* for async code."""
    return AsyncMemoryStore(store) if isinstance(store, MemoryStore) else BatchedAsyncStore(store)


def migrate_store(url: str, *, only_look: bool = False) -> Migration:
    """Create or upgrade the schema of the store at *url*; with *only_look*, only report on it."""
    refuse_no_text(url)
    with hide_password(url):
        url, _ = _without_create(url)
        migration: Migration = _store_class(url).migrate(url, only_look=only_look)
        return migration


def _without_create(url: str) -> tuple[str, bool]:
    """Split off the option that every store has: whether it may create files and tables."""
    address, mark, query = url.partition("?")
    options = query.split("&")
    ours = [option for option in options if option.partition("=")[0] == "create"]
    for option in ours:
        if option not in ("create=0", "create=1"):
            raise Misconfigured(f"{option} is not an option; write create=0 or create=1")
        options.remove(option)
    return address + mark * bool(options) + "&".join(options), "create=0" not in ours


def _info_of(url: str) -> StoreInfo:
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise Misconfigured(f"{shown(url)} is not a URL: {error}") from error
    info = BY_SCHEME.get(scheme)
    if info is None:
        hint = did_you_mean(scheme, BY_SCHEME, "://")
        known = ", ".join(f"{scheme}://" for scheme in BY_SCHEME)
        unknown = scheme or shown(url)
        raise Misconfigured(f"no store is known for {unknown!r}{hint}; there are {known}")
    return info


def _store_class(url: str) -> Any:  # noqa: ANN401 - a class of a module that may not be importable
    info = _info_of(url)
    try:
        module = import_module(f"coatcheck.stores.{info.module}")
    except ModuleNotFoundError as error:
        if not info.extra:
            raise
        raise MissingExtra(info.extra, error.name or info.title) from error
    return getattr(module, info.name)
