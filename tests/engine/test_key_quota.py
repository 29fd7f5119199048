"""The key quota: how many keys each caller has in use, counted by many threads at once (X2)."""

import sys
import threading

from coatcheck.engine import key_quota
from coatcheck.engine.key_quota import KeyQuota


def called_between(call, between, line):
    """Call *call*, and *between* once, before the line with the number *line* of `admits`."""
    left = line

    def trace(_frame, event, _argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                between()
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace if frame.f_code is KeyQuota.admits.__code__ else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return left <= 0


def test_two_threads_count_one_after_the_other(monkeypatch):
    """X2: no request fails because its caller is forgotten meanwhile."""
    monkeypatch.setattr(key_quota, "CALLERS_MAX", 1)
    counted, admitted = KeyQuota(), []

    def admit(caller):
        admitted.append(counted.admits(caller, b"1", now_ms=1, ends_ms=2, keys_max=9))

    line, was_between = 0, True
    while was_between:
        line += 1
        other = threading.Thread(target=admit, args=("other",))

        def come_between(other=other):
            other.start()
            other.join(0.05)  # it has ended, or waits for this thread

        was_between = called_between(lambda: admit("one"), come_between, line)
        if was_between:
            other.join()
    assert admitted == [True] * (2 * line - 1)


def test_a_key_is_in_use_until_its_window_ends():
    """X2: and is counted once, however often it is tried."""
    counted = KeyQuota()

    def admits(id, now_ms):
        return counted.admits("ada", id, now_ms=now_ms, ends_ms=now_ms + 10, keys_max=2)

    assert [admits(id, now_ms=0) for id in (b"1", b"2", b"1", b"3")] == [True, True, True, False]
    assert admits(b"3", now_ms=9) is False
    assert admits(b"3", now_ms=10) is True


def test_a_key_of_a_long_window_does_not_keep_those_of_shorter_ones_in_use():
    """X2: routes have windows of their own, and a week is longer than an hour."""
    counted = KeyQuota()

    def admits(id, now_ms, window_ms):
        ends_ms = now_ms + window_ms
        return counted.admits("ada", id, now_ms=now_ms, ends_ms=ends_ms, keys_max=2)

    assert admits(b"1", 0, 1_000)
    assert admits(b"2", 0, 10)
    assert not admits(b"3", 9, 10)
    assert admits(b"3", 10, 10)
    assert admits(b"2", 20, 10)  # in a new generation
    assert not admits(b"4", 29, 10)
