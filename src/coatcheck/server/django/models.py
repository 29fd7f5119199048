"""The model of the admin's page: it has no table of Django's, because the store has its own."""

from __future__ import annotations

from django.db import models


class Operation(models.Model):
    """An operation in the store, named by its reference; see `admin.py`."""

    reference = models.CharField(primary_key=True, max_length=14)

    class Meta:
        """Only for the admin and its permissions."""

        managed = False
        app_label = "coatcheck"
        default_permissions = ("view",)
        verbose_name_plural = "operations"

    def __str__(self) -> str:
        return str(self.reference)
