"""The settings of Django for all tests in a process, because they are global.

`set_up` configures a whole project once. Tests change settings with `override_settings`, and add
databases of their own with `add_database`.
"""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "coatcheck.server.django.IdempotencyMiddleware",
]
APPS = [
    *(f"django.contrib.{name}" for name in ("auth", "contenttypes", "sessions", "messages")),
    "django.contrib.admin",
    "rest_framework",
    "rest_framework.authtoken",
    "drf_spectacular",
    "coatcheck.server.django",
]
_PROCESSORS = (
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
)
_NUMBERS = count()


def project_settings(database: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The settings of a whole project on *database*."""
    return {
        "ALLOWED_HOSTS": ["*"],
        "COATCHECK": {"store": "default"},
        "DATABASES": {"default": database},
        "INSTALLED_APPS": APPS,
        "LOGGING_CONFIG": None,
        "MIDDLEWARE": MIDDLEWARE,
        "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],
        "REST_FRAMEWORK": {"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"},
        "SECRET_KEY": "of the tests only",
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": _PROCESSORS},
            }
        ],
        "USE_TZ": True,
        **changes,
    }


@cache
def set_up() -> None:
    """Configure this process; the database of the project is a file that nothing has migrated."""
    import django
    from django.conf import settings

    directory = tempfile.mkdtemp(prefix="coatcheck-django-")
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(directory) / "db.sqlite3")}
    settings.configure(**project_settings(database, ROOT_URLCONF="tests.server.django_urls"))
    django.setup()


def add_database(database: dict[str, Any]) -> str:
    """Add *database* to those of this process; its alias."""
    from django.db import connections

    set_up()
    alias = f"shop_{next(_NUMBERS)}"
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: database})[
        alias
    ]
    return alias
