"""L9 on Django's connections: a whole site of its own, with what it does around each request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transactions.idioms import SHOPS, django_settings

SITE = Path(__file__).with_name("django_site.py")
IS_ATOMIC = pytest.mark.parametrize("is_atomic", [False, True], ids=["plain", "atomic"])
AGES = pytest.mark.parametrize("age_s", [0, 600])


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request, tmp_path):
    return SHOPS[request.param](tmp_path)


@pytest.fixture(scope="module")
def play():
    """Posts orders to two nodes in turn; what comes of it."""
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, SITE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as site:

        def play(shop, *orders, is_atomic=False, age_s=0, **watch):
            database = django_settings(shop)
            database |= {"ATOMIC_REQUESTS": is_atomic, "CONN_MAX_AGE": age_s}
            scene = {"database": database, "store": shop.store, "orders": orders, **watch}
            site.stdin.write(json.dumps(scene) + "\n")
            site.stdin.flush()
            seen = json.loads(site.stdout.readline())
            assert "failed" not in seen, seen["failed"]
            return seen

        yield play


@IS_ATOMIC
@AGES
def test_a_site_commits_record_and_effect_of_its_views_together(shop, play, is_atomic, age_s):
    """L9: Django closes what is in a transaction when a request starts, but not ours."""
    order = ("/place", 1)
    seen = play(shop, order, order, order, is_atomic=is_atomic, age_s=age_s)
    assert seen["answers"] == [201, 201, 201]
    assert seen["runs"] == ["/place"]
    assert seen["hooks"] == [False]  # once, and after the commit
    assert (shop.orders(), shop.records()) == ([1], 1)
    # Afterwards it is closed or kept as after any other request, a replay too.
    assert seen["is_open"] == [age_s > 0] * 3


@IS_ATOMIC
@AGES
def test_a_view_that_fails_leaves_nothing_and_the_site_goes_on(shop, play, is_atomic, age_s):
    """L9, L6: its functions for on_commit() are not called either."""
    orders = [("/fail", 1), ("/fail", 1), ("/place", 2)]
    seen = play(shop, *orders, is_atomic=is_atomic, age_s=age_s)
    assert seen["answers"] == [500, 500, 201]
    assert seen["runs"] == ["/fail", "/fail", "/place"]
    assert seen["hooks"] == [False]
    assert (shop.orders(), shop.records()) == ([2], 1)
    assert seen["is_open"] == [age_s > 0] * 3


@IS_ATOMIC
@pytest.mark.parametrize(("where", "status"), [("/decline", 402), ("/taken", 409)])
def test_a_view_that_refuses_is_undone_and_replayed(shop, play, is_atomic, where, status):
    """L9: its functions for on_commit() are not called, and the site goes on."""
    seen = play(shop, (where, 1), (where, 1), ("/place", 2), is_atomic=is_atomic)
    assert seen["answers"] == [status, status, 201]
    assert seen["runs"] == [where, "/place"]
    assert seen["hooks"] == [False]  # of the last one
    assert (shop.orders(), shop.records()) == ([2], 2)


@pytest.mark.parametrize("watch", ["debug", "is_captured"])
def test_a_site_may_log_its_queries(shop, play, watch):
    """L9: with DEBUG, or in its tests, Django spells each query out with its values."""
    first, second = ("/place", 1), ("/place", 2)
    seen = play(shop, first, first, ("/fail", 2), second, **{watch: True})
    assert seen["answers"] == [201, 201, 500, 201]
    assert (shop.orders(), shop.records()) == ([1, 2], 2)
    if watch == "is_captured":
        ours = [query for query in seen["queries"] if "coatcheck_records" in query]
        assert len([query for query in ours if query.lower().startswith("update")]) == 2
        assert any("order-1" in query for query in ours)


@IS_ATOMIC
def test_what_fails_after_the_commit_does_not_unsay_it(shop, play, is_atomic):
    """L9: record and effect are there, so the answer that a retry would get is given at once."""
    seen = play(shop, ("/hook", 1), ("/hook", 1), ("/place", 2), is_atomic=is_atomic)
    assert seen["answers"] == [201, 201, 201]
    assert seen["runs"] == ["/hook", "/place"]
    assert seen["hooks"] == [False, False]
    assert (shop.orders(), shop.records()) == ([1, 2], 2)
