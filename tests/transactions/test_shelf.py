"""The shelf of connections that the store lends, among threads."""

from coatcheck.lent.shelf import Shelf


class Connection:
    """One that can be closed."""

    is_closed = False

    def close(self):
        self.is_closed = True


class JustTaken(list):
    """Empty, although it was not when somebody looked: another thread was quicker."""

    def __len__(self):
        return 1


def test_who_finds_that_another_thread_has_taken_the_last_one_opens_another():
    """D2: it is no error, and nobody else's connection is closed for it."""
    shelf = Shelf(Connection)
    shelf._idle = JustTaken()
    with shelf() as connection:
        assert isinstance(connection, Connection)
    assert [*shelf._idle] == [connection]
    with shelf() as again:
        assert again is connection
    shelf.close()
    assert connection.is_closed
