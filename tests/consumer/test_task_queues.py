"""Task queues: a task runs once for its key, in real workers that are killed (E4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import celery
import dramatiq
import psycopg
import pytest
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.brokers.stub import StubBroker
from rq import Queue

from coatcheck import Misconfigured, StoreUnavailable
from coatcheck.consumer import Inbox
from tests.support.servers import children_of
from tests.support.servers.postgres import postgres
from tests.support.servers.redis import redis_server
from tests.support.times import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKERS = {
    "celery": ["celery", "-A", "{}", "worker", "-c", "2", "-l", "ERROR"],
    "dramatiq": ["dramatiq", "{}", "-p", "1", "-t", "2"],
    "rq": ["rq.cli", "worker", "shop", "--with-scheduler", "--worker-ttl", "2"],
    "procrastinate": ["procrastinate", "--app", "{}.app", "worker"],
}


def settings_of(queue, directory):
    """The environment of a worker: a broker and a store of its own."""
    if queue == "procrastinate":
        url = postgres().fresh_database()
    else:
        url = redis_server().fresh_url().partition("?")[0]
    store = f"sqlite:///{directory}/store.db"
    return {**os.environ, "QUEUE_URL": url, "STORE_URL": store, "DIRECTORY": str(directory)}


def run(settings, *words, cwd=None):
    done = subprocess.run(
        [sys.executable, *words], env=settings, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def worker(queue, settings, directory, module=""):
    """A worker in a group of processes of its own; it is killed at the end."""
    with (directory / "log").open("ab") as log:
        url = ["--url", settings["QUEUE_URL"]] if queue == "rq" else []
        words = [word.format(module or f"tests.consumer.{queue}_app") for word in WORKERS[queue]]
        process = subprocess.Popen(
            [sys.executable, "-m", *words, *url],
            env=settings,
            cwd=directory if module else None,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def effects(directory):
    path = directory / "effects"
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("queue", WORKERS)
def test_a_task_has_its_effect_once_although_it_is_enqueued_twice_and_its_worker_is_killed(
    queue, tmp_path
):
    """E4: the task that the killed worker ran is run again, by another worker."""
    settings = settings_of(queue, tmp_path)
    if queue == "procrastinate":
        run(
            settings,
            "-m",
            "procrastinate",
            "--app",
            "tests.consumer.procrastinate_app.app",
            "schema",
            "--apply",
        )
    run(settings, "-m", "tests.consumer.enqueue", queue, "a", "a", "fails", "stuck")
    with worker(queue, settings, tmp_path) as pid:
        eventually((tmp_path / "stuck").exists)
        eventually(lambda: effects(tmp_path)["a"])
        if queue == "rq":  # the process that runs the job: for a dead worker, RQ waits a minute
            os.kill(max(children_of(pid)), signal.SIGKILL)
            eventually(lambda: effects(tmp_path)["stuck"])
    if queue == "procrastinate":  # as its documentation says for workers that died
        with psycopg.connect(settings["QUEUE_URL"]) as connection:
            connection.execute(
                "update procrastinate_jobs set status = 'todo' where status = 'doing'"
            )
    run(settings, "-m", "tests.consumer.enqueue", queue, "a")
    if queue == "celery":
        # A worker looks for the tasks of dead ones when it starts, and then every 100 s. So it
        # starts when the visibility timeout of 2 s is over.
        began_s = (tmp_path / "stuck").stat().st_mtime
        eventually(lambda: time.time() > began_s + 4)
    with worker(queue, settings, tmp_path):
        eventually(lambda: set(effects(tmp_path)) == {"a", "fails", "stuck"}, within_s=40)
    assert effects(tmp_path) == {"a": 1, "fails": 1, "stuck": 1}, (tmp_path / "log").read_text()


SEND = {"dramatiq": "charge.send(order)", "procrastinate": "charge.defer(order=order)"}


@pytest.mark.parametrize("queue", WORKERS)
def test_the_example_of_a_task_queue_charges_once(queue, tmp_path):
    settings = {**settings_of(queue, tmp_path), "PYTHONPATH": str(EXAMPLES)}
    if queue == "procrastinate":
        app = f"task_{queue}.app"
        run(settings, "-m", "procrastinate", "--app", app, "schema", "--apply", cwd=tmp_path)
    run(settings, str(EXAMPLES / f"task_{queue}.py"), cwd=tmp_path)
    send = SEND.get(queue, "charge.delay(order)")
    opened = "with app.open(): " if queue == "procrastinate" else ""
    code = f"from task_{queue} import *; order = 'order-18'\n{opened}{send}"
    run(settings, "-c", code, cwd=tmp_path)  # the last one: all before it are done or waiting
    ledger = tmp_path / "charges.txt"
    with worker(queue, settings, tmp_path, f"task_{queue}"):
        eventually(lambda: ledger.exists() and "order-18" in ledger.read_text())
    assert ledger.read_text() == "order-17\norder-18\n"


# --- what would defeat the guard is refused -------------------------------------------------------


@pytest.fixture
def inbox(tmp_path):
    with Inbox(f"sqlite:///{tmp_path}/store.db", consumer="billing") as inbox:
        yield inbox


async def asynchronous(order): ...


def synchronous(order): ...


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_a_celery_task_that_is_acknowledged_early_is_refused(inbox, option):
    app = celery.Celery("shop")
    with pytest.raises(Misconfigured, match=f"{option}=False loses the task"):
        inbox.task(app, **{option: False})(synchronous)


@pytest.mark.parametrize("function", [synchronous, asynchronous])
def test_a_celery_task_must_be_a_plain_function(inbox, function):
    app = celery.Celery("shop")
    options = {"bind": True} if function is synchronous else {}
    with pytest.raises(Misconfigured, match=r"bound|async"):
        inbox.task(app, **options)(function)


def test_an_actor_of_a_broker_without_retries_is_refused(inbox):
    broker = StubBroker(middleware=[])
    with pytest.raises(Misconfigured, match="Retries"):
        inbox.task(broker)(synchronous)


@pytest.mark.parametrize(
    ("function", "options"), [(asynchronous, {}), (synchronous, {"retry": None})]
)
def test_a_job_of_rq_that_could_be_lost_is_refused(inbox, function, options):
    import redis

    queue = Queue("shop", connection=redis.Redis(port=1))
    with pytest.raises(Misconfigured, match=r"lost|async"):
        inbox.task(queue, **options)(function)


def test_something_that_is_no_task_queue_is_refused(inbox):
    with pytest.raises(Misconfigured, match="no application of a task queue"):
        inbox.task(object())


# --- keys and results -----------------------------------------------------------------------------


def test_a_duplicate_gets_the_stored_result_and_other_arguments_are_another_task(inbox):
    ran = []
    app = celery.Celery("shop")
    app.conf.task_always_eager = True

    @inbox.task(app, name="charge")
    def charge(order, *, scope="usual"):
        ran.append(order)
        return {"order": order, "number": len(ran)}

    assert charge.delay(17).get() == {"order": 17, "number": 1}
    assert charge.delay(17).get() == {"order": 17, "number": 1}
    assert charge.delay(17, scope="other").get() == {"order": 17, "number": 2}
    assert len(ran) == 2


def test_the_same_key_with_other_arguments_is_refused(inbox):
    from coatcheck import KeyReused

    app = celery.Celery("shop")
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True

    @inbox.task(app, name="charge", key=lambda order, amount: order)
    def charge(order, amount):
        return amount

    charge.delay(17, 30)
    with pytest.raises(KeyReused):
        charge.delay(17, 31)


def test_an_async_actor_runs_once(inbox):
    ran = []
    broker = StubBroker(middleware=[dramatiq.middleware.AsyncIO(), dramatiq.middleware.Retries()])
    dramatiq.set_broker(broker)

    @inbox.task(broker, name="charge")
    async def charge(order):
        ran.append(order)

    for _ in range(2):
        charge.send(17)
    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    broker.join(charge.queue_name, timeout=20_000)
    get_event_loop_thread().run_coroutine(inbox.aclose())
    worker.stop()
    assert ran == [17]


# --- a task that has not run is never given up ----------------------------------------------------


def outage_of(inbox, monkeypatch, *, calls):
    """The store is down for the first *calls*."""
    engine = inbox.engine
    run, left = engine.run, list(range(calls))

    def fail_first(*args, **kwargs):
        if left:
            left.pop()
            raise StoreUnavailable("the store is away")
        return run(*args, **kwargs)

    monkeypatch.setattr(engine, "run", fail_first)


def test_a_celery_task_survives_an_outage_that_is_longer_than_its_retries(inbox, monkeypatch):
    """E4: by default Celery gives up after 3 retries."""
    ran = []
    app = celery.Celery("shop")
    app.conf.task_always_eager = True

    @inbox.task(app, name="charge")
    def charge(order):
        ran.append(order)

    outage_of(inbox, monkeypatch, calls=10)
    assert charge.delay(17).state == "SUCCESS"
    assert ran == [17]


def test_the_limit_of_celerys_own_retries_stays_after_an_outage(inbox, monkeypatch):
    ran = []
    app = celery.Celery("shop")
    app.conf.task_always_eager = True

    @inbox.task(app, name="charge", autoretry_for=(ValueError,), retry_backoff=False)
    def charge(order):
        ran.append(order)
        raise ValueError(order)

    outage_of(inbox, monkeypatch, calls=1)
    assert charge.delay(17).state == "FAILURE"
    assert len(ran) == 3  # the outage was the first of 3 retries


def test_an_actor_survives_an_outage_that_is_longer_than_its_retries(inbox, monkeypatch):
    """E4: Dramatiq would move the message to its dead letters."""
    ran = []
    broker = StubBroker(middleware=[dramatiq.middleware.Retries(max_retries=2, min_backoff=1)])
    dramatiq.set_broker(broker)

    @inbox.task(broker, name="charge")
    def charge(order):
        ran.append(order)
        if order == 18:
            raise ValueError(order)

    outage_of(inbox, monkeypatch, calls=5)
    monkeypatch.setattr("coatcheck.consumer.dramatiq.SECOND_MS", 1)
    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    try:
        charge.send(17)
        broker.join(charge.queue_name, timeout=20_000)
        assert ran == [17]
        charge.send(18)
        broker.join(charge.queue_name, timeout=20_000, fail_fast=False)
        assert ran == [17, 18, 18, 18]
    finally:
        worker.stop()
