"""Settings: what `settings.COATCHECK` says, checked and translated for an engine and a middleware.

    COATCHECK = {"store": "default", "policy": "payments", "caller": "shop.callers.tenant"}

`"store"` is an alias of `DATABASES`, or the URL of a store. Functions may be given by their dotted
path, because a settings module cannot import models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from coatcheck.core.policy import Policy
from coatcheck.engine.settings import policy_of
from coatcheck.errors import Misconfigured
from coatcheck.server.django.databases import (
    check_alias,
    connection_source,
    is_alias,
    url_of_database,
)
from coatcheck.stores import Store, open_store
from coatcheck.stores.url import did_you_mean

NAME = "COATCHECK"
_OF_MIDDLEWARE = ("caller", "key", "disabled_by", "session_cookies")
_OF_ENGINE = (
    *("policy", "secret", "service", "keyring", "compress", "observers", "listeners"),
    *("sweep_every_s", "recover_every_s", "archive"),
)
KNOWN = ("store", "transactions", *_OF_ENGINE, *_OF_MIDDLEWARE)
# Those that may be the dotted path of a function; `disabled_by` may be the path of a file.
_FUNCTIONS = ("caller", "key", "archive")


@dataclass(frozen=True, slots=True)
class Configuration:
    """
    The settings of a project.

    Attributes:
        store: the URL of the store, or a store in memory.
        alias: of the database that is the store; None: it is none of the project's.
        transactions: returns the connection for transaction mode; None: there is none.
        engine: the other arguments of `Engine` and `AsyncEngine`.
        middleware: the other arguments of the middlewares.
    """

    store: str | Store
    alias: str | None
    transactions: Callable[[], object] | None
    engine: Mapping[str, Any]
    middleware: Mapping[str, Any]


def read_settings() -> Configuration:
    """The settings of this project; raises `Misconfigured` if they make no sense."""
    given = getattr(settings, NAME, None) or {}
    if not isinstance(given, Mapping):
        raise Misconfigured(f"settings.{NAME} is a {type(given).__name__}; it must be a dictionary")
    for name in given:
        if name not in KNOWN:
            hint = did_you_mean(str(name), KNOWN)
            known = ", ".join(KNOWN)
            raise Misconfigured(f"settings.{NAME}[{name!r}] is no setting{hint}; there are {known}")
    values = {name: _imported(name, value) for name, value in given.items() if value is not None}
    store, alias = _store_of(values.get("store", "default"))
    policy = _policy_of(values.get("policy"))
    cookies: Any = values.get("session_cookies", ())
    if not isinstance(cookies, str):  # the middleware refuses a single text
        values["session_cookies"] = [settings.SESSION_COOKIE_NAME, *cookies]
    return Configuration(
        store,
        alias,
        _transactions_of(values.get("transactions"), store, alias, policy),
        {**{n: values[n] for n in _OF_ENGINE if n in values}, "policy": policy},
        {name: values[name] for name in _OF_MIDDLEWARE if name in values},
    )


def _imported(name: str, value: object) -> object:
    if name not in _FUNCTIONS or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise Misconfigured(
            f"settings.{NAME}[{name!r}] is {value!r}, which cannot be imported: {error}"
        ) from error


def _store_of(given: object) -> tuple[str | Store, str | None]:
    """The store, and the alias of the database that it is in, if it is one of the project's."""
    if not isinstance(given, str) or not given:
        kind = type(given).__name__ if given else repr(given)
        raise Misconfigured(
            f"settings.{NAME}['store'] is a {kind}; it must be an alias of DATABASES, or a URL"
        )
    if "://" in given:
        return (open_store(given) if given.startswith("memory:") else given), None
    check_alias("store", given)
    url = url_of_database(given)
    # An in-memory database is that of a test run, and no other connection could see it.
    return (open_store("memory://") if url is None else url), given


def _policy_of(given: object) -> Policy:
    if isinstance(given, Mapping):
        try:
            return Policy(**given)
        except TypeError as error:
            raise Misconfigured(f"settings.{NAME}['policy']: {error}") from error
    return policy_of(given)  # type: ignore[arg-type]  # which refuses other types


def _transactions_of(
    given: object, store: str | Store, alias: str | None, policy: Policy
) -> Callable[[], object] | None:
    """The connections for transaction mode: those of the store's own database."""
    if given is None:
        if alias is not None and isinstance(store, str):
            return connection_source(alias)
        if policy.mode == "transaction" and alias is None:
            raise Misconfigured(
                f"settings.{NAME}: transaction mode needs the record in a database of the project: "
                "give 'store' an alias of DATABASES"
            )
        return None
    if not isinstance(given, str) or not is_alias(given):
        raise Misconfigured(
            f"settings.{NAME}['transactions'] is {given!r}; it must be an alias of DATABASES"
        )
    if alias not in (None, given):
        raise Misconfigured(
            f"settings.{NAME}: the store is in the database {alias!r}, and 'transactions' is "
            f"{given!r}; record and effect can only commit together in one database"
        )
    return connection_source(given)
