"""Fates: what each order is, and what the network will do to it. Drawn from the seed alone.

Both halves of the demo send the same orders to the same fates, so that the only difference
between them is the key.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

# A third: far worse than any network one would keep, so that a few hundred orders show it all.
LOSS_SHARE = 1 / 3
# 6 answers of one order at most, so that the unluckiest of thousands has an end, too.
LOSSES_MAX = 6
# One in eight is sent twice at the same instant, as impatient fingers and eager proxies do.
REPEAT_SHARE = 1 / 8

CENTS_MIN, CENTS_MAX = 5_00, 200_00


@dataclass(frozen=True, slots=True)
class Order:
    """One order, and the answers to it that will not arrive."""

    name: str
    cents: int
    key: str  # made once, before the first attempt; sent in the second half only
    losses: tuple[bool, ...]  # for the first, second … answer: whether it is lost
    is_repeated: bool  # its first request is sent twice at the same instant


def draw(count: int, seed: int) -> list[Order]:
    """*count* orders; the same ones for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    return [_draw_one(number, chance) for number in range(1, count + 1)]


def _draw_one(number: int, chance: random.Random) -> Order:
    return Order(
        name=f"order-{number:04}",
        cents=chance.randint(CENTS_MIN, CENTS_MAX),
        key=str(uuid.UUID(int=chance.getrandbits(128), version=4)),
        losses=tuple(chance.random() < LOSS_SHARE for _ in range(LOSSES_MAX)),
        is_repeated=chance.random() < REPEAT_SHARE,
    )
