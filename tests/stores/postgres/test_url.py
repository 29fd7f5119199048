"""The URL of a PostgreSQL store: our options, libpq's, and what asyncpg makes of them."""

import asyncio
from contextlib import closing

import pytest

from coatcheck import Misconfigured, StoreUnavailable
from coatcheck.stores import open_store
from coatcheck.stores.postgres.url import asyncpg_options, conninfo_of, parse_url
from tests.stores.postgres.access import FromLoop, sessions_of
from tests.stores.postgres.swaps import claim
from tests.support.servers.postgres import postgres

ENVIRONMENT = ("PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGOPTIONS", "PGSSLMODE", "PGSERVICE")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def options_of(url):
    conninfo, _ = parse_url(url)
    return asyncpg_options(conninfo_of(conninfo, 5.0), None)


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"]
)
def test_every_spelling_of_the_scheme_opens_the_same_store(url, scheme):
    with closing(open_store(url)) as store:
        store.swap([claim()])
    with closing(open_store(url.replace("postgresql", scheme, 1))) as store:
        assert store.swap([claim()]) != [None]


@pytest.mark.parametrize(
    ("rest", "named"),
    [("?timeout=soon", "timeout"), ("?colour=red", "colour"), ("?sslmode=perhaps", "sslmode")],
)
def test_an_unknown_option_is_refused_and_named(rest, named):
    with pytest.raises((Misconfigured, StoreUnavailable), match=named):
        open_store(postgres().url + rest)


def test_a_url_without_a_host_takes_it_from_the_options():
    """D1: as for a socket of this machine, `postgresql:///shop`."""
    port = postgres().port
    url = f"postgresql:///postgres?host=127.0.0.1&port={port}&user=postgres&schema=hostless"
    with FromLoop(url) as loop:
        assert loop.get(b"0" * 16) == [None]


def test_asyncpg_gets_hosts_settings_and_certificates_under_its_own_names():
    options = options_of(
        "postgresql://ann:p%40ss@one:1,two:2/shop?sslmode=verify-full&sslrootcert=/ca%20s.pem"
        "&options=-c%20jit%3Doff&application_name=shop&keepalives=1&schema=s&timeout=2s"
    )
    assert options["host"] == ["one", "two"]
    assert options["port"] == [1, 2]
    assert options["server_settings"] == {"application_name": "shop", "options": "-c jit=off"}
    for part in (
        *("user=ann", "password=p%40ss", "dbname=shop", "sslmode=verify-full"),
        *("sslrootcert=%2Fca%20s.pem", "target_session_attrs=read-write"),
    ):
        assert part in options["dsn"].partition("?")[2].split("&")


def test_one_port_serves_all_hosts_and_the_environment_counts(monkeypatch):
    monkeypatch.setenv("PGPORT", "7777")
    monkeypatch.setenv("PGOPTIONS", "-c search_path=shop")
    options = options_of("postgresql:///shop?host=one,two")
    assert (options["host"], options["port"]) == (["one", "two"], 7777)
    assert options["server_settings"]["options"] == "-c search_path=shop"
    assert options_of("postgresql:///shop")["host"] is None


@pytest.mark.parametrize(
    "option",
    ["channel_binding=require", "require_auth=md5", "service=shop", "sslrootcert=system"],
)
def test_an_option_that_asyncpg_does_not_have_is_not_ignored(option):
    """D1: event loops then go through threads."""
    assert options_of(f"postgresql://one/shop?{option}") is None
    assert options_of("postgresql://one/shop?channel_binding=prefer") is not None


def test_both_drivers_apply_the_settings_of_the_url(url):
    """D1: a schema of the search path, for instance, is the same for both."""
    named = f"{url}&application_name=both_drivers&options=-c%20lock_timeout%3D123ms"
    with FromLoop(named) as loop:
        loop.swap(claim())
        assert loop.fetch_on_writer("show lock_timeout")[0][0] == "123ms"
        with loop.store._maintenance as connection:
            assert connection.fetch("show lock_timeout") == [("123ms",)]
        assert len(sessions_of(url, "both_drivers")) == 2
        loop.runner.run(asyncio.sleep(0))
