"""Django for those who run the project: migrate, the commands, the admin and OpenAPI."""

import io
import json
import sqlite3
from contextlib import closing, redirect_stdout
from types import SimpleNamespace

import pytest

from tests.support import django_project

django_project.set_up()

from django.contrib.auth.models import User  # noqa: E402 - settings come first
from django.core.management import CommandError, call_command  # noqa: E402
from django.db import connections  # noqa: E402
from django.test import Client, override_settings  # noqa: E402

from coatcheck import DidNotHappen, Policy  # noqa: E402
from coatcheck.server.django import get_engine  # noqa: E402
from coatcheck.server.django.databases import url_of_database  # noqa: E402
from coatcheck.server.django.management.commands.coatcheck import Command  # noqa: E402
from coatcheck.server.django.openapi import state_guarded_views  # noqa: E402
from coatcheck.stores import Query  # noqa: E402
from coatcheck.stores.mysql.url import parse_url as parse_mysql  # noqa: E402
from coatcheck.stores.postgres.url import parse_url as parse_postgres  # noqa: E402
from coatcheck.stores.sqlite.url import parse_url as parse_sqlite  # noqa: E402

SECRET = "only in the stored body"


class Site:
    """A project on a database of its own."""

    def __init__(self, path):
        self.path = path
        self.alias = django_project.add_database(
            {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
        )

    def migrate(self, using=None):
        with redirect_stdout(io.StringIO()) as printed:
            call_command("migrate", database=using or self.alias)
        return printed.getvalue()

    def tables(self):
        with closing(sqlite3.connect(self.path)) as connection:
            rows = connection.execute("select name from sqlite_master where type = 'table'")
            return {name for (name,) in rows}


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "orders.db")
    settings = {"ROOT_URLCONF": "tests.server.django_shop", "COATCHECK": {"store": site.alias}}
    with override_settings(**settings):
        yield site
    connections[site.alias].close()


def post(path="/plain", key="k-1"):
    headers = {"Idempotency-Key": key}
    return Client().post(path, {"item": SECRET}, content_type="application/json", headers=headers)


# --- migrate ----------------------------------------------------------------------------------


def test_migrate_creates_the_tables_in_the_database_of_the_store_only(site, tmp_path):
    """D4: with the store's own schema code."""
    other = Site(tmp_path / "other.db")
    assert "coatcheck" not in "".join(other.tables())
    other.migrate()
    assert not [name for name in other.tables() if name.startswith("coatcheck_")]
    assert "created, schema version" in site.migrate()
    assert [name for name in site.tables() if name.startswith("coatcheck_")]
    assert "up to date" in site.migrate()
    connections[other.alias].close()


class Elsewhere:
    """A router that keeps our tables out of every database."""

    def allow_migrate(self, db, app_label, **hints):
        return app_label != "coatcheck"


def test_migrate_asks_the_routers_of_the_project(site):
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.Elsewhere"]):
        site.migrate()
    assert not [name for name in site.tables() if name.startswith("coatcheck_")]


@pytest.mark.parametrize(
    ("database", "parse", "expected"),
    [
        (
            {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": "/srv/a b?.db",
                "OPTIONS": {"timeout": 20},
            },
            parse_sqlite,
            ("/srv/a b?.db", {"busy_timeout_s": 20.0}),
        ),
        (
            {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": "shop",
                "USER": "a@b",
                "PASSWORD": "p/w:d",
                "HOST": "/run/postgresql",
                "OPTIONS": {"sslmode": "require", "pool": True, "assume_role": "owner"},
            },
            parse_postgres,
            (
                "postgresql://a%40b:p%2Fw%3Ad@?dbname=shop&host=%2Frun%2Fpostgresql&sslmode=require",
                {},
            ),
        ),
    ],
    ids=["sqlite", "postgresql"],
)
def test_the_url_of_the_store_says_what_the_database_says(database, parse, expected):
    assert parse(url_of_database(django_project.add_database(database))) == expected


def test_the_url_of_a_mysql_database_says_what_the_database_says(tmp_path):
    from tests.transactions.idioms import _django_settings_of_mysql

    place = {"database": "sh op", "user": "a@b", "host": "::1", "port": 3307}
    database = _django_settings_of_mysql(place) | {"PASSWORD": "p/w"}
    server = parse_mysql(url_of_database(django_project.add_database(database))).server
    assert (server.host, server.port, server.user) == ("::1", 3307, "a@b")
    assert (server.password, server.database) == ("p/w", "sh op")


# --- commands ---------------------------------------------------------------------------------


def test_the_commands_run_on_the_store_of_the_project(site, capsys):
    """O1: by `call_command`, and from the command line with its exit code."""
    site.migrate()
    reference = post().headers["Idempotency-Reference"]
    capsys.readouterr()
    call_command("coatcheck", "lookup", reference, "--json")
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["reference"], facts["label"]) == (reference, "POST /plain")
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "coatcheck", "lookup", "7D3F-92AB-1C4E"])
    assert ended.value.code == 1
    with pytest.raises(CommandError, match="code 2"):
        call_command("coatcheck", "no-such-command")
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "coatcheck", "--help"])
    assert ended.value.code == 0
    assert "Usage: manage.py coatcheck" in capsys.readouterr().out


