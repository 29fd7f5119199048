"""Every command: its help, its errors, its output on a terminal and in a pipe."""

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import coatcheck
from coatcheck.cli import commands, main
from coatcheck.core.record import FAILED, IN_DOUBT

COMMANDS = (
    "demo",
    "lookup",
    "list",
    "resolve",
    "erase",
    "stats",
    "sweep",
    "migrate",
    "doctor",
    "plan",
)
# Commands with commands of their own.
GROUPS = ("outbox", "sagas")
BY_ADA = ("--by", "ada", "--why", "asked the bank")
URL = "postgresql://shop:hunt@er's@db/shop"


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30, **options
    )


# -------------------------------------------------------------------------------------- terminal


def on_a_terminal(words, *, typed="", **variables) -> tuple[int, str]:
    """Run a command on a terminal of 80 columns; return its exit code and what is shown."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    process = subprocess.Popen(
        [sys.executable, "-m", "coatcheck", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    try:
        while chunk := os.read(master, 65_536):
            shown += chunk
    except OSError:  # Linux reports the end of the other side as an error
        pass
    os.close(master)
    return process.wait(20), shown.decode()


def test_a_terminal_gets_colours_unless_it_does_not_want_them(records):
    """O1: a pipe never does."""
    reference = records.put(1, state=IN_DOUBT)
    words = ("list", "--store", records.url)
    code, shown = on_a_terminal(words, NO_COLOR=None)
    assert (code, reference in shown, "\x1b[1;31min doubt" in shown) == (0, True, True)
    plain = on_a_terminal(words, NO_COLOR="1")[1]
    assert "in doubt" in plain
    assert "\x1b[1;31m" not in plain
    piped = run("-m", "coatcheck", *words).stdout
    assert (reference in piped, "\x1b" in piped) == (True, False)


def test_a_pipe_gets_whole_lines_and_a_terminal_folds_them(records):
    """O1."""
    label = "POST /" + "long/" * 30
    records.put(1, label=label)
    words = ("list", "--store", records.url)
    piped = run("-m", "coatcheck", *words).stdout
    assert piped.splitlines()[1].endswith(label)
    shown = on_a_terminal(words, NO_COLOR="1")[1]
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    assert label.replace(" ", "") in "".join("".join(line.split()) for line in lines)[-400:]


@pytest.mark.parametrize(("typed", "code", "state"), [("y\n", 0, FAILED), ("n\n", 1, IN_DOUBT)])
def test_a_terminal_is_asked_before_a_decision_is_written(records, typed, code, state):
    """L6, O1: with what retries will get."""
    reference = records.put(1, state=IN_DOUBT)
    words = ("resolve", reference, "--failed", *BY_ADA, "--store", records.url)
    ended, shown = on_a_terminal(words, typed=typed)
    assert (ended, records.only().state) == (code, state)
    assert f"{reference} (POST /orders): the next retry executes it. Resolve it? [y/N]" in shown


@pytest.mark.parametrize(("typed", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_a_terminal_is_asked_before_a_caller_is_erased(records, typed, code, left):
    """R3."""
    records.put(1)
    words = ("erase", "--caller", "5c0be5c0be5c0be0", "--store", records.url)
    ended, shown = on_a_terminal(words, typed=typed)
    assert (ended, len(records.all())) == (code, left)
    assert "Delete 1 record of this caller from" in shown


def test_a_sweep_on_a_terminal_shows_its_progress(records):
    """O1, T3."""
    records.put(1, expires_ms=records.now_ms - 1)
    code, shown = on_a_terminal(("sweep", "--store", records.url))
    assert (code, "swept 1 …" in shown, "swept 1 record" in shown) == (0, True, True)


# -------------------------------------------------------------------------------------- the help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_an_example_and_json(command, capsys):
    """O1."""
    with suppress(SystemExit):  # the demo has its own parser
        assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"example:\n *coatcheck {command}", shown)
    assert "--json" in shown


def test_without_a_command_the_help_is_printed(capsys):
    """O1."""
    assert tuple(commands.commands) == (*COMMANDS, *GROUPS)
    assert main([]) == 2
    err = capsys.readouterr().err
    assert all(f"\n  {command} " in err for command in COMMANDS)
    assert "exit codes:" in err
    assert err.count("...") == 1  # of "[ARGS]...": no summary is cut off


def test_a_mistake_is_one_sentence_that_names_the_right_word(capsys):
    """O1."""
    assert main(["lok"]) == 2
    said = "coatcheck: No such command 'lok'. Did you mean 'lookup'? (see coatcheck --help)\n"
    assert capsys.readouterr().err == said
    assert main(["list", "--state", "lost"]) == 2
    assert capsys.readouterr().err.endswith(" (see coatcheck list --help)\n")


def test_help_loads_no_servers_and_no_demo():
    """O1: it comes at once."""
    script = "import sys, coatcheck.cli as c; c.main(['--help']); print(*sys.modules, sep='\\n')"
    loaded = run("-c", script).stdout.splitlines()
    assert "coatcheck.cli" in loaded
    assert not [name for name in loaded if name.startswith(("coatcheck.demo", "coatcheck.server"))]


def test_the_module_is_the_command():
    done = run("-m", "coatcheck", "--version")
    assert (done.returncode, done.stdout) == (0, f"coatcheck {coatcheck.__version__}\n")


def test_a_shell_gets_its_completion():
    """O1."""
    done = run("-m", "coatcheck", env={**os.environ, "_COATCHECK_COMPLETE": "zsh_source"})
    assert "compdef _coatcheck_completion coatcheck" in done.stdout


# -------------------------------------------------------------------------------- the bare install

BARE = """
import sys
sys.modules["{missing}"] = None
sys.argv = ["coatcheck", {words}]
from coatcheck.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_bare_install_has_the_demo_and_names_what_is_missing(missing):
    """O1: the library itself needs no third-party package."""
    done = run("-c", BARE.format(missing=missing, words="'list'"))
    needs = (
        "coatcheck: only the command demo runs without click and rich; "
        "for the others: pip install 'coatcheck[cli]'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", needs)
    done = run("-c", BARE.format(missing=missing, words="'demo', '--help'"))
    assert (done.returncode, "usage: coatcheck demo" in done.stdout) == (0, True)


