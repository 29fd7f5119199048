"""Bodies of requests, read once: every attempt sends the same bytes.

A body that is bytes already is sent as it is. A generator or a stream is copied at the first
attempt, to memory and from 1 MiB on to a temporary file.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from coatcheck.errors import BodyNotRepeatable

MIB = 1024 * 1024
# 1 MiB in memory: larger bodies are files, which are on a disk already.
MEMORY_BYTES_MAX = MIB
# 1 GiB: copies of larger uploads fill disks. Send those without a key, or in parts.
BODY_BYTES_MAX = 1024 * MIB
_CHUNK_BYTES = 64 * 1024


class BodyCopy:
    """Collects a body; closed when it is no longer used."""

    def __init__(self, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115 - see finalize
        self._bytes_max = bytes_max
        self.bytes = 0
        # A redirect sends the body again after the call that copied it has ended.
        weakref.finalize(self, self._file.close)

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append *chunk*; raises `BodyNotRepeatable` over the limit."""
        self.bytes += len(chunk)
        if self.bytes > self._bytes_max:
            raise BodyNotRepeatable(
                f"the body has more than {self._bytes_max} bytes, so it cannot be kept for "
                "retries: send it in parts, or without a key"
            )
        try:
            self._file.write(bytes(chunk))
        except OSError as error:
            raise BodyNotRepeatable(f"the body cannot be kept for retries: {error}") from error

    @property
    def is_small(self) -> bool:
        """Whether it is held in memory."""
        return self.bytes <= MEMORY_BYTES_MAX

    def content(self) -> bytes:
        """The whole body."""
        self._file.seek(0)
        return self._file.read()

    def chunks(self) -> Iterator[bytes]:
        """The body, from its beginning."""
        place = 0
        while True:  # seeks each time: two attempts never read at the same time, but one may stop
            self._file.seek(place)
            chunk = self._file.read(_CHUNK_BYTES)
            if not chunk:
                return
            place += len(chunk)
            yield chunk


class BodyReader:
    """Reads a copy from its beginning, for libraries that want a file."""

    def __init__(self, copy: BodyCopy) -> None:
        self.copy = copy
        self._chunks = copy.chunks()
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """The next *size* bytes; fewer at the end, and all with -1."""
        while size < 0 or len(self._rest) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        size = len(self._rest) if size < 0 else size
        part, self._rest = self._rest[:size], self._rest[size:]
        return part


def copied(chunks: Iterable[bytes]) -> BodyCopy:
    """A copy of the body that *chunks* yield."""
    copy = BodyCopy()
    for chunk in chunks:
        copy.add(chunk)
    return copy


async def copied_async(chunks: AsyncIterable[bytes]) -> BodyCopy:
    """The same, for an event loop."""
    copy = BodyCopy()
    async for chunk in chunks:
        copy.add(chunk)
    return copy


class CopiedStream:
    """A stream of the body in *copy* that can be read again and again, in threads and loops."""

    def __init__(self, copy: BodyCopy) -> None:
        self._copy = copy

    def __iter__(self) -> Iterator[bytes]:
        return self._copy.chunks()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._copy.chunks():
            yield chunk
