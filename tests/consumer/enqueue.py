"""Enqueue tasks: python -m tests.consumer.enqueue QUEUE ORDER …; see `task_apps.py`."""

from __future__ import annotations

import sys
from importlib import import_module


def main(queue: str, *orders: str) -> None:
    module = import_module(f"tests.consumer.{queue}_app")
    if queue == "procrastinate":
        with module.app.open():
            for order in orders:
                module.charge.defer(order=order)
        return
    send = module.charge.send if queue == "dramatiq" else module.charge.delay
    for order in orders:
        send(order)


if __name__ == "__main__":
    main(*sys.argv[1:])
