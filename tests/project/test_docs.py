"""The documentation is complete, true and up to date."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import coatcheck
from coatcheck.core.policy import POLICY_FIELDS
from coatcheck.core.problem import KINDS
from coatcheck.server.cookies import OTHER_COOKIES, SESSION_COOKIES
from coatcheck.server.request import Request
from coatcheck.stores import Store
from coatcheck.verify.crash import Injector

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def text_of(*parts):
    return DOCS.joinpath(*parts).read_text()


def test_the_generated_pages_are_what_the_code_says():
    made = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, f"run `make docs`: {made.stdout}{made.stderr}"


def test_every_public_name_is_documented():
    api = text_of("reference", "api.md")
    without_code = re.sub(r"```python\n.*?```", "", api, flags=re.DOTALL)
    said = dict(re.findall(r"^### `(\w+)`\n+([^#\n].*)$", without_code, re.MULTILINE))
    assert [name for name in coatcheck.__all__ if name not in said] == []
    assert re.findall(r"^#+ `([\w.]+)`\n+(?=#|\Z)", without_code, re.MULTILINE) == []


@pytest.mark.parametrize(
    "found",
    [coatcheck.Engine, coatcheck.AsyncEngine, coatcheck.Operation, Request, Store, Injector],
    ids=lambda found: found.__name__,
)
def test_every_public_method_is_there_with_its_signature(found):
    api, name = text_of("reference", "api.md"), found.__name__
    methods = [m for m in vars(found) if not m.startswith("_") and callable(getattr(found, m))]
    ours = {"check_steps", "record_step"}  # of an operation: for the engine and for sagas
    heads = rf"#### `{name}\.(\w+)`\n\n```python\n(?:@\w+\n)?(?:async )?def (\w+)\("
    listed = [method for method, again in re.findall(heads, api) if method == again]
    assert set(methods) - ours - set(listed) == set()


def test_every_argument_of_an_engine_is_explained():
    api = text_of("reference", "api.md")
    engine = api.partition("\n### `Engine`\n")[2].partition("\n#")[0]
    taken = list(inspect.signature(coatcheck.Engine).parameters)
    assert re.findall(r"^- `(\w+)`: \w", engine, re.MULTILINE) == taken


def test_every_policy_field_is_explained():
    policy = text_of("reference", "policy.md")
    unexplained = [
        field
        for field in sorted(POLICY_FIELDS)
        if not re.search(rf"^\| `{field}` \| .+ \| .*\w.* \|$", policy, re.MULTILINE)
    ]
    assert unexplained == []


def test_every_problem_has_a_heading_to_link_to():
    problems = text_of("reference", "problems.md")
    assert [code for code in KINDS if f"\n## {code}\n" not in problems] == []


def test_every_problem_is_on_the_page_for_clients():
    """V3: with what its client should do."""
    page = text_of("api-clients.md")
    assert [code for code in KINDS if f"`{code}`" not in page] == []


def test_every_page_can_be_found_from_the_first_one():
    """By one link: no reader has to know where a page is."""
    first = text_of("index.md")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert sorted(page for page in pages if f"({page}" not in first) == []


def test_every_error_is_in_the_drawn_tree():
    drawn = text_of("reference", "errors.md")
    classes = [
        name
        for name, thing in vars(coatcheck.errors).items()
        if isinstance(thing, type) and issubclass(thing, coatcheck.CoatcheckError)
    ]
    assert [name for name in classes if name not in drawn and name != "Refused"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def anchor_of(heading):
    """The anchor that Markdown gives to *heading*."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading(page):
    links = re.findall(r"\]\(([^)#\s]*\.md|)#([^)]+)\)", page.read_text())
    missing = []
    for name, anchor in links:
        target = (page.parent / name) if name else page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        if anchor not in map(anchor_of, headings):
            missing.append(f"{name}#{anchor}")
    assert missing == []


# ------------------------------------------------------------------ the figures of the stores


def figures(name, page=None):
    """The table that a run of the benchmark has put there: its rows, by their first cell."""
    found = re.search(
        rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", page or text_of("stores.md"), re.DOTALL
    )
    lines = [line.strip("| ").split(" | ") for line in found[1].splitlines() if "|" in line]
    return {line[0]: line[1:] for line in lines[2:]}


def test_the_stores_are_compared_by_what_a_key_costs():
    taken = figures("size")
    stores = ["SQLite", "PostgreSQL", "MySQL, MariaDB", "Redis, Valkey", "DynamoDB"]
    assert list(taken) == stores
    for plain, compact, needed, needed_compact, _ in taken.values():
        assert needed == f"{round(int(plain) * 0.864)} GB"
        assert needed_compact == f"{round(int(compact) * 0.864)} GB"


def test_the_stores_are_compared_by_how_long_they_take():
    took = figures("latency")
    stores = ["memory", "SQLite", "PostgreSQL", "MariaDB", "Redis, everysec", "Redis, always"]
    assert list(took) == [f"{s}, {world}" for s in stores for world in ("thread", "event loop")]
    for cells in took.values():
        for median, slow in (cell.split(" / ") for cell in cells):
            assert 0 < float(median.replace(" ", "")) <= float(slow.replace(" ", ""))


