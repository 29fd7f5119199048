"""What `by_content` accepts; how its keys work is in `laws/test_content_keys.py`."""

from datetime import timedelta

import pytest

from coatcheck import Misconfigured, Policy
from coatcheck.server import keys
from coatcheck.server.request import Request

REQUEST = Request("POST", "/orders", b"", {}, b"", {})


@pytest.mark.parametrize("window", ["1s", "1h", 10, timedelta(seconds=10)])
def test_a_window_is_one_second_to_one_hour(window):
    found = keys.by_content(window=window)(REQUEST)
    assert isinstance(found, keys.ContentKey)
    policy = found.policy_of(Policy(on_expired="refuse"))
    assert policy.window_ms == found.window_ms
    assert policy.lease_ms <= policy.window_ms
    assert policy.on_expired == "new"


@pytest.mark.parametrize("window", ["999ms", "61m", "24h", 0, -1, "soon", None])
def test_another_window_is_refused(window):
    with pytest.raises(Misconfigured, match="window"):
        keys.by_content(window=window)
