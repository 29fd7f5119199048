"""Actions of a saga: what each error, each probe and each try leads to (E3)."""

import http.client
import pickle
import urllib.error
from types import SimpleNamespace

import aiohttp
import botocore.exceptions
import httpx
import httpx2
import pytest
import requests
import stripe
import urllib3

from coatcheck.core.client.send import Result
from coatcheck.core.flow import Sleep
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.response import encode_value
from coatcheck.core.saga.actions import (
    Act,
    ActionPlan,
    Ask,
    Blocked,
    Confirm,
    Ended,
    Failure,
    NotStored,
    Now,
    Retry,
    act,
    check_name,
    decode_ended,
    decode_step,
    derived_key,
    encode_ended,
    encoded_result,
)
from coatcheck.errors import ClaimLost, Misconfigured, Uncertain, Unreadable

NOW_MS = 1_700_000_000_000
RESULT = encode_value("room 7")
PROBED = encode_value(encode_ended(Ended(1, RESULT)))
HAPPENED = Outcome(OutcomeKind.COMPLETE, PROBED)
DID_NOT = Outcome(OutcomeKind.RELEASE)
UNKNOWN = Outcome(OutcomeKind.IN_DOUBT)
ALWAYS = 1 << 53


def ended(plan, acts, answers=(), now_ms=NOW_MS):
    """How the action of *plan* ends whose calls and probes have these outcomes; and its pauses."""
    acts, answers, pauses, confirmed = iter(acts), iter(answers), [], [True]

    def performed(effect):
        if isinstance(effect, Act):
            assert confirmed.pop()
            return next(acts)
        if isinstance(effect, Confirm):
            confirmed.append(True)
            return None
        if isinstance(effect, Ask):
            return next(answers)
        if isinstance(effect, Sleep):
            pauses.append(effect.seconds)
            return None
        assert isinstance(effect, Now)
        return now_ms

    flow = act(plan)
    effect = next(flow)
    try:
        while True:
            found = performed(effect)
            effect = flow.throw(found) if isinstance(found, Exception) else flow.send(found)
    except StopIteration as stopped:
        assert list(acts) == list(answers) == []
        return stopped.value, pauses


def failed(error, text="", *, may_have_happened=False):
    return Ended(NOW_MS, failure=Failure("hotel", error, text, may_have_happened))


PLAIN = ActionPlan("hotel", again_until_ms=ALWAYS)
ASKED = ActionPlan("hotel", has_probe=True)
ONCE = ActionPlan("hotel")
REMEMBERED = ActionPlan("hotel", has_probe=True, again_until_ms=NOW_MS + 1)
THREE = Retry(tries=3, pause=1, pause_max=1.5)

ENDS = [
    (PLAIN, [RESULT], [], Ended(NOW_MS, RESULT)),
    (PLAIN, [ValueError("full")], [], failed("ValueError", "full")),
    (PLAIN, [NotStored("large")], [], failed("NotStored", "large", may_have_happened=True)),
    (PLAIN, [TimeoutError(), RESULT], [], Ended(NOW_MS, RESULT)),
    (PLAIN, [Uncertain(), ValueError()], [], failed("ValueError")),
    (PLAIN._replace(was_begun=True), [ValueError()], [], failed("ValueError")),
    (REMEMBERED._replace(was_begun=True), [ValueError()], [DID_NOT], failed("ValueError")),
    (REMEMBERED, [Uncertain(), ValueError()], [HAPPENED], Ended(NOW_MS, RESULT)),
    (PLAIN._replace(retries_errors=True), [ValueError(), RESULT], [], Ended(NOW_MS, RESULT)),
    (PLAIN._replace(must_succeed=True), [ValueError(), RESULT], [], Ended(NOW_MS, RESULT)),
    (ASKED, [ConnectionError()], [HAPPENED], Ended(NOW_MS, RESULT)),
    (ASKED, [TimeoutError(), RESULT], [DID_NOT], Ended(NOW_MS, RESULT)),
    (ASKED, [TimeoutError(), ValueError()], [DID_NOT], failed("ValueError")),
    (ASKED._replace(retry=Retry(tries=1)), [TimeoutError()], [DID_NOT], failed("TimeoutError")),
    (REMEMBERED, [TimeoutError(), RESULT], [], Ended(NOW_MS, RESULT)),
    (
        *(REMEMBERED._replace(retry=Retry(tries=2, pause=0)), [TimeoutError()] * 2, [HAPPENED]),
        Ended(NOW_MS, RESULT),
    ),
    (
        *(PLAIN._replace(unknown_errors=(LookupError,)), [KeyError("k"), RESULT], []),
        Ended(NOW_MS, RESULT),
    ),
]


