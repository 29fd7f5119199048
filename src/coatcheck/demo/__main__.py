"""`python -m coatcheck.demo`, and `coatcheck demo`: needs nothing but the standard library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coatcheck.errors import CoatcheckError

# 200 orders take about ten seconds.
DEMO_ORDERS = 200
DEMO_ORDERS_MAX = 10_000
DEMO_SEED = 7
DEMO_SEED_MAX = 2**63 - 1

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = demo_options().parse_args(argv)
    from coatcheck.demo.command import run  # noqa: PLC0415 - imports servers

    try:
        return run(
            orders=options.orders, seed=options.seed, keep=options.keep, as_json=options.json
        )
    except CoatcheckError as error:
        sys.stderr.write(f"coatcheck: {error}\n")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def demo_options() -> argparse.ArgumentParser:
    """Return the parser of the demo's options."""
    parser = argparse.ArgumentParser(
        prog="coatcheck demo",
        description="Run a shop on a bad network, without and with coatcheck.",
        epilog="example:\n  coatcheck demo --orders 500 --seed 42",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    number, seed = _whole_number(1, DEMO_ORDERS_MAX), _whole_number(0, DEMO_SEED_MAX)
    many = f"number of orders (default: {DEMO_ORDERS})"
    add("--orders", metavar="N", type=number, default=DEMO_ORDERS, help=many)
    errors = f"seed for the network errors (default: {DEMO_SEED})"
    add("--seed", metavar="S", type=seed, default=DEMO_SEED, help=errors)
    where = "keep databases and logs in this empty directory (default: remove them at the end)"
    add("--keep", metavar="DIR", type=Path, help=where)
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not smallest <= value <= largest:
            message = f"{text!r} is not a whole number from {smallest} to {largest:,}"
            raise argparse.ArgumentTypeError(message)
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
