"""What is kept of an answer whose client was told to ask for it later."""

import pytest

from coatcheck import Policy
from coatcheck.core.replay import Fate, Response, decode_response
from coatcheck.core.serve import Ending
from coatcheck.engine.keeping import ending_of_accepted

POLICY = Policy(in_flight="202")


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        *((status, Fate.KEEP) for status in (200, 303, 403, 404, 415)),
        *((status, Fate.RELEASE) for status in (429, 500)),
    ],
)
def test_a_refusal_after_a_202_is_kept_because_nobody_would_see_it(status, fate):
    """L4, L10: unless it says "not now"."""
    response = Response(status, [(b"content-type", b"text/plain")], b"body")
    ending = ending_of_accepted(response, POLICY)
    assert ending.fate is fate
    if fate is Fate.KEEP:
        assert decode_response(ending.response) == response
    else:
        assert ending.response is None


def test_a_response_over_the_limit_is_not_kept():
    """L12."""
    policy = Policy(response_bytes_max=3)
    assert ending_of_accepted(Response(200, [], b"long"), policy) == Ending(Fate.KEEP)


def test_a_function_that_fails_is_no_reason_to_work_again(caplog):
    """L10, L12: for what a worker answers, too."""

    def keep(_response: Response) -> bool:
        raise ZeroDivisionError("a bug in keep")

    policy = Policy(in_flight="202", keep=keep)
    response = Response(500, [], b"body")
    assert decode_response(ending_of_accepted(response, policy).response) == response
    assert "a bug in keep" in caplog.text
