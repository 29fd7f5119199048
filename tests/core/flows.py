"""Steps through a flow by hand: the tests send the results that a runner would send."""

import pytest

from coatcheck.core.lifecycle import ClaimRequest

NOW = 1_700_000_000_000
REQUEST = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")


def first_of(flow):
    """The first effect of *flow*, or its result if it has none."""
    try:
        return next(flow)
    except StopIteration as stopped:
        return stopped.value


def end_of(flow, *sent):
    """The result of *flow*, which ends when it is sent the last of *sent*."""
    *others, last = sent or (None,)
    for result in others:
        flow.send(result)
    with pytest.raises(StopIteration) as stopped:
        flow.send(last)
    return stopped.value.value
