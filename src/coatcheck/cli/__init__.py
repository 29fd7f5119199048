"""The command line: the demo, and what operators ask a store.

Exit codes: 0 yes; 1 no: not found, an error diagnosed, a promise broken; 2 the question was wrong:
usage, or a store that cannot be opened. No operators' command but `migrate` creates a database, and
none prints what a response contains.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from coatcheck import __version__
from coatcheck.cli.demo import DEMO
from coatcheck.cli.finding import LIST, LOOKUP
from coatcheck.cli.options import STORE_DEFAULT, STORE_VARIABLE, Parser
from coatcheck.cli.resolving import RESOLVE
from coatcheck.cli.upkeep import DOCTOR, MIGRATE, SWEEP
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a narrow encoding shall not end in a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = command_line()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # told with the usage of the command that was meant
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # else nobody wants to read it
            sys.stdout.flush()
    except CoatcheckError as error:
        print(f"coatcheck: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        return _unwritten(error)
    return code


def _unwritten(error: OSError) -> int:
    """The exit code where our output goes nowhere, or not all of it."""
    if sys.stdout is not None:  # Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 1  # whoever read it has seen enough
    print(f"coatcheck: {error}", file=sys.stderr)
    return 2


def command_line() -> argparse.ArgumentParser:
    """Every command with its options, help and an example."""
    parser = Parser(
        prog="coatcheck",
        description="Make any write safe to retry: idempotency keys done right.",
        epilog=f"Stores are URLs, by default ${STORE_VARIABLE} or {STORE_DEFAULT}. "
        "Exit codes: 0 yes; 1 no: not found, an error diagnosed, a promise broken; 2 the question "
        "was wrong, or the store cannot be opened.",
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
        command.add_argument("--json", action="store_true", help="answer in JSON")
        add_options(command)
    return parser
