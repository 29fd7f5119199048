"""An application of each task queue, imported by the workers that the tests start and kill.

The environment says where everything is: QUEUE_URL (the broker), STORE_URL and DIRECTORY, in which
the tasks leave a line for each effect.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from coatcheck import Policy
from coatcheck.consumer import Inbox

URL = os.environ["QUEUE_URL"]
DIRECTORY = Path(os.environ["DIRECTORY"])
inbox = Inbox(os.environ["STORE_URL"], consumer="billing")
# A short lease: a killed worker's task is taken over soon.
QUICK = Policy(lease="1s", in_flight="409", wait=0)


def effects() -> list[str]:
    """A line for each effect."""
    path = DIRECTORY / "effects"
    return path.read_text().splitlines() if path.exists() else []


def charged(order: str) -> str:
    """Charge once; the first attempt at an order called "stuck…" hangs until it is killed."""
    if order.startswith("stuck") and not (DIRECTORY / order).exists():
        (DIRECTORY / order).write_text("started")
        threading.Event().wait()
    if order.startswith("fails") and not (DIRECTORY / order).exists():
        (DIRECTORY / order).write_text("failed")
        raise ValueError(order)
    with (DIRECTORY / "effects").open("a") as file:
        file.write(f"{order}\n")
    return f"charged {order}"
