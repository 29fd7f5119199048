"""`Prefer: respond-async, wait=N` (RFC 7240): how long a client waits before a 202."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.prefer import WAIT_S_MAX, preferred_wait_s


@pytest.mark.parametrize(
    ("prefer", "patience_s"),
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
def test_a_wish_is_understood_as_the_rfc_says(prefer, patience_s):
    """L10."""
    assert preferred_wait_s(prefer) == patience_s


def test_of_several_wishes_of_one_name_the_first_counts():
    """L10."""
    assert preferred_wait_s(b"wait=3, respond-async, wait=9, respond-async=no") == 3


@pytest.mark.parametrize("wait", [b"51", b"60", b"86400", b"9" * 20, b"9" * 900])
def test_nobody_waits_for_longer_than_proxies_do(wait):
    """L10."""
    assert preferred_wait_s(b"respond-async, wait=" + wait) == WAIT_S_MAX == 50


@pytest.mark.parametrize("wait", [b"soon", b"-1", b"1.5", b'""', b"1e3"])
def test_a_wait_that_is_no_number_of_seconds_is_not_said(wait):
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
def test_what_is_malformed_is_as_if_it_were_not_said(prefer):
    """L10."""
    assert preferred_wait_s(prefer) is None


@given(st.lists(st.sampled_from([b"respond-async", b"wait", b"=", b'"', b",", b";", b" ", b"7"])))
def test_nothing_that_is_sent_is_an_error(parts):
    """L10: and nothing takes long to read."""
    patience_s = preferred_wait_s(b"".join(parts))
    assert patience_s is None or 0 <= patience_s <= WAIT_S_MAX


@pytest.mark.parametrize(
    "odd", ["b';  ' * 300", "b' ' * 900", "b'; a = \"' + b'\\\\' * 800", "b';a' * 400"]
)
def test_no_header_takes_long_to_read(odd):
    """X2, L3: it comes before anything is known of the client."""
    script = (
        "from coatcheck.core.prefer import preferred_wait_s;"
        f"assert preferred_wait_s(b'respond-async' + {odd} + b'@') is None"
    )
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)