@pytest.mark.parametrize(("plan", "acts", "answers", "expected"), ENDS)
def test_an_action_ends_when_its_outcome_is_known(plan, acts, answers, expected):
    """E3."""
    assert ended(plan, acts, answers)[0] == expected


OF_LIBRARIES = [
    aiohttp.ClientPayloadError(),
    aiohttp.ServerDisconnectedError(),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://a"),
    http.client.IncompleteRead(b""),
    httpx.ReadTimeout(""),
    httpx2.ConnectError(""),
    requests.exceptions.ChunkedEncodingError(),
    requests.ConnectionError(),
    requests.ReadTimeout(),
    stripe.APIConnectionError("lost"),
    urllib.error.URLError(TimeoutError()),
    urllib3.exceptions.ProtocolError(),
]


@pytest.mark.parametrize("error", OF_LIBRARIES, ids=repr)
def test_a_lost_answer_of_an_http_library_leaves_the_outcome_unknown(error):
    """E3: it would otherwise count as "nothing has happened", and would not be undone."""
    assert ended(ASKED, [error], [HAPPENED])[0] == Ended(NOW_MS, RESULT)


def httpx2_error(status, **extensions):
    response = httpx2.Response(status, extensions=extensions)
    return httpx2.HTTPStatusError("", request=httpx2.Request("POST", "http://a"), response=response)


def with_status(status):
    """The errors that libraries raise for a response of *status*."""
    of_requests = requests.Response()
    of_requests.status_code = status
    yield httpx2_error(status)
    yield requests.HTTPError(response=of_requests)
    yield aiohttp.ClientResponseError(SimpleNamespace(real_url="http://a"), (), status=status)
    yield stripe.APIError("no", http_status=status)
    yield urllib.error.HTTPError("http://a", status, "no", {}, None)
    yield botocore.exceptions.ClientError(
        {"ResponseMetadata": {"HTTPStatusCode": status}}, "PutItem"
    )


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_a_service_that_gave_up_half_way_leaves_the_outcome_unknown(status):
    """E3: it may have charged the card before it answered 504."""
    for error in with_status(status):
        assert ended(ASKED, [error], [HAPPENED])[0] == Ended(NOW_MS, RESULT), repr(error)


@pytest.mark.parametrize("status", [400, 401, 402, 404, 409, 422, 429])
def test_a_refusal_by_a_service_is_a_failure(status):
    """E3."""
    for error in [*with_status(status), stripe.CardError("no", "card", "c")]:
        assert ended(ASKED, [error], [])[0].failure.error == type(error).__name__


@pytest.mark.parametrize("status", [401, 403, 409, 425, 429])
def test_a_refusal_of_a_repeated_call_may_say_nothing_about_the_first_one(status):
    """E3: the service refused before it looked for the key, or still works on the first call."""
    for error in with_status(status):
        plan = PLAIN._replace(retry=Retry(tries=4, pause=0))
        assert ended(plan, [TimeoutError(), error, error, RESULT])[0] == Ended(NOW_MS, RESULT)


def test_the_clients_of_coatcheck_say_whether_an_outcome_is_unknown():
    """E3: a 409 may say that the server does not know the outcome itself."""
    for outcome in ("unknown", "refused"):
        error = httpx2_error(409, coatcheck=Result(outcome, 1, False, "k"))
        answers = [HAPPENED] if outcome == "unknown" else []
        assert (ended(ASKED, [error], answers)[0].failure is None) == (outcome == "unknown")


@pytest.mark.parametrize("error", [OSError(), KeyError("status"), requests.HTTPError()])
def test_any_other_error_is_a_failure(error):
    """E3."""
    assert ended(ASKED, [error], [])[0].failure.error == type(error).__name__


