"""Fixtures: every law of transaction mode is a test for every idiom."""

import pytest
from idioms import IDIOMS, SHOPS, Till


@pytest.fixture(params=IDIOMS, ids=lambda idiom: idiom.name)
def idiom(request):
    return request.param


@pytest.fixture
def shop(idiom, tmp_path):
    return SHOPS[idiom.kind](tmp_path)


@pytest.fixture
def tills(idiom, shop):
    """Makes tills, and closes them."""
    made = []

    def make(**options):
        made.append(Till(idiom, shop, **options))
        return made[-1]

    yield make
    for till in made:
        till.close()


@pytest.fixture
def till(tills):
    return tills()
