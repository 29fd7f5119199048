"""`manage.py coatcheck …`: the commands for operators, on the store of the project."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coatcheck.errors import CoatcheckError
from coatcheck.server.django.settings import read_settings


class Command(BaseCommand):
    """Shows, resolves and cleans up idempotent operations."""

    help = "Show, resolve and clean up idempotent operations; `manage.py coatcheck -- --help`."
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django declares it

    def add_arguments(self, parser: CommandParser) -> None:
        """Take everything as it is: the command itself parses it."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command and options")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command of the command line, whose options are not Django's."""
        try:
            code = self._run(argv[2:])
        except CommandError as error:
            self.stderr.write(f"{error}")
            code = 2
        sys.exit(code)

    def handle(self, *_: object, **options: Any) -> None:
        """Run a command for `call_command`."""
        code = self._run(options["arguments"])
        if code:
            raise CommandError(f"coatcheck ended with code {code}", returncode=code)

    def _run(self, arguments: list[str]) -> int:
        if find_spec("click") is None or find_spec("rich") is None:
            raise CommandError("the commands need click and rich: pip install 'coatcheck[cli]'")
        from coatcheck.cli import main  # noqa: PLC0415 - needs click

        try:
            configuration = read_settings()
        except CoatcheckError as error:
            raise CommandError(str(error)) from error
        if not isinstance(configuration.store, str):
            raise CommandError("the store of this project is in the memory of its processes")
        secret = configuration.engine.get("secret", "")
        defaults = {
            "url": configuration.store,
            "secret": secret.decode() if isinstance(secret, bytes) else secret,
        }
        arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
        return main(arguments, program="manage.py coatcheck", defaults=defaults)
