"""URLs of the MySQL store, logging in, and TLS."""

import asyncio
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from coatcheck import AsyncEngine, Engine, current_operation
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import migrate_store, open_store
from tests.stores.laws.records import claim_of
from tests.stores.mysql.support import claim, in_every_mode, other_session, query
from tests.support.servers.mariadb import Mariadb


def test_a_permanent_error_is_raised_when_the_store_is_opened(url):
    """D2: and says what to do about it, without the password."""
    bare, _, _ = url.partition("?")
    with other_session(url) as root:
        query(root, "create user stranger identified by 'none'")
    wrong = {
        bare.replace("root@", "root:s3cret@"): "refuses the user or the password",
        bare + "_missing": "there is no such database",
        bare.replace("root@", "stranger:none@"): "may not use this database",
        bare + "?ssl=1": "offers no TLS",
    }
    for other, words in wrong.items():
        with pytest.raises(Misconfigured, match=words) as caught:
            open_store(other)
        assert "s3cret" not in str(caught.value)
        assert bare.rpartition("/")[2] in str(caught.value)
    with other_session(url) as root:
        query(root, "drop user stranger")


def test_a_server_that_accepts_and_never_answers_is_an_outage():
    """D2."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StoreUnavailable, match="no answer in time"),
    ):
        open_store(f"mysql://root@127.0.0.1:{silent.getsockname()[1]}/shop?timeout=100ms")


@pytest.mark.parametrize("scheme", ["mysql+pymysql", "mariadb"])
def test_the_schemes_of_other_libraries_name_the_same_store(url, scheme):
    """D1: in every mode; the URL of SQLAlchemy can be used as it is."""
    other = url.replace("mysql://", f"{scheme}://")
    assert in_every_mode(url, "a") == ["a"] * 4
    assert in_every_mode(other, "a", "again") == ["a"] * 4
    assert migrate_store(other).found == 1
    with pytest.raises(Misconfigured, match="must be mysql://user"):
        open_store(f"{scheme}://shop")


AS_MYSQLDB = """
import pymysql
pymysql.version_info = (2, 2, 1, "final", 0)
pymysql.install_as_MySQLdb()
import django.db.backends.mysql.base
is_one_class = pymysql.OperationalError is pymysql.err.OperationalError
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import open_store
from tests.support.servers.mariadb import is_answered
try:
    open_store("mysql://root@127.0.0.1:1/shop?timeout=1s")
except StoreUnavailable:
    print(is_one_class, is_answered(1))
"""


def test_errors_are_recognised_where_django_uses_pymysql_as_mysqldb():
    """D2: PyMySQL's own modules are then imported twice, and `pymysql.err` has other classes."""
    command = [sys.executable, "-c", AS_MYSQLDB]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_names_and_passwords_may_hold_anything(url):
    """D1: percent-encoded, as in any URL."""
    port_and_name = url.partition("@")[2]
    with other_session(url) as root:
        query(root, "create user 'ann@home' identified by 'p@ss/wörd#'")
        query(root, "grant all on *.* to 'ann@home'")
    named = f"mysql://ann%40home:p%40ss%2Fw%C3%B6rd%23@{port_and_name}"
    with closing(open_store(named)) as store:
        assert store.swap([claim()]) == [None]
    assert in_every_mode(named, "a") == ["a"] * 4
    with other_session(url) as root:
        query(root, "drop user 'ann@home'")


def test_a_connection_is_encrypted_and_verified_if_the_url_says_so(tmp_path):
    """X3: by the named certificate; a server that cannot show it is not connected to."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    server = Mariadb(**{"ssl-key": str(key), "ssl-cert": str(certificate)})
    try:
        bare, _, _ = server.fresh_url().partition("?")
        server.ask("create user tls require ssl", "grant all on *.* to tls")
        encrypted = bare.replace("root@", "tls@")
        with closing(open_store(f"{encrypted}?ssl_ca={certificate}")) as store:
            assert store.swap([claim()]) == [None]
        with closing(open_store(encrypted)) as store:
            assert store.swap([claim()]) == [claim_of()]
        with pytest.raises(Misconfigured, match="refuses the user"):
            open_store(f"{encrypted}?ssl=0")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            open_store(f"{bare}?ssl=1")
        for options in (f"?ssl_ca={certificate}", "", "?ssl=0"):
            ciphers = asyncio.run(ciphers_of_transactions(bare + options))
            assert list(map(bool, ciphers)) == [options != "?ssl=0"] * 2
    finally:
        server.remove()


async def ciphers_of_transactions(url):
    """What connections of the store's own are encrypted with, for sync and for async code."""
    cipher = "show session status like 'Ssl_cipher'"

    async def work():
        async with current_operation().connection.cursor() as cursor:
            await cursor.execute(cipher)
            return (await cursor.fetchone())[1]

    with Engine(url) as engine:
        found = engine.transaction(
            url, lambda: query(current_operation().connection, cipher)[0][1], scope="sync"
        )
    async with AsyncEngine(url) as engine:
        return [found, await engine.transaction(url, work, scope="async")]
