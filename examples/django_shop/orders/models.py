"""What the shop has sold."""

from django.conf import settings
from django.db import models


class Order(models.Model):
    """One order; the reference finds its operation."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    item = models.CharField(max_length=100)
    reference = models.CharField(max_length=14)

    def __str__(self):
        return self.item
