"""The shop as an application for real servers; its effects are on disk.

Everything that a test wants to see from outside is a file in the directory: `orders.db` is the
store, `effects` has a line for each execution, and `/slow` waits for `release-<key>` to appear.
"""

from __future__ import annotations

import json
import os
import time
from hashlib import sha256
from pathlib import Path

from tests.support.times import WAIT_S_MAX

from .shop import JSON, Call, Said, Shop, says

DIRECTORY = Path(os.environ.get("SHOP_DIRECTORY", ""))
STORE = f"sqlite:///{DIRECTORY}/orders.db"
SAFE = ("GET", "HEAD")


class ShopOnDisk(Shop):
    """Writes each effect down before anything else happens."""

    def handle(self, call: Call) -> Said:
        if call.method not in SAFE:
            key = call.operation.key if call.operation else "-"
            # One small append is one write: whole lines, also from several processes.
            with (DIRECTORY / "effects").open("a") as effects:
                effects.write(f"{call.path} {key} {os.getpid()}\n")
        return super().handle(call)


def order(call: Call) -> Said:
    answer = {"pid": os.getpid(), "at_ns": time.time_ns(), "sha256": sha256(call.body).hexdigest()}
    return Said(
        201, (JSON, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")), [json.dumps(answer).encode()]
    )


def slow(call: Call) -> Said:
    """Waits until the test says so: across processes, by a file."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not (DIRECTORY / f"release-{call.operation.key}").exists():
        assert time.monotonic() < deadline, "no test released this"
        time.sleep(0.005)
    return order(call)


shop = ShopOnDisk()
shop.answers |= {
    "/orders": order,
    "/slow": slow,
    "/nothing": says(204),
    "/pid": lambda _call: Said(200, (JSON,), [str(os.getpid()).encode()]),
}