def test_no_figure_of_a_store_is_written_by_hand():
    made = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
    by_hand = made.sub("", text_of("stores.md")) + text_of("stores", "postgres.md")
    assert re.findall(r"[\d.]+ (?:bytes|[kMGT]B|µs|microseconds)", by_hand) == []


def run_of(**rows):
    """What a run leaves behind, as far as pages look at it."""
    tables = [{"name": name, "rows": found} for name, found in rows.items()]
    machine = {"at": "noon", "cpu": "an abacus", "cpus": 2, "fsync_us": 9, "load_before": 0.5}
    return {"machine": machine, "tables": tables}


def test_the_figures_of_a_run_take_the_place_of_those_before(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    pages = importlib.import_module("benchmarks.pages")
    before = text_of("stores.md")
    weights = [
        {"store": store, "kind": kind, "product": {"median": median}}
        for store in pages.WHERE
        for kind, median in (("plain", 1000.4), ("compact", 99.6), ("compact indexes", 50))
    ]
    after = pages.with_figures(before, run_of(size=weights))
    assert figures("size", after)["SQLite"] == ["1000", "100", "864 GB", "86 GB", "of disk"]
    assert "Its indexes are 43 GB of that" in after
    assert "Measured at noon on an abacus, 2 processors, 9 µs to sync a page, load 0.5 be" in after
    assert figures("latency", after) == figures("latency")
    steps = {
        f"{step} {share}": {"median": 7} for step in ("claim", "replay") for share in pages.SHARES
    }
    latencies = [{"what": "an oracle", "columns": steps}]
    after = pages.with_figures(before, run_of(latency=latencies))
    assert figures("latency", after) == {"an oracle": ["7.00 / 7.00", "7.00 / 7.00"]}
    assert figures("size", after) == figures("size")


def load(name, monkeypatch, tmp_path):
    """Import an example as a user would run it, with its files in a place of its own."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def post_twice(transport, path, body):
    async def send():
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": "9f0c-42"}
            return [await client.post(path, json=body, headers=headers) for _ in range(2)]

    return asyncio.run(send())


def assert_replayed(first, second):
    assert first.status_code == second.status_code == 201
    assert first.content == second.content
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    reference = first.headers["idempotency-reference"]
    assert second.headers["idempotency-reference"] == reference


def close_app(app):
    middleware = app.middleware_stack
    while not hasattr(middleware, "engine"):
        middleware = middleware.app
    asyncio.run(middleware.engine.close())


def test_the_asgi_example_takes_one_order(monkeypatch, tmp_path):
    example = load("asgi_app", monkeypatch, tmp_path)
    assert_replayed(*post_twice(httpx.ASGITransport(example.app), "/orders", {"item": "coat"}))
    assert len(example.orders) == 1
    close_app(example.app)


def test_the_wsgi_example_takes_one_order(monkeypatch, tmp_path):
    example = load("wsgi_app", monkeypatch, tmp_path)
    client = example.app.test_client()
    first, second = (
        client.post("/orders", json={"item": "coat"}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    )
    assert first.status_code == second.status_code == 201
    assert first.data == second.data
    assert second.headers["Idempotent-Replayed"] == "true"
    assert len(example.orders) == 1
    example.app.wsgi_app.engine.close()


# In a process of its own, because Django's settings are global.
DJANGO = """
import httpx, json
from django_app import application, orders
with httpx.Client(transport=httpx.WSGITransport(application), base_url="http://shop") as client:
    key = {"Idempotency-Key": "k"}
    told = [client.post("/orders", json={"item": "coat"}, headers=key) for _ in range(2)]
application.engine.close()
replayed = [answer.headers.get("idempotent-replayed") for answer in told]
print(json.dumps([[a.status_code, a.json(), r] for a, r in zip(told, replayed)] + [len(orders)]))
"""


def test_the_django_example_takes_one_order(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", DJANGO],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    order = {"number": 1, "item": "coat"}
    assert json.loads(ran.stdout) == [[201, order, None], [201, order, "true"], 1]


@pytest.mark.parametrize("example", ["wsgi_app.py", "django_app.py"])
def test_the_line_in_the_page_is_the_line_that_was_run(example):
    page = text_of("howto", "wsgi.md")
    lines = re.findall(r"^\S.*IdempotencyMiddleware\(.*$", page, re.MULTILINE)
    source = (ROOT / "examples" / example).read_text()
    assert [line for line in lines if line in source] != []


def test_the_function_example_sends_one_invoice(monkeypatch, tmp_path):
    example = load("functions", monkeypatch, tmp_path)
    first = example.send_invoice(7, "ada@example.com")
    assert example.send_invoice(7, "ada@example.com") == first
    assert example.sent == ["ada@example.com"]
    example.engine.close()


@pytest.mark.parametrize(
    ("name", "listed"), [("sessions", SESSION_COOKIES), ("others", OTHER_COOKIES)]
)
def test_every_pattern_of_a_cookie_is_listed(name, listed):
    found = re.search(rf"<!-- {name} -->\n(.*?)<!--", text_of("howto", "security.md"), re.DOTALL)
    assert tuple(re.findall(r"`(.+?)`", found[1])) == listed
