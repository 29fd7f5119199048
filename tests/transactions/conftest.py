"""Fixtures: a test that uses `harness` runs once for every idiom."""

import pytest

from tests.transactions.idioms import IDIOMS, SHOPS, Harness


@pytest.fixture(params=IDIOMS, ids=lambda idiom: idiom.name)
def idiom(request):
    return request.param


@pytest.fixture
def shop(idiom, tmp_path):
    return SHOPS[idiom.kind](tmp_path)


@pytest.fixture
def open_harness(idiom, shop):
    """Opens harnesses of this idiom, and closes them at the end."""
    made = []

    def make(**options):
        made.append(Harness(idiom, shop, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def harness(open_harness):
    return open_harness()
