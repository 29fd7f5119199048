"""The pytest plugin, in projects of their own: with each way to run async tests, and without (V2)."""

import re
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from coatcheck.errors import Misconfigured
from coatcheck.testing import AttemptKilled
from coatcheck.verify import crash
from tests.testing.shops import Shop

COMMON = """
import pytest
from coatcheck import Policy
from coatcheck.testing import AnswerLost, AttemptKilled

calls = []

@pytest.fixture
def idempotency_policy():
    return Policy(window="1h")

def test_an_engine_travels(idempotency_engine):
    idempotency_engine.run("k", calls.append, 1)
    idempotency_engine.run("k", calls.append, 1)
    assert calls == [1]
    idempotency_engine.travel_past_window()
    idempotency_engine.run("k", calls.append, 1)
    assert calls == [1, 1]

def test_a_handler_is_called(operation):
    assert operation.step("charge", lambda: 7) == 7
    assert operation.derive("charge")

def test_answers_are_lost(lossy_network):
    lossy_network.lose_answers()
    app = lossy_network.wsgi(lambda environ, start_response: [b"done"])
    with pytest.raises(AnswerLost):
        app({}, None)

def test_an_attempt_is_killed(idempotency_engine, crash_injector):
    injector = crash_injector("after effect")
    with pytest.raises(AttemptKilled):
        idempotency_engine.run("k", injector.effect(int), 7, scope="orders")
    assert injector.has_struck

orders, runs_of_it = [], []

@pytest.mark.duplicated
def test_a_test_runs_twice(idempotency_engine):
    runs_of_it.append(1)
    idempotency_engine.run("order-1", orders.append, "coat", scope="orders")
    assert orders == ["coat"]

def test_it_ran_twice():
    assert len(runs_of_it) == 2
"""

ASYNC = """
async_calls = []

async def call():
    async_calls.append(1)

{mark}
async def test_an_async_engine_travels(async_idempotency_engine):
    await async_idempotency_engine.run("k", call)
    await async_idempotency_engine.run("k", call)
    assert async_calls == [1]
    async_idempotency_engine.travel_past_window()
    await async_idempotency_engine.run("k", call)
    assert async_calls == [1, 1]

{mark}
async def test_an_async_handler_is_called(operation):
    assert await operation.step("charge", lambda: 7) == 7

runs = []

{mark}
@pytest.mark.duplicated(times=3)
async def test_an_async_test_runs_three_times(async_idempotency_engine):
    runs.append(1)
    await async_idempotency_engine.run("k", call)
    assert len(async_calls) <= 3

def test_it_ran_three_times():
    assert len(runs) == 3
"""

BY_HAND = """
import asyncio

def test_an_async_engine_in_a_loop_of_its_own(async_idempotency_engine, operation):
    async def call():
        calls.append(7)

    async def test():
        await async_idempotency_engine.run("k", call)
        await async_idempotency_engine.run("k", call)
        return await operation.step("charge", lambda: 7)

    assert asyncio.run(test()) == 7
    assert calls.count(7) == 1
"""

ANYIO = """
@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

ASYNCIO = ["-o", "asyncio_default_fixture_loop_scope=function"]  # which must be chosen
PLAIN = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error"]


def run_pytest(folder, *arguments):
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\n")
    command = [sys.executable, "-m", "pytest", "-q", *PLAIN, *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    ("source", "options", "passed"),
    [
        (COMMON + BY_HAND, ["-p", "no:asyncio", "-p", "no:anyio"], 7),
        (COMMON + ASYNC.format(mark="@pytest.mark.asyncio"), [*ASYNCIO, "-p", "no:anyio"], 10),
        (COMMON + ANYIO + ASYNC.format(mark="@pytest.mark.anyio"), ["-p", "no:asyncio"], 10),
    ],
    ids=["no plugin", "pytest-asyncio", "anyio"],
)
def test_the_kit_works_with_every_way_to_run_async_tests(source, options, passed, tmp_path):
    """V2: no fixture of the kit is async, so no plugin has to run one."""
    (tmp_path / "test_shop.py").write_text(source)
    done = run_pytest(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{passed} passed", done.stdout), done.stdout


DOUBLED = """
import pytest
orders = []

@pytest.mark.duplicated
def test_an_order_is_placed_once():
    orders.append("coat")
    assert len(orders) == 1

@pytest.mark.duplicated(2)
def test_a_wrong_mark():
    pass
"""


def test_a_duplicated_test_fails_where_its_second_run_does(tmp_path):
    """V2: the report says that it was the second run."""
    (tmp_path / "test_shop.py").write_text(DOUBLED)
    done = run_pytest(tmp_path, "-p", "no:asyncio")
    assert "1 failed, 1 error" in done.stdout, done.stdout
    assert "run 2 of 2 of a test that is marked `duplicated`" in done.stdout
    assert "or @pytest.mark.duplicated(times=3)" in done.stdout
    assert "assert 2 == 1" in done.stdout


OTHER = """
import sys
import pytest

@pytest.fixture
def operation():
    return "our own"

def test_the_own_fixture_counts(operation):
    assert operation == "our own"

@pytest.mark.parametrize("lossy_network", [1, 2])
def test_the_own_parameter_counts(lossy_network):
    assert lossy_network in (1, 2)

def test_coatcheck_is_not_even_imported():
    assert "_coatcheck_pytest" in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "coatcheck"]
"""


def test_a_project_that_does_not_use_the_kit_is_not_disturbed(tmp_path):
    (tmp_path / "test_other.py").write_text(OTHER)
    done = run_pytest(tmp_path, "-p", "no:asyncio")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("point", ["after claim", "in step", "after complete"])
def test_a_crash_that_only_a_real_process_can_have_is_refused(point, crash_injector):
    """V2: it would never happen, and the test would prove nothing."""
    with pytest.raises(Misconfigured, match=r"crash\.kill"):
        crash_injector(point)
    assert crash_injector(point, crash.fail).point == point


def test_an_attempt_over_http_is_killed_and_recovered_after_its_lease(
    async_idempotency_engine, crash_injector
):
    """V2: the claim stays, as after `kill -9`."""
    shop = Shop("asgi", engine=async_idempotency_engine)
    shop.place = crash_injector("after effect").effect(shop.place)
    sent = {"json": {"item": "coat"}, "headers": {"Idempotency-Key": "order-1"}}
    with TestClient(shop.app) as client:
        with pytest.raises(AttemptKilled):
            client.post("/orders", **sent)
        assert client.post("/orders", **sent).status_code == 409
        async_idempotency_engine.travel_past_lease()
        assert client.post("/orders", **sent).json() == {"order": 2}


def test_an_answer_over_http_is_lost_with_its_process(async_idempotency_engine, crash_injector):
    """V2: the record is complete, so the retry gets the answer."""
    shop = Shop("asgi", engine=async_idempotency_engine)
    app = crash_injector("before response").asgi(shop.app)
    sent = {"json": {"item": "coat"}, "headers": {"Idempotency-Key": "order-1"}}
    with TestClient(app) as client:
        with pytest.raises(AttemptKilled):
            client.post("/orders", **sent)
        assert client.post("/orders", **sent).json() == {"order": 1}
    assert shop.orders == ["coat"]


WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
import coatcheck
try:
    import coatcheck.testing
except coatcheck.MissingExtra as error:
    print(error)
"""


def test_without_pytest_the_kit_names_its_extra():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST], capture_output=True, text=True, check=True
    )
    assert done.stdout == "pytest is not installed; run: pip install 'coatcheck[testing]'\n"
