"""The command line: the demo, and the commands for operators.

Of the commands for operators only `migrate` creates a database, and none prints the content of a
stored response.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence

import click

from coatcheck import __version__
from coatcheck.cli.client import outbox, plan_command
from coatcheck.cli.maintenance import doctor, erase, migrate, stats, sweep
from coatcheck.cli.operations import list_, lookup
from coatcheck.cli.options import STORE_DEFAULT, STORE_VARIABLE
from coatcheck.cli.printing import print_error
from coatcheck.cli.resolve import resolve as resolve_command  # not over the name of its module
from coatcheck.cli.sagas import sagas as sagas_command
from coatcheck.errors import CoatcheckError
from coatcheck.stores.url import shown

_INTERRUPTED = 130

_EPILOG = f"""\b
the store:
  --store URL, or the environment variable {STORE_VARIABLE},
  or {STORE_DEFAULT}

\b
exit codes:
  0  success
  1  not found, not resolved, something was listed with --fail-if-any,
     a migration is due, the window is too short for the plan,
     or the doctor or the demo found an error
  2  wrong usage, or the store cannot be opened

\b
completion of commands and options, in bash (also zsh and fish):
  eval "$(_COATCHECK_COMPLETE=bash_source coatcheck)"
"""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their definition, not of the alphabet."""
        del ctx
        return list(self.commands)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="coatcheck %(version)s")
@click.pass_context
def commands(context: click.Context) -> int:
    """Idempotency keys: a retried write happens once."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        return 2
    return 0


@commands.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> int:
    """Run a shop on a bad network, without and with coatcheck."""
    from coatcheck.demo.__main__ import main as run  # noqa: PLC0415 - only for this command

    return run(options)


_OPERATIONS = (lookup, list_, resolve_command, erase)
_MAINTENANCE = (stats, sweep, migrate, doctor)
for _command in (*_OPERATIONS, *_MAINTENANCE, plan_command, outbox, sagas_command):
    commands.add_command(_command)


def main(
    argv: Sequence[str] | None = None,
    *,
    program: str = "coatcheck",
    defaults: Mapping[str, str] | None = None,
) -> int:
    """
    Run one command and return its exit code.

    *defaults*: of the options of all commands, such as `{"url": "sqlite:///orders.db"}`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code: int = commands.main(
            arguments,
            prog_name=program,
            standalone_mode=False,
            default_map=dict.fromkeys(commands.commands, defaults or {}),
        )
        if sys.stdout is not None:  # None: standard output is closed
            sys.stdout.flush()
    except click.ClickException as error:
        print_error(_message_of(error))
        return 2
    except CoatcheckError as error:
        print_error(error)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except OSError as error:
        return _output_failed(error)
    return code


def _message_of(error: click.ClickException) -> str:
    """Return the message for wrong usage, without passwords, and where the help is."""
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        message += f" (see {context.command_path} --help)"
    return _url.sub(lambda found: shown(found[0]), " ".join(message.split()))


_url = re.compile(r"\w[\w+.-]*://[^\s']*(?:'[^\s']+)*")


def _output_failed(error: OSError) -> int:
    """Return the exit code for output that could not be written."""
    if sys.stdout is not None:  # otherwise Python reports the same error again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 1  # the reader, such as `head`, has closed the pipe
    print_error(error)
    return 2
