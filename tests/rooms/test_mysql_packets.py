"""Packets of the MySQL protocol: in whatever pieces they come, and only what was asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.stores.mysql_packets import (
    Answer,
    Hearing,
    Preparation,
    Refusal,
    execution,
    framed,
    query,
    with_length,
)

END = b"\xfe\0\0\2\0"


def packets(*payloads: bytes, first: int = 1) -> bytes:
    return b"".join(
        len(payload).to_bytes(3, "little") + bytes((number % 256,)) + payload
        for number, payload in enumerate(payloads, first)
    )


def done(affected: int, status: int = 2) -> bytes:
    number = bytes((affected,)) if affected < 251 else b"\xfc" + affected.to_bytes(2, "little")
    return b"\0" + number + b"\0" + status.to_bytes(2, "little") + b"\0\0"


def found(rows: list[list[bytes | None]]) -> list[bytes]:
    packed = [b"".join(b"\xfb" if v is None else with_length(v) for v in row) for row in rows]
    return [bytes((len(rows[0]),)), *[b"a column"] * len(rows[0]), END, *packed, END]


def heard(data: bytes, sizes: list[int], sent: bytes = b"") -> list[object]:
    """What each piece of *data* has told, after *sent*."""
    hearing, told, start = Hearing(sent), [], 0
    for size in [*sizes, len(data)]:
        told.append(hearing.feed(data[start : start + size]))
        start += size
    return told


VALUES = st.none() | st.binary(max_size=300) | st.just(b"\xfe") | st.just(b"")
ROWS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1, max_size=9)
)


@given(rows=ROWS, sizes=st.lists(st.integers(1, 50), max_size=30))
def test_rows_are_the_same_however_they_were_cut(rows, sizes):
    """D1: nothing is told before all of it has come, and nothing twice."""
    told = [reply for reply in heard(packets(*found(rows)), sizes) if reply is not None]
    assert told == [Answer(0, [tuple(row) for row in rows], is_open=False)]


@given(affected=st.integers(0, 65_535), sizes=st.lists(st.integers(1, 5), max_size=9))
def test_what_was_changed_is_counted_over_all_statements_of_a_command(affected, sizes):
    """L1: a batch is one command, and who won is seen from its sum."""
    begun, changed, ended = done(0, 11), done(affected, 11), done(0, 2)
    told = [r for r in heard(packets(begun, changed, changed, ended), sizes) if r is not None]
    assert told == [Answer(2 * affected, [], is_open=False)]
    assert heard(packets(done(1, 3)), []) == [Answer(1, [], is_open=True)]


def test_a_refusal_may_come_instead_of_anything():
    """D2: at once, after some statements, and among rows."""
    refusal = b"\xff\xbd\x04#40001Deadlock found"
    rows = found([[b"x"]])
    for payloads in ([refusal], [done(1, 11), refusal], [*rows[:-1], refusal]):
        (told,) = heard(packets(*payloads), [])
        assert isinstance(told, Refusal)
        assert (told.code, told.text) == (1213, "Deadlock found")


@pytest.mark.parametrize(
    "data",
    [
        packets(done(1), first=0),  # said by itself, as when the server goes down
        packets(done(1)) + packets(done(1)),  # twice
        packets(b""),
        packets(b"\xfbfile"),
    ],
)
def test_what_is_no_answer_is_nobodys_answer(data):
    """L1: else everybody after it would have the answer of the one before."""
    with pytest.raises(ValueError, match="the server has"):
        heard(data, [])


def test_what_is_longer_than_a_packet_is_sent_and_heard_in_several():
    """D1: a response may be as large as its server takes it."""
    limit = (1 << 24) - 1
    for size in (limit - 1, limit, 2 * limit, 2 * limit + 5):
        sent = framed(query(bytes(size - 1)))
        sizes, start = [], 0
        while start < len(sent):
            assert sent[start + 3] == len(sizes)
            sizes.append(int.from_bytes(sent[start : start + 3], "little"))
            start += 4 + sizes[-1]
        assert sum(sizes) == size
        assert sizes[-1] < limit
        assert set(sizes[:-1]) <= {limit}
        (told,) = heard(packets(done(1), first=len(sizes)), [], sent)
        assert told == Answer(1, [], is_open=False)
    row = with_length(bytes(limit))
    parts = [row[:limit], row[limit:]]
    (told,) = heard(packets(b"\1", b"a column", END, *parts, END), [])
    assert told == Answer(0, [(bytes(limit),)], is_open=False)


def test_a_prepared_statement_has_a_number_and_says_which_values_are_null():
    """L1: in as many bits as there are values."""
    first = b"\0" + (7).to_bytes(4, "little") + b"\0\0\2\0\0\0\0"
    assert Preparation(b"").feed(packets(first, b"?", b"?", END)) == Answer(7, (), is_open=False)
    command = execution(7, 0b10, b"\x08\0\xfc\0", b"value")
    assert command == b"\x17\7\0\0\0\0\1\0\0\0\2\1\x08\0\xfc\0value"
