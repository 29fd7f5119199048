"""`coatcheck sweep`, `migrate` and `doctor`: the upkeep of a store."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from coatcheck.cli.options import Command, add_store
from coatcheck.cli.printing import print_json
from coatcheck.stores import migrate_store, open_store


def _sweep(arguments: argparse.Namespace) -> int:
    from coatcheck.engine.sweeping import sweep_all  # noqa: PLC0415 - no other command needs it

    taken = 0
    with closing(open_store(arguments.store, create=False)) as store:
        now_ms = store.now_ms()  # once, so that there is an end while servers write
        for batch in sweep_all(store, now_ms):
            taken += batch
            if batch and sys.stderr.isatty():
                print(f"\rswept {taken:,} …", end="", file=sys.stderr, flush=True)
    if taken and sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if arguments.json:
        print_json({"swept": taken})
    else:
        print(f"swept {taken:,} record{'' if taken == 1 else 's'}")
    return 0


def _add_migrate_options(command: argparse.ArgumentParser) -> None:
    either = command.add_mutually_exclusive_group()
    add_store(either)
    either.add_argument("url", metavar="STORE_URL", nargs="?", help="the same as --store URL")
    command.add_argument("--check", action="store_true", help="only tell; 1: it is to be done")


def _migrate(arguments: argparse.Namespace) -> int:
    migration = migrate_store(arguments.url or arguments.store, only_look=arguments.check)
    if arguments.json:
        print_json(migration._asdict())
    else:
        print(migration.sentence)
    return 1 if migration.is_due else 0


def _doctor(arguments: argparse.Namespace) -> int:
    with closing(open_store(arguments.store, create=False)) as store:
        findings = store.check()
    if arguments.json:
        print_json([finding._asdict() for finding in findings])
    else:
        for level, message in findings:
            print(f"{level:<7}  {message}")
    return 1 if any(finding.level == "error" for finding in findings) else 0


SWEEP = Command(
    _sweep,
    add_store,
    "delete what retention allows, as servers also do by themselves",
    "coatcheck sweep --store sqlite:///orders.db",
)
MIGRATE = Command(
    _migrate,
    _add_migrate_options,
    "make what a store needs, or bring it up to date",
    "coatcheck migrate postgresql://shop@localhost/shop",
)
DOCTOR = Command(
    _doctor,
    add_store,
    "examine a store: can it be reached, is it whole, could it forget",
    "coatcheck doctor --store sqlite:///orders.db",
)
