"""What the pages show is what happens: their commands run, their examples are files, links lead."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from http.client import HTTPMessage
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest

from coatcheck.core.policy import Policy
from tests.support.times import eventually

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n+```python\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_of_a_page_is_a_part_of_its_file(page):
    for name, code in EXAMPLE.findall(page.read_text()):
        assert code in (ROOT / "examples" / name).read_text(), name


# --- the quickstarts ---------------------------------------------------------------------------


class Shown(NamedTuple):
    """A curl command of a page, and the response that the page shows for it."""

    command: str
    response: str


class Response(NamedTuple):
    status: int
    headers: HTTPMessage
    body: str


def shown_in(page: Path) -> list[Shown]:
    blocks = "".join(CONSOLE.findall(page.read_text()))
    found = re.findall(r"^\$ (curl .*)\n((?:(?!\$ ).*\n)*)", blocks, re.MULTILINE)
    return [Shown(*one) for one in found]


def sent(command: str, port: int) -> Response:
    """The response to a curl *command* with `-i`, `-H` and `-d`."""
    words = shlex.split(command)
    assert words[:2] == ["curl", "-i"]
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    data = words[words.index("-d") + 1].encode()
    url = "http://" + words[2].replace("localhost:8000", f"127.0.0.1:{port}")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
            return Response(response.status, response.headers, response.read().decode())
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Response(refusal.code, refusal.headers, refusal.read().decode())


def assert_as_shown(shown: Shown, response: Response):
    head, _, body = shown.response.partition("\n\n")
    status, *headers = head.strip().splitlines()
    assert int(status.split()[1]) == response.status, response
    for name, value in (header.split(": ") for header in headers):
        assert response.headers[name] == value
    if "idempotent-replayed" not in head.lower():
        assert "idempotent-replayed" not in response.headers
    if body.strip():
        assert json.loads(body) == json.loads(response.body)


@contextmanager
def serving(page: Path, directory: Path):
    """The server that *page* starts, with the page's first example as `shop.py`."""
    text = page.read_text()
    (directory / "shop.py").write_text(EXAMPLE.findall(text)[0][1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = re.search(r"^\$ (uvicorn|gunicorn) (.*)$", text, re.MULTILINE)
    assert started is not None
    words = [started[1], *started[2].replace("localhost:8000", f"127.0.0.1:{port}").split()]
    if started[1] == "uvicorn":
        words += ["--port", str(port)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", *words], cwd=directory, stderr=log)
    try:
        eventually(lambda: is_listening(port))
        yield port
    finally:
        server.terminate()
        server.wait(timeout=30)


def is_listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(f"docs/quickstart/{n}.md" for n in ("fastapi", "flask", "django", "litestar")),
    ],
)
def test_a_page_shows_what_a_reader_gets(name, tmp_path):
    """K5: also the reference, which is made from the key and the route alone."""
    page = ROOT / name
    shown = shown_in(page)
    assert len(shown) >= 2
    with serving(page, tmp_path) as port:
        for one in shown:
            assert_as_shown(one, sent(one.command, port))
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_function_of_the_quickstart_runs_once(tmp_path):
    text = (DOCS / "quickstart" / "function.md").read_text()
    (tmp_path / "invoice.py").write_text(EXAMPLE.findall(text)[0][1])
    blocks = "".join(CONSOLE.findall(text))
    commands = re.findall(r"^\$ python (.*)\n((?:(?!\$ ).*\n)*)", blocks, re.MULTILINE)
    assert len(commands) == 2
    for words, output in commands:
        ran = subprocess.run(
            [sys.executable, *words.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout == output


@pytest.mark.parametrize(
    "name", ["testing.py", "fastapi_app.py", "flask_app.py", "litestar_app.py"]
)
def test_the_tests_of_an_example_pass(name):
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "examples" / name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", ["fastapi", "flask", "litestar"])
def test_what_a_reader_copies_from_top_to_bottom_is_a_tested_application(name, tmp_path):
    """The first block of the page is a program; the others are a larger one, with its tests."""
    page = (DOCS / "howto" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shop = tmp_path / "shop.py"
    shop.write_text("\n\n".join(blocks[1:]))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", shop],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert ran.returncode == 0, ran.stdout


def test_the_tests_of_the_django_example_pass(tmp_path):
    """L9, S1: as its reader runs them; and the project has no mistakes."""
    project = shutil.copytree(ROOT / "examples" / "django_shop", tmp_path / "shop")
    for words in (["check", "--fail-level=WARNING"], ["makemigrations", "--check"], ["test"]):
        ran = subprocess.run(
            [sys.executable, "-W", "error", "manage.py", *words],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


# --- the site -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, as `make docs` builds it."""
    place = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", place)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.copytree(place / "examples", place / "build" / "site" / "examples")
    return place / "build" / "site"


def test_every_page_is_in_the_navigation_of_the_site(site):
    settings = (ROOT / "zensical.toml").read_text()
    named = re.findall(r'"([\w/-]+\.md)"', settings)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_link_of_the_site_leads_somewhere(site):
    broken = []
    for page in site.rglob("index.html"):
        here = f"http://site/{page.parent.relative_to(site)}/".replace("/./", "/")
        text = page.read_text()
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            url, anchor = urldefrag(urljoin(here, link))
            if urlsplit(url).netloc != "site":
                continue
            target = site / urlsplit(url).path.lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                anchor and target.suffix == ".html" and f'id="{anchor}"' not in target.read_text()
            ):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_the_site_loads_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)', page.read_text()
        )
        own = "https://coatcheck.readthedocs.io/"
        assert [url for url in loaded if not url.startswith(own)] == [], page


def test_the_type_of_a_problem_is_a_heading_of_the_site(site):
    """K3: a client's engineer follows the link."""
    settings = (ROOT / "zensical.toml").read_text()
    home = re.search(r'site_url = "(.*)"', settings)
    assert home is not None
    path = Policy().docs_url.removeprefix(home[1])
    page = (site / path / "index.html").read_text()
    assert 'id="key-reused"' in page
