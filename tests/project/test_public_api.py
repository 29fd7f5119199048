"""The public names: sorted, importable, explained, and cheap to import."""

import asyncio
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy
from coatcheck.server import asgi, wsgi

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

# 0.3 s of CPU: several times what it takes; more would mean that something heavy came along.
IMPORT_CPU_S_MAX = 0.3

IMPORT = """
import sys, time
before, started = set(sys.modules), time.process_time()
import coatcheck
print(time.process_time() - started)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""

WITHOUT_FRAMEWORKS = """
import importlib, sys
sys.modules["fastapi"] = sys.modules["starlette"] = sys.modules["flask"] = None
sys.modules["django"] = None
import coatcheck.server.asgi, coatcheck.server.wsgi, coatcheck.server.starlette
for name in ("fastapi", "flask", "django"):
    try:
        importlib.import_module(f"coatcheck.server.{name}")
    except coatcheck.MissingExtra as error:
        print(error)
"""


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout


def imported() -> tuple[float, set[str]]:
    cpu_s, names = output_of(IMPORT).splitlines()
    return float(cpu_s), set(names.split())


def test_public_names_are_sorted_and_complete():
    assert coatcheck.__all__ == sorted(coatcheck.__all__)
    modules = {name for name, value in vars(coatcheck).items() if inspect.ismodule(value)}
    public = {name for name in vars(coatcheck) if not name.startswith("_")} - modules
    assert public - {"annotations"} == {n for n in coatcheck.__all__ if not n.startswith("_")}


def test_every_public_name_is_explained():
    named = {name: getattr(coatcheck, name) for name in coatcheck.__all__}
    things = {n: v for n, v in named.items() if inspect.isclass(v) or inspect.isroutine(v)}
    assert things
    assert [name for name, value in things.items() if not inspect.getdoc(value)] == []


def test_a_bare_import_brings_no_third_party_package():
    _cpu_s, names = imported()
    assert names - sys.stdlib_module_names == {"coatcheck"}


def test_a_bare_import_is_quick():
    assert min(imported()[0] for _ in range(3)) < IMPORT_CPU_S_MAX


def test_a_module_without_its_package_names_the_extra():
    output = output_of(WITHOUT_FRAMEWORKS)
    for extra in ("fastapi", "flask", "django"):
        assert f"pip install 'coatcheck[{extra}]'" in output


def project() -> dict[str, Any]:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]


def test_the_package_and_the_project_agree_on_the_version():
    assert coatcheck.__version__ == project()["version"]


def test_one_extra_has_all_others_that_users_install():
    extras = project()["optional-dependencies"]
    named: list[str] = []
    for line in extras["all"]:
        found = re.fullmatch(r"coatcheck\[(.+)\]", line)
        assert found is not None
        named += found[1].split(",")
    assert sorted(named) == sorted(set(extras) - {"all", "test", "bench", "dev"})


def test_the_metadata_say_where_to_find_the_project():
    urls = project()["urls"]
    assert list(urls) == ["Homepage", "Documentation", "Repository", "Changelog"]
    assert Policy().docs_url.startswith(urls["Documentation"])


@pytest.mark.parametrize("middleware", [asgi, wsgi], ids=["asgi", "wsgi"])
def test_the_default_store_of_a_middleware_is_what_its_help_says(middleware, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guarded = middleware.IdempotencyMiddleware(print)
    assert "sqlite:///coatcheck.db" in (inspect.getdoc(guarded) or "")
    if middleware is wsgi:
        guarded.engine.run("k", str)
        guarded.engine.close()
    else:
        asyncio.run(use(guarded.engine))
    assert (tmp_path / "coatcheck.db").exists()


async def use(engine: coatcheck.AsyncEngine) -> None:
    async def done() -> str:
        return "done"

    async with engine:
        await engine.run("k", done)
