"""A guarded application for each adapter, in memory; what is marked `persists` on SQLite as well."""

import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, open_store
from coatcheck.stores import Store
from tests.server.laws.api import (
    ADAPTERS,
    FRAMEWORKS,
    LAWS_OF_FRAMEWORKS,
    Api,
    OpenApi,
    Workers,
)
from tests.server.laws.shop import Shop
from tests.support.times import Clock
from tests.support.web_servers import KINDS, Server

MIDDLEWARE_SETTINGS = ("caller", "key", "disabled_by", "session_cookies", "session_secret")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """
    Run a law over ASGI and WSGI, and some of them in frameworks; in memory, and on SQLite if its
    promise depends on what a store keeps.
    """
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "open_api" in metafunc.fixturenames and "open_api" not in chosen:
        is_enough = metafunc.module.__name__.endswith(LAWS_OF_FRAMEWORKS)
        adapters = [*ADAPTERS, *(FRAMEWORKS if is_enough else ())]
        metafunc.parametrize("open_api", adapters, indirect=True)
    if "new_store" in metafunc.fixturenames and "new_store" not in chosen:
        persists = metafunc.definition.get_closest_marker("persists") is not None
        stores = ("memory", "sqlite") if persists else ("memory",)
        metafunc.parametrize("new_store", stores, indirect=True)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


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
) -> Iterator[OpenApi]:
    """
    Opens an api: `open_api(required=True, caller=…)`, with fields of a policy, arguments of the
    middleware, `settings` for the engine, a `policy` as it is, or a `store` and a `shop` of one's
    own. Several of them are several nodes on one store.
    """
    opened: list[Api] = []

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
        api = {**ADAPTERS, **FRAMEWORKS}[request.param](
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
