"""`coatcheck sweep`, `migrate` and `doctor`: maintenance of a store."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from coatcheck.cli.options import Command, add_store
from coatcheck.cli.printing import print_json
from coatcheck.stores import migrate_store, open_store


def _sweep(arguments: argparse.Namespace) -> int:
    from coatcheck.engine.sweeper import sweep_all  # noqa: PLC0415 - only for this command

    swept = 0
    with closing(open_store(arguments.store, create=False)) as store:
        now_ms = store.now_ms()  # read once, so that the sweep ends while servers write
        for batch in sweep_all(store, now_ms):
            swept += batch
            if batch and sys.stderr.isatty():
                print(f"\rswept {swept:,} …", end="", file=sys.stderr, flush=True)
    if swept and sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if arguments.json:
        print_json({"swept": swept})
    else:
        print(f"swept {swept:,} record{'' if swept == 1 else 's'}")
    return 0


def _add_migrate_options(command: argparse.ArgumentParser) -> None:
    either = command.add_mutually_exclusive_group()
    add_store(either)
    either.add_argument("url", metavar="STORE_URL", nargs="?", help="the same as --store URL")
    command.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if a migration is due"
    )


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
    "delete expired records, as servers do in the background",
    "coatcheck sweep --store sqlite:///orders.db",
)
MIGRATE = Command(
    _migrate,
    _add_migrate_options,
    "create the tables of a store, or upgrade them to this release",
    "coatcheck migrate postgresql://shop@localhost/shop",
)
DOCTOR = Command(
    _doctor,
    add_store,
    "check that a store is reachable, complete and durable",
    "coatcheck doctor --store sqlite:///orders.db",
)
