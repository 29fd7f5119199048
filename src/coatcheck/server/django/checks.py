"""Checks of `manage.py check`: mistakes that are found without a request and without the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.utils.module_loading import import_string

from coatcheck.engine import Engine
from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.server.django.middleware import IdempotencyMiddleware
from coatcheck.server.django.routes import marked_routes
from coatcheck.server.django.settings import Configuration, read_settings
from coatcheck.server.routes import policy_of_mark

_OURS = "coatcheck.server.django.IdempotencyMiddleware"
# What finds the user, or what it needs.
_BEFORE = (
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.RemoteUserMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
)


def check_settings(app_configs: object, **_: Any) -> list[CheckMessage]:
    """`settings.COATCHECK` makes sense."""
    del app_configs
    mistake = _mistake_in_settings()
    return [] if mistake is None else [Error(str(mistake), id="coatcheck.E001")]


def check_middleware(app_configs: object, **_: Any) -> list[CheckMessage]:
    """The middleware is there, and after authentication."""
    del app_configs
    listed = list(settings.MIDDLEWARE)
    ours = [place for place, path in enumerate(listed) if _is_ours(path)]
    if not ours:
        return [
            Error(
                f"{_OURS} is not in MIDDLEWARE, so no request is guarded",
                hint=f"Add {_OURS!r} to MIDDLEWARE, after authentication.",
                id="coatcheck.E002",
            )
        ]
    late = [path for path in _BEFORE if path in listed[ours[0] :]]
    if late:
        return [
            Error(
                f"{_OURS} is before {late[-1]}: it cannot know the user, and a refused user would "
                "get stored responses",
                hint=f"Move {_OURS!r} behind {late[-1]!r}.",
                id="coatcheck.E003",
            )
        ]
    return []


def _is_ours(path: str) -> bool:
    if path == _OURS:
        return True
    with suppress(ImportError):  # Django reports that
        found = import_string(path)
        return isinstance(found, type) and issubclass(found, IdempotencyMiddleware)
    return False


def check_routes(app_configs: object, **_: Any) -> list[CheckMessage]:
    """The policy of every marked view makes sense."""
    del app_configs
    if not getattr(settings, "ROOT_URLCONF", None) or _mistake_in_settings() is not None:
        return []
    return list(_mistakes_in_routes(read_settings()))


def _mistakes_in_routes(configuration: Configuration) -> Iterator[CheckMessage]:
    for template, method, mark in marked_routes():
        try:
            policy = policy_of_mark(configuration.engine["policy"], method, mark)
        except Misconfigured as mistake:
            yield Error(f"{method} {template}: {mistake}", id="coatcheck.E004")
            continue
        has_database = configuration.alias or configuration.transactions
        if policy.mode == "transaction" and not has_database:
            yield Error(
                f"{method} {template} is in transaction mode, and the store is not in a database "
                "of the project",
                hint="Give COATCHECK['store'] an alias of DATABASES.",
                id="coatcheck.E005",
            )


def _mistake_in_settings() -> Exception | None:
    """What an engine with these settings would refuse; nothing is opened."""
    try:
        configuration = read_settings()
        Engine(
            configuration.store, transactions=configuration.transactions, **configuration.engine
        ).close()
    except (Misconfigured, MissingExtra) as mistake:
        return mistake
    return None
