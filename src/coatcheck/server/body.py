"""Request bodies: needed whole before the claim, so kept small in memory.

What is larger than a megabyte goes to a temporary file where there is room for one, and what is
larger than the policy allows is refused before anything runs.
"""

from __future__ import annotations

import io
import logging
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

logger = logging.getLogger("coatcheck")

# 1 MiB in memory for each request: a thousand at once is a gigabyte, which a server survives.
MEMORY_BYTES_MAX = 1024 * 1024
CHUNK_BYTES = 64 * 1024


class Body:
    """A request body that grows while it is read, and is then given out any number of times."""

    __slots__ = ("__weakref__", "_chunks", "_file", "_is_unspoolable", "_spooled", "size", "whole")

    def __init__(self, chunk: bytes = b"") -> None:
        # All of it, where it is in memory and in one piece, as most are; then nothing is to close.
        self.whole: bytes | None = chunk
        self.size = len(chunk)
        self._file: io.BufferedRandom | None = None
        self._is_unspoolable = False
        if self.size > MEMORY_BYTES_MAX:
            self._chunks, self.whole = [chunk], None
            self._spool()

    @property
    def is_large(self) -> bool:
        """To read it again takes its time."""
        return self.size > MEMORY_BYTES_MAX

    def add(self, chunk: bytes) -> None:
        """Take another piece."""
        if self.whole is not None:
            self._chunks, self.whole = [self.whole], None
        self.size += len(chunk)
        self._chunks.append(chunk)
        if self.size > MEMORY_BYTES_MAX and not self._is_unspoolable:
            self._spool()

    def _spool(self) -> None:
        """Bring what is in memory to the file; where that cannot be, all of it stays in memory."""
        try:
            if self._file is None:
                self._spooled = 0  # bytes in the file
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
                # A `caller=` or `key=` function of the user's may raise before anybody closes it.
                weakref.finalize(self, self._file.close)
            self._file.writelines(self._chunks)
            self._file.flush()
        except OSError as error:  # no place for files, or no room; memory is bounded, too
            logger.warning("a body of over a megabyte stays in memory: %s", error)
            self._is_unspoolable = True
            if self._file is not None:
                self._chunks.insert(0, _taken_back(self._file, self._spooled))
                self._file = None
        else:
            self._spooled = self.size
            self._chunks.clear()

    def bytes_or_chunks(self) -> bytes | Iterator[bytes]:
        """All of it where it is in memory, else piece by piece."""
        if self._file is not None:
            return self.chunks()
        if self.whole is None:
            self.whole = b"".join(self._chunks)
        return self.whole

    def chunks(self) -> Iterator[bytes]:
        """Piece by piece, from the start."""
        if self._file is None:
            yield from (self._chunks if self.whole is None else (self.whole,))
            return
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            yield chunk

    def messages(self) -> Iterator[tuple[bytes, bool]]:
        """Piece by piece, each with whether more follows; at least one, perhaps empty."""
        before = b""
        for chunk in self.chunks():
            if before:
                yield before, True
            before = chunk
        yield before, False

    def stream(self) -> IO[bytes] | None:
        """The file it is in, at its start; None where it is in memory."""
        if self._file is not None:
            self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


def _taken_back(file: io.BufferedRandom, size: int) -> bytes:
    """The first *size* bytes of *file*, which takes no more."""
    file.raw.seek(0)  # not `file` itself: it would first try again to write what it has not
    taken = file.raw.readall()[:size]
    with suppress(OSError):
        file.close()
    return taken
