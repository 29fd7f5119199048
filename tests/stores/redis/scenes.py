"""What the tests of the Redis store share: short swaps, a fake server, and a TLS certificate."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import open_store
from coatcheck.stores.redis.async_backend import RedisBackend
from coatcheck.stores.redis.store import RedisStore
from tests.stores.laws.records import claim_of, id_of


def claim(record: Record) -> Swap:
    return Swap(record.id, 0, record)


def change(before: Record, after: Record | None) -> Swap:
    return Swap(before.id, before.version, after)


def claims(start: int, count: int) -> list[Record]:
    return [claim_of(id_of(number)) for number in range(start, start + count)]


class LoopStore:
    """
    A store whose swaps and reads go through its async backend, for tests without an event loop.

    Like the batcher, it cancels a call that takes longer than the store's timeout.
    """

    def __init__(self, url: str) -> None:
        store = open_store(url)
        assert isinstance(store, RedisStore)
        self._store = store
        self._runner = asyncio.Runner()
        self._backend = self._runner.run(self._open())

    async def _open(self) -> RedisBackend:
        backend = self._store.async_backend()
        assert isinstance(backend, RedisBackend)
        return backend

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        return self._runner.run(self._limited(self._backend.swap, swaps, is_ambiguous=True))

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        return self._runner.run(self._limited(self._backend.get, ids, is_ambiguous=False))

    async def _limited(self, call: Callable[..., Any], argument: object, *, is_ambiguous: bool):
        for _ in range(2):  # as a loop that runs all the time: notice what the server closed
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self._backend.timeout_s):
                return await call(argument)
        except TimeoutError as error:
            raise StoreUnavailable("no answer in time", is_ambiguous=is_ambiguous) from error

    def close(self) -> None:
        self._runner.run(self._backend.close())
        self._runner.close()
        self._store.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


HEALTHY = b"redis_version:7.0.0\r\naof_enabled:1\r\nrole:master"
Answer = Callable[[], bytes | None]


@contextmanager
def fake(answer: Answer) -> Iterator[str]:
    """Run a server that answers swaps with *answer* (None: it disconnects); return its URL."""

    def listen() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection, answer), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=listen, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
        listening.shutdown(socket.SHUT_RDWR)


def serve(connection: socket.socket, answer: Answer) -> None:
    with connection, connection.makefile("rb") as lines:
        while head := lines.readline():
            lengths = range(int(head[1:]))
            words = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in lengths]
            reply: bytes | None = b"+OK\r\n"
            if words[0] == b"INFO":
                reply = b"$%d\r\n%b\r\n" % (len(HEALTHY), HEALTHY)
            elif words[0] in (b"EVALSHA", b"EVAL"):
                reply = answer()
            if reply is None:
                return
            connection.sendall(reply)


def sign_oneself(directory: Path) -> None:
    """Write a key and a self-signed certificate for localhost."""
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
