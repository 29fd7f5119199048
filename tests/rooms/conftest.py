"""Fixtures for what is particular to one room."""

import pytest
from engines import Guards


@pytest.fixture(params=["sync", "async"])
def guards(request):
    """The engines of both flavours, under the same words."""
    guards = Guards(is_async=request.param == "async")
    yield guards
    guards.close()
