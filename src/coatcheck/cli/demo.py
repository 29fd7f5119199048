"""`coatcheck demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from coatcheck.cli.options import Command, whole_number

# 200 orders take about ten seconds.
DEMO_ORDERS = 200
DEMO_ORDERS_MAX = 10_000
DEMO_SEED = 7
DEMO_SEED_MAX = 2**63 - 1


def _add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    number = whole_number(1, DEMO_ORDERS_MAX)
    add(
        "--orders",
        metavar="N",
        type=number,
        default=DEMO_ORDERS,
        help="number of orders (default: %(default)s)",
    )
    seed = whole_number(0, DEMO_SEED_MAX)
    add(
        "--seed",
        metavar="S",
        type=seed,
        default=DEMO_SEED,
        help="seed for the network errors (default: %(default)s)",
    )
    where = "keep databases and logs in this empty directory (default: remove them at the end)"
    add("--keep", metavar="DIR", type=Path, help=where)


def _run(arguments: argparse.Namespace) -> int:
    from coatcheck.demo.command import run  # noqa: PLC0415 - imports servers

    return run(
        orders=arguments.orders, seed=arguments.seed, keep=arguments.keep, as_json=arguments.json
    )


DEMO = Command(
    _run,
    _add_options,
    "run a shop on a bad network, without and with coatcheck",
    "coatcheck demo --orders 500 --seed 42",
)
