"""Request bodies: needed whole before the claim, so kept small in memory.

What is larger than a megabyte goes to a temporary file where there can be one, and what is larger
than the policy allows is refused before anything runs.
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO

logger = logging.getLogger("coatcheck")

# 1 MiB in memory for each request: a thousand at once is a gigabyte, which a server survives.
MEMORY_BYTES_MAX = 1024 * 1024
CHUNK_BYTES = 64 * 1024


class Body:
    """A request body that grows while it is read, and is then given out any number of times."""

    __slots__ = ("__weakref__", "_chunks", "_file", "_is_unspoolable", "size", "whole")

    def __init__(self, chunk: bytes = b"") -> None:
        # All of it, where it is in memory and in one piece, as most are; then nothing is to close.
        self.whole: bytes | None = chunk
        self.size = len(chunk)
        self._file: IO[bytes] | None = None
        self._is_unspoolable = False
        if self.size > MEMORY_BYTES_MAX:
            self._chunks = [chunk]
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
        if self._file is not None:
            self._file.write(chunk)
            return
        self._chunks.append(chunk)
        if self.size > MEMORY_BYTES_MAX and not self._is_unspoolable:
            self._spool()

    def _spool(self) -> None:
        self.whole = None
        try:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        except OSError as error:  # a container may have no place for files; memory is bounded, too
            logger.warning("a body of over a megabyte stays in memory: %s", error)
            self._is_unspoolable = True
            return
        self._file = file
        file.writelines(self._chunks)
        self._chunks.clear()
        # A `caller=` or `key=` function of the user's may raise before anybody closes it.
        weakref.finalize(self, self._file.close)

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