def test_the_commands_say_that_a_store_in_memory_is_nowhere_else(capsys):
    with override_settings(COATCHECK={"store": "memory://"}):
        with pytest.raises(SystemExit) as ended:
            Command().run_from_argv(["manage.py", "coatcheck", "list"])
        assert ended.value.code == 2
    assert "in the memory of its processes" in capsys.readouterr().err


# --- the admin --------------------------------------------------------------------------------


@pytest.fixture
def admin(site):
    call_command("migrate", verbosity=0)
    user = User.objects.create_superuser("root")
    client = Client()
    client.force_login(user)
    yield client
    user.delete()


def test_the_admin_lists_operations_and_finds_them_by_reference_and_key(site, admin):
    """K5, O3: without any body."""
    references = [post(key=key).headers["Idempotency-Reference"] for key in ("k-1", "k-2")]
    page = admin.get("/admin/coatcheck/operation/").content.decode()
    assert all(reference in page for reference in references)
    for text in (references[0], "k-1"):
        page = admin.get("/admin/coatcheck/operation/", {"q": text}).content.decode()
        assert references[0] in page
        assert references[1] not in page
        assert "status 201" in page
        assert SECRET not in page
    assert "No operations found" in admin.get("/admin/coatcheck/operation/?q=k-3").content.decode()
    page = admin.get(f"/admin/coatcheck/operation/{references[1]}/change/").content.decode()
    assert references[1] in page


def test_the_admin_changes_nothing_and_says_how_to(site, admin):
    """O2: read-only; it shows the command that settles an operation in doubt."""
    with override_settings(COATCHECK={"store": site.alias, "policy": Policy(recovery="manual")}):
        Client(raise_request_exception=False).post(
            "/fails", {}, content_type="application/json", headers={"Idempotency-Key": "k-9"}
        )
        (record,) = get_engine().store.find(Query()).records
        page = admin.get("/admin/coatcheck/operation/?q=k-9").content.decode()
        assert "in doubt" in page
        assert "manage.py coatcheck resolve" in page
        assert admin.get("/admin/coatcheck/operation/add/").status_code == 403
        assert admin.post("/admin/coatcheck/operation/", {"action": "delete"}).status_code == 200
        get_engine().resolve(record.id, DidNotHappen(), by="ada", why="looked")


def test_the_admin_needs_a_user_who_may_see_operations(site, admin):
    """X3."""
    user = User.objects.create(username="staff", is_staff=True)
    client = Client()
    assert client.get("/admin/coatcheck/operation/").status_code == 302
    client.force_login(user)
    assert client.get("/admin/coatcheck/operation/").status_code == 403
    user.delete()


def test_the_admin_says_that_the_store_is_down(admin):
    with override_settings(COATCHECK={"store": "postgresql://127.0.0.1:1/none"}):
        page = admin.get("/admin/coatcheck/operation/")
    assert page.status_code == 200
    assert "The store is unavailable" in page.content.decode()


# --- OpenAPI ----------------------------------------------------------------------------------


def test_the_document_states_the_header_and_the_refusals_of_guarded_views(site):
    """V3: of view sets, actions and functions; nothing of what is not guarded."""
    from drf_spectacular.settings import spectacular_settings

    hooks = ["coatcheck.server.django.openapi.state_guarded_views"]
    quiet = {"POSTPROCESSING_HOOKS": hooks, "DISABLE_ERRORS_AND_WARNINGS": True}
    spectacular_settings.apply_patches(quiet)
    try:
        document = json.loads(Client().get("/schema?format=json").content)
    finally:
        spectacular_settings.clear_patches()
    paths = document["paths"]
    for path in ("/orders/", "/orders/{id}/pay/", "/under-api-view", "/restricted"):
        operation = paths[path]["post"]
        (header,) = [one for one in operation["parameters"] if one["in"] == "header"]
        assert (header["name"], header["required"]) == ("Idempotency-Key", True)
        assert {"400", "409", "422", "503"} <= set(operation["responses"])
        problem = operation["responses"]["409"]["content"]["application/problem+json"]
        assert problem["schema"] == {"$ref": "#/components/schemas/Problem"}
    update = paths["/orders/{id}/"]["put"]
    assert "422" not in update["responses"]
    assert document["components"]["schemas"]["Problem"]["properties"]["retry"]


def test_a_view_is_not_taken_for_another_whose_path_ends_like_its_own(site):
    """V3: drf-spectacular names parameters after fields, and may leave out a prefix."""
    paths = {"/": {"get": {}}, "/{id}/": {"post": {}}, "/orders/{id}/": {"post": {}}}
    views = SimpleNamespace(endpoints=[("/shop/orders/{pk}/", "", "POST", object())])
    stated = state_guarded_views({"paths": paths}, views)["paths"]
    assert "parameters" in stated["/orders/{id}/"]["post"]
    assert stated["/{id}/"] == paths["/{id}/"]
