"""What a reconcile function answers must be something that can be sent (L6)."""

from __future__ import annotations

import pytest

from coatcheck.core.answers import DidNotHappen, Happened, Unknown
from coatcheck.errors import Misconfigured


def test_an_answer_that_can_be_sent_is_accepted():
    answer = Happened(201, [("Location", "/charges/7")], b"{}")
    assert (answer.status, answer.body) == (201, b"{}")
    assert Happened(204).body == b""
    assert Happened(value=[1]).value == [1]
    assert DidNotHappen() != Unknown()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"status": "201"}, "number from 200 to 599"),
        ({"status": 99}, "number from 200 to 599"),
        ({"headers": {"a": "b"}}, "list of pairs"),
        ({"headers": ["a"]}, "pair of texts"),
        ({"headers": [("Location", "a\nb")]}, "cannot be the value"),
        ({"body": "text"}, "it must be bytes"),
        ({"status": 204, "body": b"x"}, "has no body"),
    ],
)
def test_an_answer_that_could_not_be_sent_is_refused(settings, reason):
    with pytest.raises(Misconfigured, match=reason):
        Happened(**settings)
