"""Which answers are kept, and what an answer means for its claim."""

import pytest

from coatcheck.core.keep import COMPLETE, OutcomeKind, outcome_kind_of
from coatcheck.core.response import Response
from coatcheck.errors import Misconfigured


@pytest.mark.parametrize(
    ("status", "keep", "reruns", "kind"),
    [
        (200, "final", True, OutcomeKind.COMPLETE),
        (204, "final", True, OutcomeKind.COMPLETE),
        (303, "final", True, OutcomeKind.COMPLETE),
        (402, "final", True, OutcomeKind.COMPLETE),
        (404, "final", True, OutcomeKind.COMPLETE),
        (422, "final", False, OutcomeKind.COMPLETE),
        (500, "final", True, OutcomeKind.RELEASE),
        (500, "final", False, OutcomeKind.IN_DOUBT),
        (503, "all", True, OutcomeKind.COMPLETE),
        (408, "all", True, OutcomeKind.RELEASE),
        (425, "final", False, OutcomeKind.RELEASE),
        (429, "final", False, OutcomeKind.RELEASE),
        (401, "final", True, OutcomeKind.REJECT),
        (403, "all", False, OutcomeKind.REJECT),
        (413, "final", True, OutcomeKind.REJECT),
        (415, "final", True, OutcomeKind.REJECT),
        (407, "final", True, OutcomeKind.REJECT),
        (499, "final", True, OutcomeKind.COMPLETE),
        (501, "final", True, OutcomeKind.RELEASE),
        (401, lambda response: False, False, OutcomeKind.REJECT),
        (429, lambda response: False, False, OutcomeKind.RELEASE),
        (200, lambda response: False, False, OutcomeKind.IN_DOUBT),
        (200, lambda response: response.status == 201, True, OutcomeKind.RELEASE),
        (500, lambda response: True, False, OutcomeKind.COMPLETE),
    ],
)
def test_the_answer_decides_the_outcome(status, keep, reruns, kind):
    """L4."""
    assert outcome_kind_of(Response(status, [], b""), keep, reruns=reruns) is kind


def test_a_keep_function_that_returns_a_coroutine_is_refused():
    """L4: it would count as a yes."""

    async def is_final(response):
        raise AssertionError(response)

    def keep(response):
        return is_final(response)

    with pytest.raises(Misconfigured, match=r"keep= .* must not be async"):
        outcome_kind_of(Response(500, [], b""), keep, reruns=True)


def test_a_keep_function_is_given_the_whole_response():
    """L4: status, headers and body."""
    seen = []
    response = Response(500, [(b"x-final", b"yes")], b"body")
    assert outcome_kind_of(response, lambda one: not seen.append(one), reruns=False) is COMPLETE
    assert seen == [response]
