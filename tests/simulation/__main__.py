"""`make simulate`: as many schedules as you like, or one of them with everything that happened."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

from .runs import explained, run_on_all_processors
from .schedule import KINDS
from .world import Violation


def main() -> int:
    """Run what the command line says; 1: a promise is broken."""
    asked = _asked()
    if asked.seed is not None:
        text, is_kept = explained(asked.seed, asked.kind)
        print(text)
        return 0 if is_kept else 1
    first = secrets.randbelow(10**9) if asked.first is None else asked.first
    print(f"{asked.schedules:,} schedules, from seed {first} on", flush=True)
    began_s = time.monotonic()
    schedules = steps = 0
    counts: Counter[str] = Counter()
    try:
        for chunk in run_on_all_processors(first, asked.schedules, asked.kind):
            schedules += chunk.schedules
            steps += chunk.steps
            counts += chunk.counts
    except Violation as violation:
        text, _ = explained(violation.seed, violation.kind)
        print(text)
        return 1
    for what, count in counts.most_common():
        print(f"{count:14,}  {what}")
    took_s = time.monotonic() - began_s
    print(f"{schedules:,} schedules of {steps:,} steps in {took_s:.0f} s: every promise is kept")
    return 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000, help="how many (100 000)")
    parser.add_argument("--first", type=int, help="the first seed (by chance, and printed)")
    parser.add_argument("--seed", type=int, help="only this one, with everything that happened")
    parser.add_argument("--kind", choices=KINDS, help="only routes of this kind")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
