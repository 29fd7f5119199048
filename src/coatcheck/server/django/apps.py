"""The app: checks, the tables of the store after `manage.py migrate`, and settings that change."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import register
from django.core.signals import setting_changed
from django.db.models.signals import post_migrate

from coatcheck.server.django.checks import check_middleware, check_routes, check_settings
from coatcheck.server.django.databases import create_tables
from coatcheck.server.django.settings import NAME, read_settings
from coatcheck.server.django.site import forget_site


class CoatcheckConfig(AppConfig):
    """`INSTALLED_APPS += ["coatcheck.server.django"]`."""

    name = "coatcheck.server.django"
    label = "coatcheck"
    verbose_name = "Coatcheck"

    def ready(self) -> None:
        """Connect everything; nothing is opened."""
        for check in (check_settings, check_middleware, check_routes):
            register(check)
        post_migrate.connect(_create_tables, sender=self)
        setting_changed.connect(_forget_site)


def _create_tables(using: str, verbosity: int = 1, **sent: Any) -> None:
    """Create or upgrade the tables, when Django has migrated; not when it has flushed."""
    if "plan" not in sent:
        return
    migration = create_tables(read_settings().alias, using)
    if migration is not None and verbosity > 0:
        print(f"  {migration.sentence}")  # noqa: T201 - as the command does


def _forget_site(setting: str, **_sent: object) -> None:
    """A test has changed the settings."""
    if setting in (NAME, "DATABASES", "SESSION_COOKIE_NAME"):
        forget_site()
