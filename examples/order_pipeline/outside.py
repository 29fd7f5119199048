"""The bank and the warehouse, as providers with idempotency keys: one key has one effect."""

import time

from examples.order_pipeline.settings import OUTSIDE, PRICE, REFUSED_EVERY, execute

# How long a provider takes before and after its effect: a worker may be killed in between.
LATENCY_S = 0.03


def act(key: str, what: str, number: int, amount: int = 0) -> None:
    execute(OUTSIDE, "insert into calls values (?)", key)
    time.sleep(LATENCY_S)
    row = (key, what, number, amount)
    execute(OUTSIDE, "insert or ignore into effects values (?, ?, ?, ?)", *row)
    time.sleep(LATENCY_S)


def charge(number: int, *, key: str) -> None:
    act(key, "charged", number, PRICE)


def refund(number: int, *, key: str) -> None:
    act(key, "refunded", number, -PRICE)


def ship(number: int, *, key: str) -> None:
    if number % REFUSED_EVERY == 0:
        raise ValueError(f"order {number} is out of stock")
    act(key, "shipped", number)
