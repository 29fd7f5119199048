"""What the tests of the Redis store share: swaps in short, a server that lies, and one with TLS."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from laws.records import claim_of, id_of

from coatcheck.core.record import Record, Swap
from coatcheck.stores import open_store
from coatcheck.stores.contract import HasWire, Wire


def claim(record: Record) -> Swap:
    return Swap(record.id, 0, record)


def change(before: Record, after: Record | None) -> Swap:
    return Swap(before.id, before.version, after)


def claims(start: int, count: int) -> list[Record]:
    return [claim_of(id_of(number)) for number in range(start, start + count)]


class WiredStore:
    """A store whose swaps and reads go over a wire, for tests that know no event loop."""

    def __init__(self, url: str) -> None:
        store = open_store(url)
        assert isinstance(store, HasWire)
        self._store = store
        self._runner = asyncio.Runner()
        self._wire = self._runner.run(self._wired())

    async def _wired(self) -> Wire:
        return self._store.wire()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        async def told() -> Sequence[Record | None]:
            return await self._wire.swap(swaps)

        return self._runner.run(told())

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        async def told() -> Sequence[Record | None]:
            return await self._wire.get(ids)

        return self._runner.run(told())

    def close(self) -> None:
        self._runner.run(self._wire.close())
        self._runner.close()
        self._store.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


HEALTHY = b"redis_version:7.0.0\r\naof_enabled:1\r\nrole:master"
Answer = Callable[[], bytes | None]


@contextmanager
def fake(answer: Answer) -> Iterator[str]:
    """A server that answers swaps as told, None being the end; its URL."""

    def listen() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection, answer), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=listen, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
        listening.shutdown(socket.SHUT_RDWR)


def talk(connection: socket.socket, answer: Answer) -> None:
    with connection, connection.makefile("rb") as lines:
        while head := lines.readline():
            lengths = range(int(head[1:]))
            words = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in lengths]
            told: bytes | None = b"+OK\r\n"
            if words[0] == b"INFO":
                told = b"$%d\r\n%b\r\n" % (len(HEALTHY), HEALTHY)
            elif words[0] in (b"EVALSHA", b"EVAL", b"SET"):
                told = answer()
            if told is None:
                return
            connection.sendall(told)


def sign_oneself(directory: Path) -> None:
    """A key and a certificate of localhost's, which nobody else vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (directory / "cert.pem").write_bytes(certificate.public_bytes(pem))
    secret = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    (directory / "key.pem").write_bytes(secret)
