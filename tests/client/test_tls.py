"""TLS: a wrong certificate is not retried; a connection that breaks off is."""

import datetime as dt
import socket
import ssl
import struct
import threading
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coatcheck.client import RetryPolicy
from tests.client.drivers import DRIVERS
from tests.support.faulty_server import FaultyServer

on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)
TWICE = RetryPolicy(attempts_max=2)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The path of a self-signed certificate for another host, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elsewhere.example")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    plain = serialization.NoEncryption()
    kind = serialization.PrivateFormat.PKCS8
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, kind, plain)
    )
    return path


@on_all
def test_a_wrong_certificate_is_not_retried_and_nothing_can_have_happened(driver, certificate):
    """C1, C-18: the error of the library has a result."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with FaultyServer() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        got = driver.post(server.url.replace("http:", "https:"), json={})
    assert isinstance(got.error, driver.errors)
    assert (got.result.outcome, got.result.gave_up) == ("refused", "cannot-send")
    assert got.result.attempts == 1
    assert server.seen == []
    assert any("cannot have got the request" in note for note in got.error.__notes__)


class BrokenTls:
    """Accepts connections and resets each one when its handshake has begun."""

    def __enter__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            with suppress(OSError):
                client.recv(1)
            if self.connections % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()

    def __exit__(self, *error):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()


@on_all
def test_a_tls_connection_that_breaks_off_is_tried_again(driver):
    """C1, C-10: also if the library takes it for an error of TLS."""
    with BrokenTls() as server:
        got = driver.post(server.url, json={}, retry=TWICE)
    assert isinstance(got.error, driver.errors)
    assert (got.result.attempts, got.result.gave_up) == (2, "attempts")
    assert server.connections == 2


@on_all
def test_a_url_of_another_kind_is_refused_by_the_library(driver):
    """C-18: where the client is asked at all, the error has a result."""
    got = driver.post("gopher://host/", json={})
    assert isinstance(got.error, driver.errors)
    if not driver.is_aiohttp and not driver.is_transport:
        assert (got.result.outcome, got.result.gave_up) == ("refused", "cannot-send")
