"""Stores: where records live. One contract, one law-suite, every store chosen by URL.

`contract` says what a store is; `batching` groups the calls of threads, `looped` and `threaded`
those of event loops, for all of them, and `fates` tells each what became of its own; then one
file each.
Stores do not know each other, and nothing here knows what a request is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
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
from coatcheck.stores.migration import Migration
from coatcheck.stores.threaded import ThreadedStore
from coatcheck.stores.url import no_password_told, refuse_no_text, shown

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
    The store that *url* names, for sync code: `sqlite:///path`, `postgresql://host/db` and so on.

    Where *create* is False, or the URL says `create=0`, it must be there already: who looks must
    not make what is looked for, and in production that is for `coatcheck migrate` to do (D4).
    """
    refuse_no_text(url)
    with no_password_told(url):
        url, may_create = _without_create(url)
        store: Store = _named_by(url).from_url(url, create=create and may_create)
        return store


def migrate_store(url: str, *, only_look: bool = False) -> Migration:
    """Make what the store at *url* needs, or bring it up to date; or *only_look* whether it is."""
    refuse_no_text(url)
    with no_password_told(url):
        url, _ = _without_create(url)
        migration: Migration = _named_by(url).migrate(url, only_look=only_look)
        return migration


def _without_create(url: str) -> tuple[str, bool]:
    """*url* without what every store's may say: whether it may be created."""
    address, mark, query = url.partition("?")
    options = query.split("&")
    ours = [option for option in options if option.partition("=")[0] == "create"]
    for option in ours:
        if option not in ("create=0", "create=1"):
            raise Misconfigured(f"{option} is no option; there are create=0 and create=1")
        options.remove(option)
    return address + mark * bool(options) + "&".join(options), "create=0" not in ours


def _named_by(url: str) -> Any:  # noqa: ANN401 - a class of a module that may not be importable
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise Misconfigured(f"{shown(url)} is not a URL: {error}") from error
    declared = BY_SCHEME.get(scheme)
    if declared is None:
        known = ", ".join(f"{scheme}://" for scheme in BY_SCHEME)
        raise Misconfigured(f"no store is known for {scheme or shown(url)!r}; there are {known}")
    try:
        module = import_module(f"coatcheck.stores.{declared.module}")
    except ModuleNotFoundError as error:
        if not declared.extra:
            raise
        raise MissingExtra(declared.extra, error.name or declared.title) from error
    return getattr(module, declared.name)


def open_async_store(url: str) -> AsyncStore:
    """The store that *url* names, for async code."""
    store = open_store(url)
    if isinstance(store, MemoryStore):
        return AsyncMemoryStore(store)
    return LoopedStore(store) if isinstance(store, HasWire) else ThreadedStore(store)
