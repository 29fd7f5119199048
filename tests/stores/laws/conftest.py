"""The one fixture of the law-suite: a fresh store of every kind, driven in every way."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LAW_MODULES = ("swaps", "batches", "reads", "sweeps", "contention", "lifetimes", "records")
# Only then does pytest show what an assertion in there compared.
pytest.register_assert_rewrite(*(f"{__package__}.{name}" for name in (*LAW_MODULES, "effects")))

from .drivers import DRIVERS, PAIRS, Driver, name_of  # noqa: E402 - after the registration


@pytest.fixture(params=PAIRS, ids=name_of)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    kind, way = request.param
    driver = DRIVERS[way](kind, tmp_path)
    yield driver
    driver.close()


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """A directory in memory where there is one: for tests that need thousands of commits."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="coatcheck-laws-", dir=parent))
    yield directory
    shutil.rmtree(directory)
