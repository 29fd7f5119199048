"""One connection that threads take turns on, over a scripted one; each SQL store uses it."""

import threading

import pytest

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.shared_connection import SharedConnection
from tests.support.batches import TIMEOUT_S


class Shared(SharedConnection[int]):
    """Numbers its connections, and writes down which were closed."""

    def __init__(self) -> None:
        super().__init__("here")
        self.opened = 0
        self.closed: list[int] = []
        self.stale: set[int] = set()

    def _open(self) -> int:
        self.opened += 1
        return self.opened

    def _close(self, connection: int) -> None:
        self.closed.append(connection)

    def _is_usable(self, connection: int, error: BaseException | None) -> bool:
        return not isinstance(error, OSError)

    def _is_stale(self, connection: int) -> bool:
        return connection in self.stale

    def _raise_store_error(self, error: Exception) -> None:
        if isinstance(error, OSError):
            raise StoreUnavailable("gone") from error


def test_a_connection_is_kept_until_it_is_broken_or_stale():
    """D2: the next caller gets another one, and an error of a record closes nothing."""
    shared = Shared()
    with pytest.raises(ValueError, match="a bad record"), shared:
        raise ValueError("a bad record")
    assert (shared.opened, shared.closed) == (1, [])
    with pytest.raises(StoreUnavailable, match="gone"), shared:
        raise OSError
    with shared as connection:
        assert (connection, shared.closed) == (2, [1])
    shared.stale = {2}
    with shared as connection:
        assert (connection, shared.closed) == (3, [1, 2])


def test_closing_waits_for_no_thread_and_the_last_one_closes_the_connection():
    """D2: a search that takes a minute does not delay the end of its process."""
    shared = Shared()
    with shared as connection:
        closing = threading.Thread(target=shared.close)
        closing.start()
        closing.join(TIMEOUT_S)
        assert not closing.is_alive()
        assert (shared.is_busy(), shared.closed) == (True, [])
    assert (connection, shared.closed) == (1, [1])
    with pytest.raises(StoreUnavailable, match="here: the store is closed"), shared:
        pass
