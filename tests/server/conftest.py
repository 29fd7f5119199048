"""
A guarded application for each adapter, in its own test client and behind its real servers.

A law that is marked `persists` runs on SQLite as well. One that is marked `served` runs behind every
server: a server can change its headers or its body, its concurrency, or what happens when a client
hangs up or a response is streamed. What the other laws check is decided before and after that.
"""

import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, open_store
from coatcheck.server import routes
from coatcheck.stores import Store
from tests.server.laws.api import Api, AsgiApi, OpenApi, Workers, WsgiApi
from tests.server.laws.django_api import AsyncDjangoApi, DjangoApi
from tests.server.laws.frameworks import FastApiApi, FlaskApi, LitestarApi
from tests.server.laws.hosts import HOSTS, Host, served
from tests.server.laws.shop import Shop
from tests.support.times import Clock
from tests.support.web_servers import KINDS, Server

# Every adapter, with one entry. All laws run over the first two.
ADAPTERS: dict[str, type[Api]] = {
    "asgi": AsgiApi,
    "wsgi": WsgiApi,
    "fastapi": FastApiApi,
    "flask": FlaskApi,
    "litestar": LitestarApi,
    "django": DjangoApi,
    "django-async": AsyncDjangoApi,
}
PROTOCOLS = ("asgi", "wsgi")
# The servers behind which each adapter is used.
SERVERS: dict[str, tuple[str, ...]] = {
    "asgi": ("uvicorn", "hypercorn"),
    "wsgi": ("gunicorn", "waitress"),
    "fastapi": ("uvicorn", "hypercorn"),
    "flask": ("gunicorn", "waitress"),
    "litestar": ("uvicorn", "hypercorn"),
    "django": ("gunicorn", "waitress", "runserver"),
    "django-async": ("uvicorn", "hypercorn"),
}
ON = " on "
SERVED = [f"{adapter}{ON}{host}" for adapter, hosts in SERVERS.items() for host in hosts]
# The others are built on one of them, so that the laws of these files, and those that are marked
# `served`, are enough, in memory.
LAWS_OF_FRAMEWORKS = tuple(
    f"test_{name}"
    for name in (
        *("once", "keys", "content_keys", "decisions", "sessions"),
        *("outcomes", "known_outcomes"),
    )
)

MIDDLEWARE_SETTINGS = ("caller", "key", "disabled_by", "session_cookies", "session_secret")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """
    Run a law over ASGI and WSGI, and some of them in frameworks and behind servers; in memory, and
    on SQLite if its promise depends on what a store keeps.
    """
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    adapters = list(PROTOCOLS)
    is_served = metafunc.definition.get_closest_marker("served") is not None
    if is_served or metafunc.module.__name__.endswith(LAWS_OF_FRAMEWORKS):
        adapters = [*ADAPTERS, *(SERVED if is_served else ())]
    persists = metafunc.definition.get_closest_marker("persists") is not None
    takes_api = "open_api" in metafunc.fixturenames and "open_api" not in chosen
    takes_store = "new_store" in metafunc.fixturenames and "new_store" not in chosen
    if takes_api and takes_store:
        both = [(adapter, "memory") for adapter in adapters]
        both += [(adapter, "sqlite") for adapter in PROTOCOLS if persists]
        metafunc.parametrize(("open_api", "new_store"), both, indirect=True)
    elif takes_api:
        metafunc.parametrize("open_api", adapters, indirect=True)
    elif takes_store:
        stores = ("memory", "sqlite") if persists else ("memory",)
        metafunc.parametrize("new_store", stores, indirect=True)


@pytest.fixture(autouse=True)
def _no_mark() -> None:
    """Forget the mark that a WSGI request of an earlier test has found in this thread."""
    routes.found(None)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def hosts(workers: Workers) -> Iterator[Callable[[str], Host]]:
    """The real servers; each is started at its first law."""
    started: dict[str, Host] = {}

    def host(name: str) -> Host:
        if name not in started:
            started[name] = HOSTS[name](workers)
        return started[name]

    yield host
    for one in started.values():
        one.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


class NewStore:
    """Opens the store of one law: each time the same one, with a connection of its own."""

    def __init__(self, directory: Path | None) -> None:
        self.path = directory and directory / "laws.db"
        self._memory = open_store("memory://")

    def __call__(self, options: str = "") -> Store:
        return open_store(f"sqlite:///{self.path}{options}") if self.path else self._memory


@pytest.fixture
def new_store(request: pytest.FixtureRequest) -> Iterator[NewStore]:
    if request.param == "memory":
        yield NewStore(None)
        return
    # In memory where that is possible: what survives a power cut is for the laws of stores.
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="coatcheck-http-", dir=memory if memory.is_dir() else None)
    yield NewStore(Path(directory))
    shutil.rmtree(directory)


@pytest.fixture
def open_api(
    request: pytest.FixtureRequest,
    new_store: NewStore,
    clock: Clock,
    workers: Workers,
    hosts: Callable[[str], Host],
) -> Iterator[OpenApi]:
    """
    Opens an api: `open_api(required=True, caller=…)`, with fields of a policy, arguments of the
    middleware, `settings` for the engine, a `policy` as it is, or a `store` and a `shop` of one's
    own. Several of them are several nodes on one store.
    """
    opened: list[Api] = []
    name, _, server = request.param.partition(ON)
    adapter = served(ADAPTERS[name], hosts(server)) if server else ADAPTERS[name]

    def open_one(
        *,
        policy: Policy | str | None = None,
        store: Store | None = None,
        shop: Shop | None = None,
        settings: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Api:
        middleware = {name: fields.pop(name) for name in MIDDLEWARE_SETTINGS if name in fields}
        chosen = policy if policy is not None else Policy(**fields)
        api = adapter(
            store or new_store(),
            shop or Shop(),
            clock,
            workers,
            settings={"policy": chosen, "sweep_every_s": None, **(settings or {})},
            middleware=middleware,
        )
        opened.append(api)
        return api

    yield open_one
    for api in opened:
        api.close()


@pytest.fixture
def api(open_api: OpenApi) -> Api:
    """The default policy."""
    return open_api()


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def web_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A real server of each kind, once for all tests; each test uses keys of its own."""
    server = Server(request.param, tmp_path_factory.mktemp("web"), "tests.server.web_app")
    yield server
    server.close()
    assert server.process.returncode in (0, -signal.SIGTERM), server.log()
    raised = re.findall(
        r"^(?:\s*\| )?([\w.]+(?:Error|Exception|Boom))\b", server.log(), re.MULTILINE
    )
    # wsgiref, when `close` has failed, wants to respond to a client that it has let go of already.
    quirks = {"TypeError"} if request.param.name == "wsgiref" else set()
    assert set(raised) <= {"tests.server.web_app.Boom", *quirks}, server.log()
