"""`Prefer: respond-async, wait=N` (RFC 7240): how long a client waits before a 202."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.server.polling import WAIT_S_MAX, preferred_wait_s


@pytest.mark.parametrize(
    ("prefer", "wait_s"),
    [
        (b"", None),
        (b"return=minimal", None),
        (b"wait=10", None),
        (b"respond-async", 0),
        (b"Respond-Async", 0),
        (b'respond-async=""', 0),
        (b"respond-async, wait=10", 10),
        (b"wait=10, respond-async", 10),
        (b"respond-async,wait=007", 7),
        (b"respond-async, wait=00000000000030", 30),
        (b'respond-async, wait="10"', 10),
        (b"respond-async, wait = 10", 10),
        (b"respond-async, wait=0", 0),
        (b'handling=lenient; why="a, b\\"c", respond-async; foo; bar=1;, wait=3', 3),
        (b" , respond-async ,, wait=3 , ", 3),
        (b"respond-async\t,\twait=3", 3),
    ],
)
def test_a_preference_is_read_as_the_rfc_says(prefer, wait_s):
    """L10."""
    assert preferred_wait_s(prefer) == wait_s


def test_the_first_of_several_preferences_with_one_name_counts():
    """L10."""
    assert preferred_wait_s(b"wait=3, respond-async, wait=9, respond-async=no") == 3


@pytest.mark.parametrize("wait", [b"51", b"60", b"86400", b"9" * 20, b"9" * 900])
def test_no_client_waits_for_longer_than_proxies_do(wait):
    """L10."""
    assert preferred_wait_s(b"respond-async, wait=" + wait) == WAIT_S_MAX == 50


@pytest.mark.parametrize("wait", [b"soon", b"-1", b"1.5", b'""', b"1e3"])
def test_a_wait_that_is_no_number_of_seconds_is_ignored(wait):
    """L10."""
    assert preferred_wait_s(b"respond-async, wait=" + wait) == 0


@pytest.mark.parametrize(
    "prefer",
    [
        b"respond-async wait=10",
        b"respond-async=",
        b'respond-async, why="open',
        b"respond-async, =3",
        b"respond-async; (",
        b"respond-async, \xff",
        b"respond-async\n",
        b"respond-async=yes",
        b"respond-async, " + b"x" * 1_000,
    ],
)
def test_a_malformed_header_counts_as_none(prefer):
    """L10."""
    assert preferred_wait_s(prefer) is None


@given(st.lists(st.sampled_from([b"respond-async", b"wait", b"=", b'"', b",", b";", b" ", b"7"])))
def test_no_header_raises_an_error(parts):
    """L10."""
    wait_s = preferred_wait_s(b"".join(parts))
    assert wait_s is None or 0 <= wait_s <= WAIT_S_MAX


def test_no_header_takes_long_to_read():
    """X2, L3: it is read before anything is known of the client."""
    script = """
from coatcheck.server.polling import preferred_wait_s
for odd in (b";  " * 300, b" " * 900, b'; a = "' + b"\\\\" * 800, b";a" * 400):
    assert preferred_wait_s(b"respond-async" + odd + b"@") is None
"""
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)
