"""Request bodies: the fingerprint needs the whole body before the claim.

A body of up to a megabyte is bytes. A larger one is a `LargeBody`, in a temporary file. A body over
the policy's limit is refused before anything runs.
"""

from __future__ import annotations

import io
import logging
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, TypeAlias

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem

logger = logging.getLogger("coatcheck")

# 1 MiB in memory for each request: a thousand at once is a gigabyte, which a server survives.
MEMORY_BYTES_MAX = 1024 * 1024
CHUNK_BYTES = 64 * 1024


class LargeBody:
    """A body of over a megabyte: in a temporary file, or in memory if none can be made."""

    __slots__ = ("__weakref__", "_file", "size")

    def __init__(self) -> None:
        self.size = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        except OSError as error:  # no directory for temporary files
            logger.warning("coatcheck: a body of over a megabyte stays in memory: %s", error)
            self._file = io.BytesIO()
        # A `caller=` or `key=` function may raise before the body is closed.
        weakref.finalize(self, self._file.close)

    def add(self, chunk: bytes) -> None:
        """Append *chunk*; raises OSError if the disk is full."""
        self._file.write(chunk)
        self._file.flush()
        self.size += len(chunk)

    def chunks(self) -> Iterator[bytes]:
        """The body in pieces, from its start."""
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            yield chunk

    def stream(self) -> IO[bytes]:
        """The body as a file, at its start."""
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


Body: TypeAlias = bytes | LargeBody


class BodyReader:
    """Collects the body of one request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._size = 0
        self._chunks: list[bytes] = []
        self._large: LargeBody | None = None

    def add(self, chunk: bytes) -> Problem | None:
        """Append *chunk*; the refusal if the body is too large, or cannot be kept."""
        self._size += len(chunk)
        if self._size > self._policy.body_bytes_max:
            self.close()
            return body_too_large(self._policy)
        self._chunks.append(chunk)
        if self._size > MEMORY_BYTES_MAX:
            try:
                self._large = self._large or LargeBody()
                for one in self._chunks:
                    self._large.add(one)
            except OSError as error:  # the disk is full
                logger.error(  # noqa: TRY400 - its trace says nothing more
                    "coatcheck: a request gets 503: its body could not be kept: %s", error
                )
                self.close()
                reason = "its body could not be kept in a temporary file, so it was not run"
                return problem("store-unavailable", reason=reason)
            self._chunks.clear()
        return None

    def body(self) -> Body:
        """The whole body."""
        return b"".join(self._chunks) if self._large is None else self._large

    def close(self) -> None:
        """Forget what was collected."""
        if self._large is not None:
            self._large.close()


def body_too_large(policy: Policy) -> Problem:
    """The refusal of a body over the limit."""
    return problem("body-too-large", reason=f"at most {policy.body_bytes_max} bytes are taken")


def close_body(body: Body) -> None:
    """Delete the file of *body*, if it is in one."""
    if not isinstance(body, bytes):
        body.close()
