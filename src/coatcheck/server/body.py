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
    """
    Collects the body of one request.

    `add` only collects. When `is_full`, call `spool`, and at the end call `body`: both may write to
    a file, which takes as long as the disk takes.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._size = 0
        self._chunks: list[bytes] = []  # not in the file yet
        self._chunks_bytes = 0
        self._large: LargeBody | None = None

    def add(self, chunk: bytes) -> Problem | None:
        """Append *chunk*; the refusal if the body is too large."""
        self._size += len(chunk)
        if self._size > self._policy.body_bytes_max:
            self.close()
            return body_too_large(self._policy)
        self._chunks.append(chunk)
        self._chunks_bytes += len(chunk)
        return None

    @property
    def is_full(self) -> bool:
        """As much is in memory as may be."""
        return self._chunks_bytes > MEMORY_BYTES_MAX

    @property
    def is_large(self) -> bool:
        """A part of the body is in a file."""
        return self._large is not None

    def spool(self) -> Problem | None:
        """Write what is in memory to the file; the refusal if that fails."""
        try:
            self._large = self._large or LargeBody()
            for chunk in self._chunks:
                self._large.add(chunk)
        except OSError as error:  # the disk is full
            logger.error(  # noqa: TRY400 - its trace says nothing more
                "coatcheck: a request gets 503: its body could not be kept: %s", error
            )
            self.close()
            reason = "its body could not be kept in a temporary file, so it was not run"
            return problem("store-unavailable", reason=reason)
        self._chunks.clear()
        self._chunks_bytes = 0
        return None

    def body(self) -> Body | Problem:
        """The whole body; the refusal if its end could not be kept."""
        if self._large is None:
            return b"".join(self._chunks)
        return self.spool() or self._large

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
