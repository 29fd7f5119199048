"""Writes docs/reference from the code; `--check` tells whether it is up to date."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import api_page

from coatcheck import errors
from coatcheck.cli import command_line
from coatcheck.core.policy import POLICY_FIELDS, PRESETS, Policy
from coatcheck.core.problem import KINDS
from coatcheck.core.record import MOVES, STATE_NAMES, State
from coatcheck.stores.registry import STORES

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/generate.py from the code; change the code. -->\n"


def states() -> str:
    """The state diagram and the table of moves."""

    def name(state: State | None) -> str:
        return "[*]" if state is None else STATE_NAMES[state]

    lines = [NOTE, "# States and moves\n", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {name(m.source)} --> {name(m.target)}: {m.name}" for m in MOVES]
    lines += ["```\n", "| move | from | to | allowed |", "|---|---|---|---|"]
    lines += [
        f"| {m.name} | {name(m.source).strip('[]') or '–'} | {name(m.target).strip('[]')} "
        f"| {m.when.value} |"
        for m in MOVES
    ]
    lines += ["", "`*` is no record: before the first claim, and after the sweep."]
    return "\n".join(lines) + "\n"


def problems() -> str:
    """Every refusal a client can get."""
    lines = [NOTE, "# Problems\n", "Every refusal is an `application/problem+json` document.\n"]
    for code, kind in KINDS.items():
        words = kind.words.replace("{key}", "…").replace("{reason}", "…")
        lines += [f"## {code}\n", f"**{kind.status}** {kind.title}.", f"Retry: `{kind.retry}`."]
        if kind.retry_after_s is not None:
            lines.append(f"`Retry-After: {kind.retry_after_s}`.")
        lines += [f"In Python: `coatcheck.{kind.error.__name__}`.\n", f"> {words}\n"]
    return "\n".join(lines)


def stores() -> str:
    """What each store declares of itself."""
    first = "| store | URL | needs | survives | shared by | keeps | forgets | waiters elsewhere "
    first += "| transaction mode | `archive=` |"
    lines = [NOTE, "# Stores\n", first, "|---|---|---|---|---|---|---|---|---|---|"]
    for store in STORES:
        urls = ", ".join(f"`{url}`" for url in store.urls)
        needs = f"`coatcheck[{store.extra}]`" if store.extra else "nothing"
        forgets = _FORGETS[store.sweeps, store.archives]
        waiters = "poll" if store.shared else "there are none"
        lines.append(
            f"| {store.title} | {urls} | {needs} | {store.survives} | {store.shared_by} "
            f"| {store.keeps} | {forgets} | {waiters} | {'yes' if store.transacts else 'no'} "
            f"| {_ARCHIVES[store.archives]} |"
        )
    laws = "Every one passes the same law-suite (`tests/stores/laws`), sync and async"
    lines += ["", f"{laws}; Redis alone, behind Sentinels and as a cluster."]
    return "\n".join(lines) + "\n"


# Who is swept and may have been quicker has an expiry of its own, too.
_FORGETS = {
    (True, "yes"): "when swept",
    (True, "usually"): "when swept, or by itself if that is sooner",
    (False, "no"): "by itself, on its own clock",
}
_ARCHIVES = {
    "yes": "yes",
    "usually": "unless the store's own expiry is first",
    "no": "refused: it would never be called",
}


def recovery() -> str:
    """The page as it is, with its generated parts replaced."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    outcomes = importlib.import_module("tests.faults.outcomes")
    page = (HERE / "../recovery.md").read_text()
    parts = {"absences": outcomes.absences(), "outcomes": outcomes.table()}
    for name, made in parts.items():
        head, begin, rest = page.partition(f"<!-- {name}:begin")
        note, close, _ = rest.partition("-->\n")
        _, end, tail = rest.partition(f"<!-- {name}:end -->")
        page = f"{head}{begin}{note}{close}\n{made}\n{end}{tail}"
    return page


def policy() -> str:
    """Every knob with its default, and the comment beside it."""
    lines = [NOTE, "# Policy\n", (inspect.getdoc(Policy) or "") + "\n"]
    lines += ["| field | default | |", "|---|---|---|"]
    comments = _field_comments()
    for field in dataclasses.fields(Policy):
        if field.name in POLICY_FIELDS:
            value = getattr(Policy(), field.name)
            default = sorted(value) if isinstance(value, frozenset) else value
            lines.append(f"| `{field.name}` | `{default!r}` | {comments[field.name]} |")
    lines += ["\n## Presets\n", "| preset | differs from the default in |", "|---|---|"]
    for name, changes in PRESETS.items():
        differs = ", ".join(f"`{key}={value!r}`" for key, value in changes.items()) or "nothing"
        lines.append(f"| `{name}` | {differs} |")
    return "\n".join(lines) + "\n"


def _field_comments() -> dict[str, str]:
    comments: dict[str, str] = {}
    gathered: list[str] = []
    for line in inspect.getsource(Policy).splitlines():
        text = line.strip()
        field = re.match(r"(\w+): ", text)
        if text.startswith("#"):
            gathered.append(text.removeprefix("#").strip())
        elif field:
            comments[field[1]] = " ".join(gathered).replace("|", "\\|")
            gathered = []
    return comments


def errors_() -> str:
    """The tree of exceptions."""
    return f"{NOTE}\n# Errors\n\n```\n{inspect.cleandoc(errors.__doc__ or '')}\n```\n"


def api() -> str:
    """Every public name, with its signature and what is said of it."""
    return api_page.page(NOTE)


def cli() -> str:
    """The command line's own help."""
    os.environ["COLUMNS"] = "80"  # argparse fills the terminal it finds
    parser = command_line()
    lines = [NOTE, "# Command line\n", f"```\n{parser.format_help()}```\n"]
    for name, command in commands_of(parser).items():
        lines += [f"## coatcheck {name}\n", f"```\n{command.format_help()}```\n"]
    return "\n".join(lines)


# argparse words its help a little differently in each version of Python; one of them rules.
CLI_VERSION = (3, 11)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of *parser*, by name."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001 - argparse offers no other way
    return dict(action.choices)


PAGES = {
    "../recovery.md": recovery,
    "cli.md": cli,
    "api.md": api,
    "states.md": states,
    "stores.md": stores,
    "problems.md": problems,
    "policy.md": policy,
    "errors.md": errors_,
}


def main() -> int:
    """Write the pages; with --check, only tell which differ."""
    HERE.mkdir(exist_ok=True)
    stale = []
    for name, make in PAGES.items():
        if make is cli and sys.version_info[:2] != CLI_VERSION:
            continue
        page = HERE / name
        text = make()
        if not page.exists() or page.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(text)
    if stale:
        print("changed:", ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
