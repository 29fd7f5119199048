"""Django in transaction mode: the record and what a view writes are in one commit."""

import asyncio
import itertools
import threading

import pytest

from tests.support import django_project

django_project.set_up()

from django.core.management import call_command  # noqa: E402 - settings come first
from django.db import connections  # noqa: E402
from django.test import AsyncClient, Client, override_settings  # noqa: E402

from coatcheck.server.django.databases import url_of_database  # noqa: E402
from tests.server import django_shop  # noqa: E402
from tests.transactions.idioms import SHOPS, django_settings  # noqa: E402

NUMBERS = itertools.count(1)


class Project:
    """A project whose store is in the database of a shop."""

    def __init__(self, shop, alias, is_async):
        self.shop = shop
        self.alias = alias
        make = AsyncClient if is_async else Client
        self._client = make(raise_request_exception=False)
        self._is_async = is_async

    def post(self, end, key, number, **more):
        body, headers = {"number": number, **more}, {"Idempotency-Key": key}
        sent = self._client.post(
            f"/tx/{end}", body, content_type="application/json", headers=headers
        )
        return asyncio.run(sent) if self._is_async else sent

    def twice(self, end):
        """Send a request and its retry: their statuses, and whether the second is a replay."""
        number = next(NUMBERS)
        key = f"key-{number}"
        first, second = (self.post(end, key, number) for _ in range(2))
        self.number = number
        return first.status_code, second.status_code, "Idempotent-Replayed" in second.headers


# Every flavour on SQLite, and each of them once on the other databases.
FLAVOURS = [
    *(("sqlite", flavour) for flavour in ("sync", "async", "sync atomic", "async atomic")),
    *(("postgres", flavour) for flavour in ("async", "sync atomic")),
    *(("mysql", flavour) for flavour in ("sync", "async atomic")),
]


@pytest.fixture(scope="module", params=FLAVOURS, ids=" ".join)
def flavour(request):
    return request.param


@pytest.fixture(scope="module")
def shop(flavour, tmp_path_factory):
    return SHOPS[flavour[0]](tmp_path_factory.mktemp("shop"))


@pytest.fixture
def database(shop, flavour):
    """The alias of the shop's database, which may have ATOMIC_REQUESTS."""
    database = django_settings(shop) | {"ATOMIC_REQUESTS": "atomic" in flavour[1]}
    alias = django_project.add_database(database)
    yield alias
    connections[alias].close()
    del connections.settings[alias]


@pytest.fixture
def project(shop, database, flavour):
    shop.ask("delete from orders")
    django_shop.CALLS.clear()
    django_shop.HOOKS.clear()
    with override_settings(ROOT_URLCONF="tests.server.django_shop", COATCHECK={"store": database}):
        yield Project(shop, database, "async" in flavour[1])


def test_a_database_of_the_project_is_the_store_without_another_configuration(shop, database):
    """D4: `manage.py migrate` creates the tables, and can be repeated."""
    with override_settings(COATCHECK={"store": database}):
        for _ in range(2):
            call_command("migrate", "coatcheck", database=database, verbosity=0, run_syncdb=True)
    assert shop.records() >= 0
    assert url_of_database(database).split(":")[0] == shop.store.split(":")[0]


def test_a_success_is_committed_once_and_its_functions_run_after_the_commit(project):
    """L9: also with another block of `atomic` in the view."""
    for end in ("placed", "inner"):
        assert project.twice(end) == (201, 201, True)
        assert project.number in project.shop.orders()
    assert len(django_shop.CALLS) == 2
    assert django_shop.HOOKS == [False, False]


@pytest.mark.parametrize(("end", "status"), [("declined", 402), ("missing", 404), ("poor", 402)])
def test_a_refusal_is_undone_and_replayed_however_the_view_makes_it(project, end, status):
    """L9: a returned response, Http404, an exception of DRF."""
    assert project.twice(end) == (status, status, True)
    assert (project.shop.orders(), len(django_shop.CALLS)) == ([], 1)
    assert django_shop.HOOKS == []


@pytest.mark.parametrize(("end", "status"), [("failed", 500), ("denied", 403)])
def test_what_is_no_answer_leaves_nothing_and_runs_again(project, end, status):
    """L9, L4: an error of the view, and a refusal that frees the key."""
    assert project.twice(end) == (status, status, False)
    assert (project.shop.orders(), len(django_shop.CALLS)) == ([], 2)
    assert django_shop.HOOKS == []
    assert project.twice("placed") == (201, 201, True)  # and the connection works


def test_a_view_may_choose_to_commit_every_answer_that_is_kept(project):
    """L9: `commit="kept"`."""
    assert project.twice("kept") == (402, 402, True)
    assert (project.shop.orders(), django_shop.HOOKS) == ([project.number], [False])


def test_an_async_view_writes_in_the_transaction(project):
    """L9: its calls of the database run in the thread of the transaction."""
    if connections.settings[project.alias]["ATOMIC_REQUESTS"]:
        return  # which Django refuses for async views
    assert project.twice("async") == (201, 201, True)
    assert project.shop.orders() == [project.number]
    assert django_shop.HOOKS == [False]


def test_of_simultaneous_requests_one_writes(project):
    """L1, L9."""
    number = next(NUMBERS)
    statuses = []

    def send():
        sender = Project(project.shop, project.alias, project._is_async)
        statuses.append(sender.post("placed", f"same-{number}", number).status_code)
        connections[project.alias].close()

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [201] * 5
    assert project.shop.orders() == [number]


@pytest.fixture
def others(tmp_path):
    """Two more databases, of which the second has ATOMIC_REQUESTS."""
    shops = [SHOPS["sqlite"](tmp_path) for _ in range(2)]
    aliases = [
        django_project.add_database(django_settings(shop) | {"ATOMIC_REQUESTS": bool(number)})
        for number, shop in enumerate(shops)
    ]
    yield dict(zip(aliases, shops, strict=True))
    for alias in aliases:
        connections[alias].close()
        del connections.settings[alias]


def test_only_the_database_of_the_store_is_in_the_transaction(project, others):
    """L9: the others commit as they do without us: before ours, or not, if the view raises."""
    number = next(NUMBERS)
    project.post("failed", f"key-{number}", number, others=[*others])
    assert [shop.orders() for shop in others.values()] == [[1], []]
    assert project.shop.orders() == []
    plain, atomic = others
    answer = project.post("declined", f"key-{number}-2", number, others=[atomic])
    assert (answer.status_code, project.shop.orders()) == (402, [])
    assert others[atomic].orders() == [1]
    assert project.post("placed", f"key-{number}-3", number).status_code == 201
    assert (project.shop.orders(), others[plain].orders()) == ([number], [1])
