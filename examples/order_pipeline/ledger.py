"""The ledger: what has happened, read from the databases after everything has stopped."""

from collections import Counter

from examples.order_pipeline.settings import (
    OUTSIDE,
    PRICE,
    REFUSED_EVERY,
    SHOP,
    WORKER,
    execute,
)


def numbers(rows: list[tuple]) -> Counter:
    """How often each order is among *rows*."""
    return Counter(number for (number,) in rows)


def effects(what: str) -> Counter:
    return numbers(execute(OUTSIDE, "select number from effects where what = ?", what))


def handled(outcome: str = "%") -> Counter:
    return numbers(execute(WORKER, "select number from handled where outcome like ?", outcome))


def write_ledger(orders: int) -> bool:
    """Print the ledger; False if it does not add up, order by order."""
    every = range(1, orders + 1)
    refused = [number for number in every if number % REFUSED_EVERY == 0]
    good = [number for number in every if number % REFUSED_EVERY]
    expected = {
        "orders placed": (numbers(execute(SHOP, "select number from orders")), every),
        "events handled": (handled(), every),
        "  of them shipped": (handled("shipped"), good),
        "  of them undone": (handled("undone"), refused),
        "charged": (effects("charged"), every),
        "refunded": (effects("refunded"), refused),
        "shipped": (effects("shipped"), good),
    }
    for name, (found, _) in expected.items():
        print(f"{name:20}{found.total():5}")
    ((money,),) = execute(OUTSIDE, "select coalesce(sum(amount), 0) from effects")
    ((calls,),) = execute(OUTSIDE, "select count(*) from calls")
    print(f"{'money received':20}{money:5} = {len(good)} x {PRICE}")
    print(f"{'calls outside':20}{calls:5}")
    adds_up = money == len(good) * PRICE
    return adds_up and all(found == Counter(wanted) for found, wanted in expected.values())
