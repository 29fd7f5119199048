"""The pool of the store's own connections, used by several threads."""

from coatcheck.transactions.pool import Pool


class Connection:
    """One that can be closed."""

    is_closed = False

    def close(self):
        self.is_closed = True


class JustTaken(list):
    """Looks non-empty, but another thread has taken the last item meanwhile."""

    def __len__(self):
        return 1


def test_a_thread_opens_a_connection_if_another_has_taken_the_last_idle_one():
    """D2: that is no error, and closes no other connection."""
    pool = Pool(Connection)
    pool._idle = JustTaken()
    with pool() as connection:
        assert isinstance(connection, Connection)
    assert [*pool._idle] == [connection]
    with pool() as again:
        assert again is connection
    pool.close()
    assert connection.is_closed
