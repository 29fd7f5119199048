"""The story: the same orders twice, first without keys, then with coatcheck. Start reading here.

    client ──a bad network──► shop ──────────────► provider ──► ledger
              answers lost     killed once          POST /charges
              requests twice   POST /orders

Every server is a process of its own and every request goes over HTTP. What the demo claims in the
end is counted from the provider's ledger, and it says so when the promise did not hold.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from coatcheck.core.key import reference_of
from coatcheck.core.record import COMPLETED, Record
from coatcheck.demo import shop as shop_module
from coatcheck.demo.client import Client, Receipt
from coatcheck.demo.display import Display
from coatcheck.demo.fates import Order, draw
from coatcheck.demo.processes import Service
from coatcheck.demo.provider import charges_in
from coatcheck.demo.serving import store_url
from coatcheck.demo.tally import Tally, count
from coatcheck.stores import Query, open_store

Guard: TypeAlias = Literal["coatcheck", "none", "forgetful"]

WITHOUT, WITH = "without keys", "with coatcheck"

# 2 ms between two looks: a tenth of the moment between charge and confirmation, so that the kill
# falls into one.
_LOOK_S = 0.002
# 3 s to find such a moment; after that any will do, as long as there is work on its way.
_AIM_S_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One order worth looking at, and how."""

    name: str
    reference: str
    attempt: int
    requests: int
    lookup: str  # the command


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Both halves, and what can be looked at afterwards."""

    seed: int
    without_keys: Tally
    with_coatcheck: Tally
    seconds: float
    directory: Path
    witness: Witness | None

    @property
    def promise_held(self) -> bool:
        """With coatcheck every order was charged once, and confirmed with one number."""
        return not self.with_coatcheck.broken


def tell(
    *, orders: int, seed: int, directory: Path, display: Display, guard: Guard = "coatcheck"
) -> Outcome:
    """
    Tell the whole story, with its files in *directory*.

    *guard* is for proving that the demo can fail: what stands before the servers in the second
    half.
    """
    started_s = time.monotonic()
    drawn = draw(orders, seed)
    display.open(orders=orders, seed=seed)
    unguarded = directory / "without-keys"
    unguarded.mkdir()
    without_keys, _ = _half(WITHOUT, drawn, unguarded, "none", display)
    with_coatcheck, receipts = _half(WITH, drawn, directory, guard, display)
    return Outcome(
        seed=seed,
        without_keys=without_keys,
        with_coatcheck=with_coatcheck,
        seconds=round(time.monotonic() - started_s, 2),
        directory=directory,
        witness=_witness(receipts, directory / shop_module.DATABASE),
    )


def _half(
    title: str, orders: list[Order], directory: Path, guard: Guard, display: Display
) -> tuple[Tally, list[Receipt]]:
    """Send all *orders* once over; what happened, and what the client saw."""
    started_s = time.monotonic()
    display.progress(title, 0, len(orders), note="starting two servers")
    with ExitStack() as stack:
        provider = stack.enter_context(Service("provider", directory, guard))
        shop = stack.enter_context(Service("shop", directory, guard, provider.port))
        client = Client(orders, lambda: shop.port, sends_keys=title == WITH)
        stack.callback(client.stop)
        client.start()
        killer = _Killer(shop, client, directory)
        while not client.wait(_LOOK_S):
            display.progress(title, client.finished, len(orders), note=killer.note)
            killer.look()
        kills = killer.kills
    seconds = time.monotonic() - started_s
    tally = count(client.receipts, charges_in(directory), kills=kills, seconds=seconds)
    display.finish(title, tally)
    return tally, client.receipts


class _Killer:
    """Kills the shop once, half-way, between a charge and its confirmation."""

    def __init__(self, shop: Service, client: Client, directory: Path) -> None:
        self.kills = 0
        self.note = ""
        self._shop = shop
        self._client = client
        self._directory = directory
        self._aims_until_s = 0.0

    def look(self) -> None:
        """Strike if this is the moment, and start the shop again."""
        if self.kills or self._client.finished < len(self._client.receipts) // 2:
            return
        self._aims_until_s = self._aims_until_s or time.monotonic() + _AIM_S_MAX
        hit = self._client.unanswered()
        if time.monotonic() < self._aims_until_s:
            hit &= {name for name, _cents in charges_in(self._directory)}
        if hit:
            self._shop.kill()
            self.kills += 1
            self.note = "shop killed, restarted"
            self._shop.start()


def _witness(receipts: list[Receipt], database: Path) -> Witness | None:
    """An order that was taken over from the killed shop, else the one that was tried most."""
    if not database.exists():
        return None
    by_key = {receipt.order.key: receipt for receipt in receipts}
    records = [record for record in _completed(database) if record.key in by_key]
    if not records:
        return None
    record = max(records, key=lambda record: (record.attempt, by_key[record.key].requests))
    reference = reference_of(record.id)
    command = [*_ourselves(), "lookup", reference, "--store", store_url(database)]
    return Witness(
        name=by_key[record.key].order.name,
        reference=reference,
        attempt=record.attempt,
        requests=by_key[record.key].requests,
        lookup=shlex.join(command),
    )


def _ourselves() -> list[str]:
    """How to call us again from where we were called."""
    if shutil.which("coatcheck") is not None:
        return ["coatcheck"]
    called = Path(sys.argv[0])
    if called.name == "coatcheck" and called.exists():
        return [os.path.relpath(called)]
    return [sys.executable, "-m", "coatcheck"]


def _completed(database: Path) -> list[Record]:
    store = open_store(store_url(database))
    try:
        found: list[Record] = []
        after_id: bytes | None = b""
        while after_id is not None:
            records, after_id = store.find(Query(state=COMPLETED, after_id=after_id))
            found += records
        return found
    finally:
        store.close()
