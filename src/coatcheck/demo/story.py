"""Sends the same orders twice, first without keys, then with coatcheck. Start reading here.

    client ── bad network ──► shop ───────────────► provider ──► table of charges
              loses responses  is killed once        POST /charges
              repeats requests POST /orders

Each server is a process, and each request goes over HTTP. The result is counted from the
provider's table of charges.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from coatcheck.core.key import reference_of
from coatcheck.core.record import COMPLETED
from coatcheck.demo.client import Client, Order, Receipt, draw_orders
from coatcheck.demo.processes import Service
from coatcheck.demo.report import Display, Example, Result, Summary, summarize
from coatcheck.demo.servers import SHOP_DATABASE, Guard, charges_in, store_url
from coatcheck.stores import Query, open_store

WITHOUT, WITH = "without keys", "with coatcheck"

# 2 ms: a thirtieth of the time between charge and confirmation, so that the kill falls into it,
# even on a busy machine.
_POLL_S = 0.002
# 3 s to wait for such a moment; after that the kill comes at any time with requests in flight.
_AIM_S_MAX = 3.0


def run_story(
    *, orders: int, seed: int, directory: Path, display: Display, guard: Guard = "coatcheck"
) -> Result:
    """Send the orders twice, with all files in *directory*; *guard* protects the second half."""
    started_s = time.monotonic()
    drawn = draw_orders(orders, seed)
    display.show_introduction(orders=orders, seed=seed)
    without_directory = directory / "without-keys"
    without_directory.mkdir()
    without_keys, _ = _run_half(WITHOUT, drawn, without_directory, "none", display)
    with_coatcheck, receipts = _run_half(WITH, drawn, directory, guard, display)
    return Result(
        seed=seed,
        without_keys=without_keys,
        with_coatcheck=with_coatcheck,
        seconds=round(time.monotonic() - started_s, 2),
        directory=directory,
        example=_find_example(receipts, directory / SHOP_DATABASE),
    )


def _run_half(
    title: str, orders: list[Order], directory: Path, guard: Guard, display: Display
) -> tuple[Summary, list[Receipt]]:
    """Send all *orders* until each is confirmed."""
    started_s = time.monotonic()
    display.show_progress(title, 0, len(orders), note="starting two servers")
    with ExitStack() as stack:
        provider = stack.enter_context(Service("provider", directory, guard))
        shop = stack.enter_context(Service("shop", directory, guard, provider.port))
        client = Client(orders, lambda: shop.port, sends_keys=title == WITH)
        stack.callback(client.stop)
        client.start()
        killer = _Killer(shop, client, directory)
        while not client.wait(_POLL_S):
            display.show_progress(title, client.finished, len(orders), note=killer.note)
            killer.poll()
    seconds = time.monotonic() - started_s
    summary = summarize(client.receipts, charges_in(directory), kills=killer.kills, seconds=seconds)
    display.show_half(title, summary)
    return summary, client.receipts


class _Killer:
    """Kills the shop once, half-way, between a charge and its confirmation."""

    def __init__(self, shop: Service, client: Client, directory: Path) -> None:
        self.kills = 0
        self.note = ""
        self._shop = shop
        self._client = client
        self._directory = directory
        self._aim_until_s = 0.0

    def poll(self) -> None:
        """Kill and restart the shop if an order is charged and not confirmed."""
        if self.kills or self._client.finished < len(self._client.receipts) // 2:
            return
        self._aim_until_s = self._aim_until_s or time.monotonic() + _AIM_S_MAX
        in_flight = self._client.unanswered()
        if time.monotonic() < self._aim_until_s:
            in_flight &= {name for name, _cents in charges_in(self._directory)}
        if in_flight:
            self._shop.kill()
            self.kills += 1
            self.note = "shop killed, restarted"
            self._shop.start()


def _find_example(receipts: list[Receipt], database: Path) -> Example | None:
    """Return an order that was taken over after the kill, or the one with the most requests."""
    if not database.exists():  # a guard that does not work has no store
        return None
    by_key = {receipt.order.key: receipt for receipt in receipts}
    with closing(open_store(store_url(database))) as store:
        found = store.find(Query(state=COMPLETED, limit=len(receipts))).records
    records = [record for record in found if record.key in by_key]
    if not records:
        return None
    record = max(records, key=lambda record: (record.attempt, by_key[record.key].requests))
    reference = reference_of(record.id)
    command = [*_own_command(), "lookup", reference, "--store", store_url(database)]
    return Example(
        name=by_key[record.key].order.name,
        reference=reference,
        attempt=record.attempt,
        requests=by_key[record.key].requests,
        lookup=shlex.join(command),
    )


def _own_command() -> list[str]:
    """Return how to call this program again from the current directory."""
    if shutil.which("coatcheck") is not None:
        return ["coatcheck"]
    program = Path(sys.argv[0])
    if program.name == "coatcheck" and program.exists():
        return [os.path.relpath(program)]
    return [sys.executable, "-m", "coatcheck"]
