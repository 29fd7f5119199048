"""Random histories, compared step by step with a model made from the table of legal moves.

The model is a dictionary. What may be written next is read from `MOVES`, so a move that is added
to the table and has no builder here fails at once. The histories of a test share one store, each
starting with an empty one. With the same seed they are the same in every run; a failing one is
printed with its seed.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from coatcheck.core.record import (
    GONE,
    MOVES,
    STATE_NAMES,
    Record,
    Swap,
    completed,
    failed,
    in_doubt,
    is_retention_over,
    legal_moves,
    renewed,
)
from coatcheck.stores.contract import Query, matches

from .drivers import DRIVERS, PAIRS, Driver, name_of
from .effects import GetAll, SwapAll, Sweep, find_all
from .kinds import Kind
from .records import LEASE_MS, NOW_MS, RETENTION_MS, WINDOW_MS, claim_of, new_life, next_attempt

# For each store and driver: thousands of histories in a run, in a few seconds each.
HISTORIES = os.environ.get("LAW_HISTORIES")
SEED = int(os.environ.get("LAW_SEED", "2100"))
LENGTH = 20
IDS = 5

# How each move of the table is written: (standing record, now, nonce of a new attempt) → record.
BUILDERS: dict[str, Callable[[Record, int, int], Record | None]] = {
    # Every other renewal outlives the retention; every third answer is not kept, or empty.
    "renew": lambda r, now_ms, nonce: renewed(
        r, now_ms + (LEASE_MS, 2 * RETENTION_MS)[nonce % 2]
    )._replace(progress=b"%d" % nonce),
    "defer": lambda r, now_ms, nonce: renewed(r, now_ms + LEASE_MS)._replace(nonce=nonce),
    "complete": lambda r, _now_ms, nonce: completed(r, (None, b"", b"%d" % nonce)[nonce % 3]),
    "release": lambda r, _now_ms, _: failed(r),
    "mark in doubt": lambda r, _now_ms, _: in_doubt(r),
    "take over": lambda r, now_ms, nonce: next_attempt(r, now_ms, nonce=nonce),
    "retry": lambda r, now_ms, nonce: next_attempt(r, now_ms, nonce=nonce),
    "resolve as happened": lambda r, _now_ms, _: completed(r, b"by hand"),
    "resolve as not happened": lambda r, _now_ms, _: failed(r),
    "resolve by running again": lambda r, now_ms, nonce: next_attempt(r, now_ms, nonce=nonce),
    "new generation": lambda r, now_ms, nonce: new_life(r, now_ms, nonce=nonce),
    "sweep": lambda _r, _now_ms, _: None,
}

# What a client may try: claim anew, move what stands, move what stood once, repeat a swap; and
# which of the possible moves.
ACTS = ["claim", "move", "move", "move", "late", "repeat"]
WISHES = [(act, pick) for pick in range(8) for act in ACTS]
# Mostly none; often enough over the lease, now and then over the window and the retention.
PAUSES_MS = [0, 0, 0, 1, 1000, LEASE_MS, LEASE_MS, WINDOW_MS, RETENTION_MS]
CONDITIONS: list[dict[str, Any]] = [
    *({"id_prefix": prefix} for prefix in (b"", b"0", b"00", b"01\x00")),
    *({"key": key} for key in ("key-0", "key-1", "")),
    *({"state": state} for state in STATE_NAMES),
    *({"label": label} for label in ("POST /orders", "PATCH /orders")),
    *({"scope": scope} for scope in ("caller", "other")),
    {"newest_first": True},
    # Seen from the moment of asking.
    *({"created_before_ms": offset_ms} for offset_ms in (-WINDOW_MS, 0, 1)),
    *({"created_after_ms": offset_ms} for offset_ms in (-WINDOW_MS, -1)),
    *({"lease_expired_at_ms": offset_ms} for offset_ms in (0, LEASE_MS)),
    *({"expired_at_ms": offset_ms} for offset_ms in (0, LEASE_MS, RETENTION_MS)),
]
TIMES = ("created_before_ms", "created_after_ms", "lease_expired_at_ms", "expired_at_ms")
QUERIES = [
    Query(**{**one, **other}, limit=limit)
    for limit in (1, 2, 100)
    for one, other in itertools.combinations_with_replacement(CONDITIONS, 2)
]

# The steps of which a history is made, each a method and its arguments. Prepared, because each draw
# costs more than a swap in memory; of what is too much to prepare, others for each seed.
Wishes = dict[int, tuple[str, int]]
Step = tuple[str, Any, Any]
SOME = 2000
_chance = random.Random(SEED)


def _some_wishes(size_min: int, size_max: int) -> Wishes:
    ids = _chance.sample(range(IDS), _chance.randint(size_min, size_max))
    return {id: _chance.choice(WISHES) for id in ids}


def _some_numbers() -> list[int]:
    return _chance.choices(range(IDS), k=_chance.randint(0, 7))


STEPS: dict[str, list[Step]] = {
    "one": [("swap", _some_wishes(1, 1), _chance.choice(PAUSES_MS)) for _ in range(SOME)],
    "many": [("swap", _some_wishes(2, IDS), _chance.choice(PAUSES_MS)) for _ in range(SOME)],
    "sweep": [
        ("sweep", _chance.choice([1, 2, 500]), _chance.choice(PAUSES_MS)) for _ in range(SOME)
    ],
    "look": [("look", _some_numbers(), _chance.choice(QUERIES)) for _ in range(SOME)],
}
# A failing history is made short by resting, and that is the first choice of each draw.
REST: Step = ("rest", None, None)
# Some histories lack a kind of step or two: what only piles up without sweeps is seen there.
RANDOM_HISTORIES = st.one_of(
    st.lists(
        st.sampled_from([REST, *chain(*zip(*(STEPS[kind] for kind in kinds), strict=True))]),
        min_size=LENGTH,
        max_size=LENGTH,
    )
    for count in (4, 3, 2)
    for kinds in itertools.combinations(STEPS, count)
    if {"one", "many"} & {*kinds}
)


class History:
    """One random history: clients, zombies, sweepers and operators on a few records."""

    ids = tuple(b"%02x" % number + bytes(range(14)) for number in range(IDS))

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.model: dict[bytes, Record] = {}
        self.stood: list[Record] = []
        self.acknowledged: set[tuple[bytes, int]] = set()
        self.last: dict[bytes, Swap] = {}
        self.now_ms = NOW_MS
        self.nonces = itertools.count(1)

    def run(self, steps: list[Step]) -> None:
        """From nothing, also after a history that failed in this store."""
        left = self.driver.run(find_all(Query()))
        self.ask(SwapAll([Swap(record.id, record.version, None) for record in left]))
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        wanted = sorted(self.driver.kind.as_kept(record) for record in self.model.values())
        assert self.driver.run(find_all(Query())) == wanted

    def ask(self, effect: Any) -> Any:
        return self.driver.run(iter(effect))

    def rest(self, *_: None) -> None:
        pass

    def swap(self, wishes: Wishes, pause_ms: int) -> None:
        self.now_ms += pause_ms
        self.swap_all(wishes)

    def sweep(self, limit: int, pause_ms: int) -> None:
        self.now_ms += pause_ms
        self.sweep_and_compare(limit)

    def look(self, numbers: list[int], query: Query) -> None:
        ids = [self.ids[number] for number in numbers]
        kept = {id: self.driver.kind.as_kept(record) for id, record in self.model.items()}
        assert list(self.ask(GetAll(ids))) == [kept.get(id) for id in ids]
        query = self.as_of_now(query)
        wanted = sorted(record for record in kept.values() if matches(record, query))
        if query.newest_first:
            wanted.sort(key=lambda record: (record.created_ms, record.id), reverse=True)
            del wanted[query.limit :]
        assert self.driver.run(find_all(query)) == wanted

    def as_of_now(self, query: Query) -> Query:
        offsets_ms = {name: getattr(query, name) for name in TIMES}
        return replace(
            query, **{name: self.now_ms + ms for name, ms in offsets_ms.items() if ms is not None}
        )

    def swap_all(self, wishes: dict[int, tuple[str, int]]) -> None:
        """The model says who wins, and the table that it may."""
        swaps = [self.swap_of(number, act, pick) for number, (act, pick) in wishes.items()]
        answers = self.ask(SwapAll(swaps))
        assert len(answers) == len(swaps)
        for swap, answer in zip(swaps, answers, strict=True):
            self.last[swap.id] = swap
            standing = self.model.get(swap.id)
            if (0 if standing is None else standing.version) == swap.expected:
                assert answer is None
                self.accept(standing, swap)
            else:
                assert answer == (GONE if standing is None else self.driver.kind.as_kept(standing))

    def swap_of(self, number: int, act: str, pick: int) -> Swap:
        id = self.ids[number]
        standing = self.model.get(id)
        if act == "repeat" and id in self.last:
            return self.last[id]
        if act == "late" and (stood := [record for record in self.stood if record.id == id]):
            standing = stood[pick % len(stood)]
        afters = [] if standing is None or act == "claim" else self.legal_afters(standing)
        if standing is None or not afters:
            return Swap(id, 0, self.claim(number))
        return Swap(id, standing.version, afters[pick % len(afters)])

    def claim(self, number: int) -> Record:
        people = {"label": ("POST", "PATCH")[number % 2] + " /orders", "key": f"key-{number % 3}"}
        claim = claim_of(self.ids[number], now_ms=self.now_ms, nonce=next(self.nonces))
        return claim._replace(**people, scope="caller")

    def legal_afters(self, before: Record) -> list[Record | None]:
        """The records that the table allows after *before*; None: no record at all."""
        nonce = next(self.nonces)
        afters = [
            (move, BUILDERS[move.name](before, self.now_ms, nonce))
            for move in MOVES
            if move.source == before.state
        ]
        return [after for move, after in afters if move in legal_moves(before, after, self.now_ms)]

    def accept(self, before: Record | None, swap: Swap) -> None:
        after = swap.record
        assert legal_moves(before, after, self.now_ms), (before, after)
        if after is None:
            self.forget(swap.id)
            return
        assert (after.id, after.version) not in self.acknowledged, "a version was used twice"
        self.acknowledged.add((after.id, after.version))
        self.model[swap.id] = after
        self.stood.append(after)

    def forget(self, id: bytes) -> None:
        assert legal_moves(self.model.pop(id), None, self.now_ms)
        # A claim that is repeated after a whole retention is not a repetition any more.
        self.last.pop(id, None)

    def sweep_and_compare(self, limit: int) -> None:
        over = {id for id, r in self.model.items() if is_retention_over(r, self.now_ms)}
        count = self.ask(Sweep(self.now_ms, limit))
        assert count == (min(limit, len(over)) if self.driver.kind.sweeps else 0)
        standing = self.ask(GetAll(self.ids))
        gone = {
            id for id, r in zip(self.ids, standing, strict=True) if r is None and id in self.model
        }
        assert gone <= over
        assert len(gone) == count
        for id in gone:
            self.forget(id)


@pytest.mark.timeout(300)  # a few seconds; only making a failing history short takes minutes
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_random_histories_agree_with_the_table_of_moves(
    pair: tuple[Kind, str], fast_directory: Path
):
    """D1, L1, L5, T3: thousands of histories, on every store, sync, async and batched."""
    kind, way = pair
    histories = int(HISTORIES or kind.histories)
    print(f"LAW_SEED={SEED} LAW_HISTORIES={histories}")  # shown when it fails
    driver = DRIVERS[way](kind, fast_directory)

    @seed(zlib.crc32(f"{SEED} {kind.name} {way}".encode()))
    @settings(
        max_examples=histories,
        derandomize=False,  # else every store would get the same histories
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(RANDOM_HISTORIES)
    def agrees(steps: list[Step]) -> None:
        History(driver).run(steps)

    with closing(driver):
        agrees()


def test_every_move_of_the_table_is_part_of_the_histories():
    """D1: `claim` is made anew, all others are built from what stands."""
    assert {move.name for move in MOVES} == {"claim", *BUILDERS}
