"""Which answers are kept if the client polls for them."""

import pytest

from coatcheck import Policy
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.response import Response, decode_response
from coatcheck.engine.outcomes import outcome_of_accepted

POLICY = Policy(in_flight="202")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, OutcomeKind.COMPLETE) for status in (200, 303, 403, 404, 415)),
        *((status, OutcomeKind.RELEASE) for status in (429, 500)),
    ],
)
def test_a_refusal_after_a_202_is_kept_because_the_client_would_not_see_it_otherwise(status, kind):
    """L4, L10: unless it says "not now"."""
    response = Response(status, [(b"content-type", b"text/plain")], b"body")
    outcome = outcome_of_accepted(response, POLICY)
    assert outcome.kind is kind
    if kind is OutcomeKind.COMPLETE:
        assert decode_response(outcome.response) == response
    else:
        assert outcome.response is None


def test_a_response_over_the_limit_is_not_kept():
    """L12."""
    policy = Policy(response_bytes_max=3)
    assert outcome_of_accepted(Response(200, [], b"long"), policy) == Outcome(OutcomeKind.COMPLETE)


def test_a_keep_function_that_raises_is_no_reason_to_run_again(caplog):
    """L10, L12: also for the answer of a worker."""

    def keep(_response: Response) -> bool:
        raise ZeroDivisionError("a bug in keep")

    policy = Policy(in_flight="202", keep=keep)
    response = Response(500, [], b"body")
    assert decode_response(outcome_of_accepted(response, policy).response) == response
    assert "a bug in keep" in caplog.text