def test_the_demo_is_a_module_of_its_own():
    assert "usage: coatcheck demo" in run("-m", "coatcheck.demo", "--help").stdout


# ------------------------------------------------------------------------------------ wrong usage

OF_STORES = [
    ["lookup", "x"],
    ["list"],
    ["resolve", "x", "--failed", *BY_ADA],
    ["erase", "--caller", "x"],
    ["stats"],
    ["sweep"],
    ["doctor"],
]


@pytest.mark.parametrize("command", OF_STORES, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:///no/such/place.db", "/no/such/place.db"),
        ("sqlite:///absent.db", "/absent.db"),
        ("sqlite://", "names no file"),
        ("mongodb://here", "no store is known"),
        ("absent.db", "no store is known"),
        ("http://[", "is not a URL"),
        ("memory://", "memory:// ends with its process"),
    ],
)
def test_a_wrong_store_url_is_one_line_of_error(
    command, url, message, tmp_path, monkeypatch, *, capsys
):
    """O1: and nothing is created."""
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--store", url]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), message in err) == ("", 1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_our_tables_is_not_changed(tmp_path, capsys):
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table theirs (x)")
    connection.close()
    before = path.read_bytes()
    assert main(["list", "--store", f"sqlite:///{path}"]) == 2
    assert "coatcheck_records is missing; run" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_one_line_of_error(tmp_path, capsys):
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam, this is not a database. " * 50)
    assert main(["doctor", "--store", f"sqlite:///{path}"]) == 2
    err = capsys.readouterr().err
    assert ("not an SQLite database" in err, err.count("\n")) == (True, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["lookup"],
        ["list", "--state", "asleep"],
        ["list", "--older-than", "soon"],
        ["list", "--newer-than", "9999999999999999d"],
        ["list", "--limit", "0"],
        ["erase"],
        ["erase", "--caller", ""],
        ["migrate", "sqlite:///a.db", "--store", "sqlite:///b.db"],
        ["sweep", "--bogus"],
        ["unheard-of"],
        ["doctor", URL],
        ["--store", URL, "list"],
        ["list", "--limit", URL],
    ],
)
def test_a_wrong_argument_is_one_line_of_error(words, records, capsys, monkeypatch):
    """O1: without the password of a store in the wrong place."""
    monkeypatch.setenv("COATCHECK_STORE", records.url)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("coatcheck: ")) == ("", 1, True)
    assert "hunt" not in err
    assert ("postgresql://…@db/shop" in err) == (URL in words and words[0] != "--store")


def test_the_default_store_comes_from_the_environment(records, capsys, monkeypatch):
    reference = records.put(1)
    monkeypatch.setenv("COATCHECK_STORE", records.url)
    assert main(["lookup", reference, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reference"] == reference


def test_a_text_that_is_not_utf_8_is_looked_for_as_any_other(records):
    """O1: a shell passes any bytes."""
    for words in (
        ["lookup", "\udcff"],
        ["list", "--caller", "\udcff"],
        ["list", "--label", "\udcff"],
    ):
        done = run("-m", "coatcheck", *words, "--store", records.url)
        assert ("Traceback" in done.stderr, done.stderr.count("\n")) == (False, 1)


# ----------------------------------------------------------------------------- broken output


def test_a_closed_pipe_is_no_traceback(records):
    for number in range(40):
        records.put(number, label="POST /" + "long" * 1_000)
    command = [sys.executable, "-m", "coatcheck", "list", "--store", records.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lister:
        assert lister.stdout is not None
        assert lister.stderr is not None
        os.read(lister.stdout.fileno(), 1)
        lister.stdout.close()
        assert lister.stderr.read() == b""
    assert lister.returncode == 1


UNWRITABLE = [("&-", 0), *([("/dev/full", 2)] if Path("/dev/full").exists() else [])]


@pytest.mark.parametrize(("where", "code"), UNWRITABLE)
@pytest.mark.parametrize("words", ["list", "lookup key-1-of-the-client"])
def test_output_that_cannot_be_written_is_no_traceback(records, where, code, words):
    """O1: exit code 0 if standard output is closed on purpose, 2 if writing failed."""
    records.put(1)
    script = f'exec "$0" -m coatcheck {words} --store "$1" >{where}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, records.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, code // 2)
    assert "Traceback" not in done.stderr