BLOCKED = [
    (ONCE, [TimeoutError()], [], "not known: it was called once and last raised TimeoutError"),
    (PLAIN._replace(retry=THREE), [TimeoutError()] * 3, [], "called 3 times"),
    (ASKED, [TimeoutError()], [UNKNOWN], "its probe does not know it either"),
    (ASKED, [TimeoutError()], [HAPPENED._replace(response=None)], "does not know it either"),
    (ASKED, [TimeoutError()], [OSError()], "its probe raised OSError"),
    (
        *(PLAIN._replace(must_succeed=True, retry=THREE), [ValueError()] * 3, []),
        "^blocked at 'hotel': it was called 3 times and last raised ValueError$",
    ),
    (PLAIN._replace(must_succeed=True), [NotStored("it is large")], [], "'hotel': it is large"),
]


@pytest.mark.parametrize(("plan", "acts", "answers", "words"), BLOCKED)
def test_an_action_whose_outcome_stays_unknown_is_blocked(plan, acts, answers, words):
    """E3: a person decides."""
    with pytest.raises(Blocked, match=words):
        ended(plan, acts, answers)


def test_nothing_is_called_again_by_a_process_that_has_lost_its_claim():
    """E3: another one may have undone it; the error of the check is no error of the function."""
    flow = act(PLAIN)
    assert isinstance(next(flow), Act)
    assert isinstance(flow.throw(TimeoutError()), Now)
    assert isinstance(flow.send(NOW_MS), Sleep)
    assert isinstance(flow.send(None), Confirm)
    with pytest.raises(ClaimLost):
        flow.throw(ClaimLost("another attempt"))


def test_pauses_double_up_to_a_limit():
    plan = PLAIN._replace(retry=Retry(tries=5, pause=1, pause_max="3s"))
    _, pauses = ended(plan, [TimeoutError()] * 4 + [RESULT])
    assert pauses == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tries": 0}, "tries is 0"),
        ({"tries": True}, "tries is True"),
        ({"tries": 1.5}, "tries is 1.5"),
        ({"pause": "soon"}, "^pause:"),
        ({"pause_max": "late"}, "^pause_max:"),
    ],
)
def test_a_retry_has_a_number_of_tries_and_two_durations(options, words):
    with pytest.raises(Misconfigured, match=words):
        Retry(**options)


def test_the_key_of_a_step_names_its_saga_its_key_and_itself():
    """E3."""
    assert derived_key("checkout", "42", "charge") == "checkout:42:charge"
    long = derived_key("checkout", "x" * 300, "charge:undo")
    assert len(long) < 255
    assert long.startswith("checkout:")
    assert long.endswith(":charge:undo")
    assert long != derived_key("checkout", "x" * 301, "charge:undo")


@pytest.mark.parametrize("name", ["", "a:b", "undo", None, "x" * 91])
def test_a_name_that_would_make_two_keys_equal_is_refused(name):
    """E3: "checkout" with the key "42:charge" has no step "undo"."""
    with pytest.raises(Misconfigured, match="the name of a step"):
        check_name("step", name)
    assert check_name("step", "charge") == "charge"


ENDED = [Ended(NOW_MS, RESULT), failed("ValueError", "full", may_have_happened=True)]


@pytest.mark.parametrize("end", ENDED)
def test_an_end_comes_back_as_it_was(end):
    assert decode_ended(encode_ended(end)) == end
    assert decode_step(encode_value(encode_ended(end))) == end


@pytest.mark.parametrize("value", ["text", b"", b"X123456"])
def test_what_is_no_end_is_not_read(value):
    with pytest.raises(Unreadable, match="not those of a saga"):
        decode_ended(value)


def test_a_result_is_stored_or_the_reason_is_named():
    assert encoded_result([1], None, 100) == encode_value([1])
    assert encoded_result({1}, sorted, 100) == encode_value([1])
    for result, encode, room, words in (
        (object(), None, 100, "neither JSON nor bytes"),
        ("x" * 100, None, 50, "has 103 bytes, and 50 can be stored"),
        ("x", None, -5, "and 0 can be stored"),
        (7, sorted, 100, "cannot be stored: TypeError"),
    ):
        with pytest.raises(NotStored, match=words):
            encoded_result(result, encode, room)


def test_a_blocked_saga_may_be_at_no_step():
    error = Blocked("", "its definition has changed")
    assert str(error) == "blocked: its definition has changed"
    assert str(pickle.loads(pickle.dumps(Blocked("a", "why")))) == "blocked at 'a': why"
