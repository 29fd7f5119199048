"""Every law on every store, through every driver."""

import pytest

from coatcheck.stores.registry import STORES

from . import batches, contention, lifetimes, reads, swaps, sweeps
from .drivers import Driver
from .effects import LAWS, Law
from .kinds import KINDS

PARTS = (swaps, batches, reads, sweeps, contention, lifetimes)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_store_keeps_the_law(law: Law, driver: Driver):
    """D1: one contract, one suite, every store."""
    driver.run(law())


def test_every_part_of_the_contract_has_its_laws():
    """D1: a law that is written and not registered would prove nothing."""
    registered = {law.__name__ for law in LAWS}
    assert len(registered) == len(LAWS)
    for part in PARTS:
        flows = {
            name
            for name, value in vars(part).items()
            if getattr(value, "__module__", "") == part.__name__
        }
        assert flows & registered, f"{part.__name__} holds no law"


def test_every_registered_store_is_under_law():
    """D1: the table in the docs says so of each of them."""
    assert {kind.info for kind in KINDS} == set(STORES)
