"""The command line: the demo, and the commands for operators.

Of the commands for operators only `migrate` creates a database, and none prints the content of a
response.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from coatcheck import __version__
from coatcheck.cli.demo import DEMO
from coatcheck.cli.maintenance import DOCTOR, MIGRATE, SWEEP
from coatcheck.cli.operations import LIST, LOOKUP
from coatcheck.cli.options import STORE_DEFAULT, STORE_VARIABLE, Parser
from coatcheck.cli.resolve import RESOLVE
from coatcheck.errors import CoatcheckError

_COMMANDS = {
    "demo": DEMO,
    "lookup": LOOKUP,
    "list": LIST,
    "resolve": RESOLVE,
    "sweep": SWEEP,
    "migrate": MIGRATE,
    "doctor": DOCTOR,
}

_INTERRUPTED = 130

_EPILOG = f"""\
the store:
  --store URL, or the environment variable {STORE_VARIABLE}, or {STORE_DEFAULT}

exit codes:
  0  success
  1  not found, not resolved, a migration is due, or the doctor or the demo found an error
  2  wrong usage, or the store cannot be opened
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = command_line()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # the message has the usage of this command
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # None: standard output is closed
            sys.stdout.flush()
    except CoatcheckError as error:
        print(f"coatcheck: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        return _output_failed(error)
    return code


def _output_failed(error: OSError) -> int:
    """Return the exit code for output that could not be written."""
    if sys.stdout is not None:  # otherwise Python reports the same error again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 1  # the reader, such as `head`, has closed the pipe
    print(f"coatcheck: {error}", file=sys.stderr)
    return 2


def command_line() -> argparse.ArgumentParser:
    """Return the parser: every command with its options, help and an example."""
    parser = Parser(
        prog="coatcheck",
        description="Idempotency keys: a retried write happens once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coatcheck {__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (run, add_options, help, example) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_options(command)
    return parser
