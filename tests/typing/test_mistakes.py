"""Type checkers report the mistakes of users: exactly those, each on its own line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"

# What a user writes; each line that is wrong ends with the mark.
MARK = "# wrong"
TEXT = """
from decimal import Decimal

from fastapi import FastAPI

import coatcheck
from coatcheck.server.fastapi import (
    CurrentOperation,
    CurrentSyncOperation,
    IdempotencyMiddleware,
    OptionalOperation,
    idempotent,
)
from coatcheck.server.starlette import idempotent as idempotent_too


app = FastAPI()


def place(number: int) -> int:
    return number


async def place_async(number: int) -> int:
    return number


class Texts:
    def encode(self, value: str) -> object:
        return value

    def decode(self, stored: object) -> str:
        return str(stored)


# --- options

coatcheck.Policy(required=True)
coatcheck.Policy(requierd=True)  # wrong
coatcheck.Policy(in_flight="sometimes")  # wrong
coatcheck.Policy.preset("stripe", window="1h")
coatcheck.Policy.preset("paypal2")  # wrong
coatcheck.Policy.preset("stripe", windw="1h")  # wrong
idempotent(required=True)
idempotent(requierd=True)  # wrong
idempotent(recovery="maybe")  # wrong
idempotent(window=["1h"])  # wrong
idempotent_too(requierd=True)  # wrong
IdempotencyMiddleware(app, store="memory://", polcy="payments")  # wrong
app.add_middleware(IdempotencyMiddleware, store="memory://")
app.add_middleware(IdempotencyMiddleware, store=7)  # wrong
app.add_middleware(IdempotencyMiddleware, polcy="payments")  # wrong


# --- decorated functions keep their signatures


@idempotent
def without_parentheses(number: int) -> str:
    return str(number)


@idempotent(required=True)
async def with_parentheses(number: int) -> str:
    return str(number)


length: int = len(without_parentheses(5))
without_parentheses("5")  # wrong
with_parentheses(no=5)  # wrong


# --- a forgotten await


async def handle(operation: CurrentOperation, optional: OptionalOperation) -> None:
    await operation.note("about to charge")
    operation.note("about to charge")  # wrong
    operation.progress(0.5)  # wrong
    operation.accept()  # wrong
    operation.step("charge", place_async, 5)  # wrong
    operation.defer()  # wrong
    token: str = operation.defer()  # wrong
    charged: int = await operation.step("charge", place_async, 5)
    shipped: int = operation.step("ship", place_async, 5)  # wrong
    optional.reference  # wrong
    if optional is not None:
        optional.note("about to charge")  # wrong
        print(optional.reference, token, charged, shipped)
    found = coatcheck.current_async_operation()
    assert found is not None
    found.note("about to charge")  # wrong


def handle_in_a_thread(operation: CurrentSyncOperation) -> int:
    operation.note("about to charge")
    text: str = operation.step("charge", place, 5)  # wrong
    print(text, operation.defer("1h").upper())
    return operation.step("charge", place, 5)


async def in_a_block(engine: coatcheck.AsyncEngine) -> None:
    async with engine.attempt("k", scope="s") as attempt:
        attempt.operation.note("about to charge")  # wrong
        attempt.complete(5)  # wrong


# --- functions


def guard(engine: coatcheck.Engine) -> None:
    engine.run("k", str, 5, codec=Texts())
    engine.run("k", str, 5, codec=object())  # wrong
    total: Decimal = engine.run("k", place, 5)  # wrong
    engine.guard(kye=str)  # wrong
    guarded = engine.guard(key=str)(place)
    guarded(number="5")  # wrong
    print(total)
"""
WRONG = {number for number, line in enumerate(TEXT.splitlines(), 1) if line.endswith(MARK)}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(TEXT, encoding="utf-8")
    return path


def output_of(folder: Path, *command: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", *command, "user.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"MYPYPATH": str(SOURCE), "PATH": str(Path(sys.executable).parent)},
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


@pytest.mark.timeout(300)  # mypy reads everything anew, on a machine that may be busy
def test_mypy_reports_every_mistake_and_nothing_else(written: Path) -> None:
    """R5."""
    said = output_of(written.parent, "mypy", "--strict", "--hide-error-context")
    assert set(map(int, re.findall(r"^user\.py:(\d+): error: ", said, re.MULTILINE))) == WRONG, said


@pytest.mark.timeout(300)
def test_pyright_reports_every_mistake_and_nothing_else(written: Path) -> None:
    """R5."""
    settings = {"extraPaths": [str(SOURCE)], "pythonVersion": "3.11"}
    (written.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    said = output_of(written.parent, "pyright", "--outputjson", "--pythonpath", sys.executable)
    found = json.loads(said)["generalDiagnostics"]
    errors = [each for each in found if each["severity"] in ("error", "warning")]
    assert {each["range"]["start"]["line"] + 1 for each in errors} == WRONG, errors
