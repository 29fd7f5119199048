"""Sagas on a memory store, with a clock and a downstream of the test's own."""

import pytest

from coatcheck.saga import Retry, Sagas

LEASE_MS = 20_000


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self):
        self.now_ms = 1_700_000_000_000

    def __call__(self):
        return self.now_ms

    def pass_lease(self):
        self.now_ms += LEASE_MS + 1


class Died(BaseException):
    """The process dies here: nothing more of it runs, and its lease is left to expire."""


class Downstream:
    """Acts once for each key, and remembers every call."""

    def __init__(self):
        self.calls = []
        self.effects = {}
        self.errors = {}  # by name: what the next calls raise; None: nothing

    def function(self, name):
        def call(*_args, key):
            self.calls.append(key)
            planned = self.errors.get(name)
            if planned:
                error = planned.pop(0)
                if error is not None:
                    raise error
            return self.effects.setdefault(key, f"{name} done")

        call.__name__ = name
        return call

    def effects_of(self, word):
        return [key for key in self.effects if word in key]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def downstream():
    return Downstream()


@pytest.fixture
def make_sagas(clock):
    """Makes one more node on the same store."""
    made = []

    def make(**options):
        retry = options.pop("retry", Retry(tries=3, pause=0.001, pause_max=0.001))
        store = made[0].engine.store if made else "memory://"
        sagas = Sagas(store, clock=clock, retry=retry, recover_every_s=None, **options)
        made.append(sagas)
        return sagas

    yield make
    for sagas in reversed(made):
        sagas.close()


@pytest.fixture
def sagas(make_sagas):
    return make_sagas()
