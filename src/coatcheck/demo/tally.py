"""The tally: what happened in one half, counted from the ledger and the receipts.

The ledger says what was charged, the receipts say what the client was told; a promise that holds
needs both to agree about every order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coatcheck.demo.client import Receipt

# 3 names are enough to begin looking.
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One column of the table."""

    orders: int
    requests: int
    answers_lost: int
    repeated: int
    kills: int
    charges: int
    double_charged: int
    overcharged_cents: int
    seconds: float
    broken: tuple[str, ...]  # the promises that did not hold, as sentences


def count(
    receipts: Sequence[Receipt], charges: Sequence[tuple[str, int]], *, kills: int, seconds: float
) -> Tally:
    """Compare what was charged with what was ordered."""
    times = Counter(name for name, _cents in charges)
    ordered_cents = {receipt.order.name: receipt.order.cents for receipt in receipts}
    charged_cents = dict.fromkeys(ordered_cents, 0)
    for name, cents in charges:
        charged_cents[name] = charged_cents.get(name, 0) + cents
    over = {n: charged_cents[n] - ordered_cents.get(n, 0) for n in charged_cents}
    return Tally(
        orders=len(receipts),
        requests=sum(receipt.requests for receipt in receipts),
        answers_lost=sum(receipt.answers_lost for receipt in receipts),
        repeated=sum(receipt.order.is_repeated for receipt in receipts),
        kills=kills,
        charges=len(charges),
        double_charged=sum(number > 1 for number in times.values()),
        overcharged_cents=sum(cents for cents in over.values() if cents > 0),
        seconds=round(seconds, 2),
        broken=tuple(_broken(receipts, times, over)),
    )


def _broken(receipts: Sequence[Receipt], times: Counter[str], over: dict[str, int]) -> list[str]:
    """Every way in which "each order is charged once and confirmed once" is not true."""
    names = [receipt.order.name for receipt in receipts]
    faults = {
        "charged more than once": [name for name in names if times[name] > 1],
        "never charged": [name for name in names if not times[name]],
        "charged a wrong amount": [n for n in names if times[n] == 1 and over[n]],
        "charged but never ordered": sorted(set(times) - set(names)),
        "never confirmed": [r.order.name for r in receipts if not r.is_confirmed],
        "confirmed with several numbers": [r.order.name for r in receipts if len(r.numbers) > 1],
    }
    return [_sentence(fault, named) for fault, named in faults.items() if named]


def _sentence(fault: str, names: list[str]) -> str:
    more = " and more" if len(names) > _NAMED_MAX else ""
    noun = "order was" if len(names) == 1 else "orders were"
    return f"{len(names)} {noun} {fault} ({', '.join(names[:_NAMED_MAX])}{more})"
