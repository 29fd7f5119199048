"""The attempts of one call, without a network: the tests send the replies."""

import json
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.core.client.send import (
    Answer,
    Lost,
    NewKey,
    Order,
    Reply,
    Send,
    Sleep,
    answer_of,
    is_body_read,
    is_retried,
    send,
)
from coatcheck.core.flow import run

DEFAULT = Preset(name="default")
LOST, NOT_SENT, DONE = Lost(), Lost(may_have_arrived=False), Answer(201)
IN_PROGRESS = Answer(409, "in-progress", "same-key", retry_after_s=1.0)


class Network:
    """Performs the effects of a flow: gives the replies of a script, and notes what was done."""

    def __init__(self, *script, jitter=0.5, takes_s=0.0, overslept_s=0.0):
        self.script, self.jitter = list(script), jitter
        self.takes_s, self.overslept_s = takes_s, overslept_s
        self.now_s, self.sent, self.slept = 0.0, [], []

    def __call__(self, effect):
        if isinstance(effect, Send):
            self.sent.append((effect.key, effect.poll, self.now_s))
            self.now_s += self.takes_s
            assert effect.time_left_s > 0
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            return Reply(answer, self.now_s, self.jitter)
        if isinstance(effect, Sleep):
            self.slept.append(effect.seconds)
            self.now_s += effect.seconds + self.overslept_s
            return self.now_s
        assert isinstance(effect, NewKey)
        return "new"

    def run(
        self, method="POST", key="k", preset=DEFAULT, budget=None, before=(0.0, False), **policy
    ):
        order = Order(method, key, RetryPolicy(**policy), preset, *before)
        return run(send(order, budget or RetryBudget(), 0.0), self)


def test_a_call_that_succeeds_at_once_is_sent_once():
    network = Network(DONE)
    result = network.run()
    assert (result.outcome, result.attempts, result.was_replayed, result.key) == (
        *("done", 1, False),
        "k",
    )
    assert network.slept == []


@pytest.mark.parametrize(
    "answer",
    [
        LOST,
        NOT_SENT,
        IN_PROGRESS,
        Answer(409, retry_after_s=2.0),
        Answer(409, "idempotency_key_in_use"),
        Answer(400, "body-incomplete", "same-key"),
        *(Answer(status) for status in (408, 425, 429, 500, 502, 503, 504)),
    ],
    ids=str,
)
def test_what_says_nothing_definite_is_sent_again_with_the_same_key(answer):
    """C1, C-07, C-10, C-25: connection errors, 408, 409 in progress, 425, 429 and 5xx."""
    network = Network(answer, answer, DONE)
    result = network.run()
    assert (result.outcome, result.attempts, result.gave_up) == ("done", 3, "")
    assert [key for key, _, _ in network.sent] == ["k", "k", "k"]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(400), "refused"),
        (Answer(402), "refused"),
        (Answer(404), "refused"),
        (Answer(409), "refused"),
        (Answer(409, "sold-out", retry_after_s=1.0), "refused"),
        (Answer(422, "key-reused", "never"), "refused"),
        (Answer(400, "key-invalid", "new-key"), "refused"),
        (Answer(409, "outcome-unknown", "never"), "unknown"),
        (Answer(409, "too-many-attempts", "never"), "unknown"),
        (Answer(409, "key-expired", "never"), "unknown"),
        (Answer(409, "result-unavailable", "never"), "done"),
        (Answer(503, advice="never"), "unknown"),
        (Answer(500, is_replay=True), "unknown"),
        (Answer(303), "done"),
        (Answer(200, advice="same-key", is_replay=True), "done"),
    ],
    ids=str,
)
def test_a_definite_answer_is_final(answer, outcome):
    """C1, C-08, C-09: 400, 422 and other refusals are never retried."""
    network = Network(answer)
    result = network.run()
    assert (result.outcome, result.attempts) == (outcome, 1)
    assert (result.code, result.advice) == (answer.code, answer.advice)


def test_the_hint_of_the_server_wins_over_the_status():
    """C-16: a header of the preset, such as Stripe-Should-Retry, decides."""
    assert Network(Answer(500, hint=False)).run().attempts == 1
    assert Network(Answer(400, hint=True), DONE).run().attempts == 2


@pytest.mark.parametrize("status", [401, 403, 413, 429])
def test_a_refusal_before_the_key_is_looked_up_does_not_settle_a_lost_attempt(status):
    """C-18: the lost attempt may have happened, although the last answer was a refusal."""
    assert Network(LOST, Answer(status)).run(attempts_max=2).outcome == "unknown"
    assert Network(Answer(status)).run(attempts_max=2).outcome == "refused"
    assert Network(LOST, Answer(422)).run().outcome == "refused"


@pytest.mark.parametrize("answer", [LOST, Answer(503)], ids=str)
def test_a_post_without_a_key_is_sent_once(answer):
    """C-20: the server may have processed it."""
    result = Network(answer).run(key=None)
    assert (result.outcome, result.attempts, result.gave_up) == ("unknown", 1, "no-key")
    assert Network(NOT_SENT).run(key=None).outcome == "refused"


def test_idempotent_methods_are_sent_again_without_a_key_unless_the_policy_says_no():
    assert Network(LOST, DONE).run("PUT", None).attempts == 2
    assert Network(LOST, DONE).run("PUT", None, methods_without_key=()).attempts == 1


def test_attempts_and_time_are_bounded_and_the_end_is_unknown():
    """C-13, C-18: an endless outage ends by attempts or by the deadline, with the key."""
    by_attempts = Network(Answer(503)).run(attempts_max=3)
    assert (by_attempts.outcome, by_attempts.attempts, by_attempts.gave_up, by_attempts.key) == (
        *("unknown", 3, "attempts"),
        "k",
    )
    by_time = Network(Answer(503), takes_s=20).run(attempts_max=100)
    assert (by_time.outcome, by_time.gave_up) == ("unknown", "deadline")
    nowhere = Network(NOT_SENT).run(attempts_max=3)
    assert (nowhere.outcome, nowhere.gave_up) == ("refused", "attempts")


def test_a_pause_that_lasted_too_long_ends_the_call():
    network = Network(LOST, DONE, overslept_s=60)
    assert network.run().gave_up == "deadline"
    assert len(network.sent) == 1


def test_the_wait_that_the_server_asks_for_is_obeyed_up_to_a_limit():
    """C-07, C-11: at least Retry-After, with a random part on top, and never an hour."""
    network = Network(Answer(503, retry_after_s=2.0), Answer(429, retry_after_s=999_999.0), DONE)
    network.run(retry_after_max="30s")
    assert network.slept == [pytest.approx(2 + 0.1), pytest.approx(30 + 0.2)]


def test_pauses_grow_and_are_random_parts_of_their_limit():
    """C-12: full jitter."""
    for jitter in (0.0, 0.25, 1.0):
        network = Network(LOST, jitter=jitter)
        network.run(attempts_max=5, backoff_base="1s")
        assert network.slept == [jitter * pause for pause in (1, 2, 4, 8)]


def test_the_budget_stops_a_storm_of_retries():
    """C-14: of 200 calls in an outage, few are sent twice."""
    budget = RetryBudget(10)
    networks = [Network(Answer(503)) for _ in range(200)]
    results = [network.run(budget=budget) for network in networks]
    assert sum(len(network.sent) for network in networks) == 200 + 10
    assert results[-1].gave_up == "budget"


def test_waiting_for_the_first_attempt_costs_no_budget():
    assert Network(IN_PROGRESS, IN_PROGRESS, DONE).run(budget=RetryBudget(0)).attempts == 3


def test_an_expired_key_is_renewed_only_where_the_caller_said_so():
    """C5: and only once."""
    expired = Answer(409, "key-expired", "never")
    assert Network(expired).run().attempts == 1
    network = Network(LOST, expired, DONE)
    assert network.run(renew_expired=True).key == "new"
    assert [key for key, _, _ in network.sent] == ["k", "k", "new"]
    assert Network(expired).run(renew_expired=True).attempts == 2


# ------------------------------------------------------------------------- accepted operations

ACCEPTED = Answer(202, location="/operations/1", retry_after_s=1.0)


def test_an_accepted_operation_is_followed_on_request_only():
    assert Network(ACCEPTED).run().outcome == "done"
    network = Network(ACCEPTED, ACCEPTED, LOST, Answer(503), Answer(201, is_replay=True))
    result = network.run(follow_accepted=True)
    assert (result.outcome, result.attempts, result.was_replayed) == ("done", 1, True)
    assert [poll for _, poll, _ in network.sent] == [None, *["/operations/1"] * 4]
    assert network.slept[0] == pytest.approx(1.1)
    assert Network(Answer(202)).run(follow_accepted=True).outcome == "done"


def test_an_interrupted_operation_is_sent_again():
    network = Network(ACCEPTED, Answer(200, advice="same-key"), Answer(201))
    result = network.run(follow_accepted=True)
    assert (result.outcome, result.attempts) == ("done", 2)


@pytest.mark.parametrize("status", [401, 404, 410])
def test_an_address_that_is_gone_says_nothing_about_the_operation(status):
    assert Network(ACCEPTED, Answer(status)).run(follow_accepted=True).outcome == "unknown"
    stored = Answer(status, is_replay=True)
    assert Network(ACCEPTED, stored).run(follow_accepted=True).outcome == "refused"


@pytest.mark.parametrize("overslept_s", [0, 60])
def test_an_operation_that_outlasts_the_deadline_is_unknown(overslept_s):
    network = Network(ACCEPTED, jitter=0.0, overslept_s=overslept_s)
    result = network.run(follow_accepted=True)
    assert (result.outcome, result.gave_up, result.attempts) == ("unknown", "deadline", 1)


# -------------------------------------------------------------------- every sequence of answers

ANSWERS = st.one_of(
    st.builds(Lost, st.booleans()),
    st.builds(
        Answer,
        st.sampled_from([200, 201, 202, 303, 400, 401, 408, 409, 422, 425, 429, 500, 503]),
        st.sampled_from([None, "in-progress", "outcome-unknown", "key-expired", "key-reused"]),
        st.sampled_from([None, "same-key", "new-key", "never"]),
        st.sampled_from([None, None, True, False]),
        st.sampled_from([None, 0.0, 1.0, 1e6]),
        st.booleans(),
        st.sampled_from([None, "/operations/1"]),
    ),
)
POLICIES = st.fixed_dictionaries(
    {
        "attempts_max": st.integers(1, 8),
        "deadline": st.sampled_from([1, 10, 60]),
        "renew_expired": st.booleans(),
        "follow_accepted": st.booleans(),
    }
)


@given(
    script=st.lists(ANSWERS, min_size=1, max_size=12),
    key=st.sampled_from([None, "k"]),
    jitter=st.floats(0, 1),
    takes_s=st.sampled_from([0.0, 0.5, 7.0]),
    spent_s=st.sampled_from([0.0, 0.9]),
    settings=POLICIES,
)
def test_no_sequence_of_answers_breaks_a_promise(
    *, script, key, jitter, takes_s, spent_s, settings
):
    """K2, C1, C5: one key, no retry after a definite answer, no attempt after the deadline."""
    network = Network(*script, jitter=jitter, takes_s=takes_s)
    budget = RetryBudget(5)
    result = network.run(key=key, budget=budget, before=(spent_s, spent_s > 0), **settings)
    requests = [sent for sent in network.sent if sent[1] is None]
    keys = [sent[0] for sent in requests]
    assert result.attempts == len(requests) <= settings["attempts_max"]
    assert all(begun_s < settings["deadline"] - spent_s for _, _, begun_s in network.sent)
    assert set(keys) <= ({"k", "new"} if settings["renew_expired"] and key else {key})
    assert keys == sorted(keys, key=lambda sent: sent == "new") if key else len(keys) == 1
    longest_s = 60 + 10
    assert all(0 <= pause_s <= longest_s for pause_s in network.slept)
    if result.outcome == "done":
        assert not result.gave_up
    if result.gave_up and spent_s:  # a request that was redirected may have happened
        assert result.outcome == "unknown"
    if not settings["follow_accepted"] and not settings["renew_expired"]:
        given_answers = (script + script[-1:] * 100)[: len(requests)]
        assert all(is_retried(answer, DEFAULT) for answer in given_answers[:-1])


# ------------------------------------------------------------------------- reading a response


def read(status=503, body=b"", preset=DEFAULT, wall_s=0.0, **headers):
    headers = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    if body and "content-type" not in headers:
        headers["content-type"] = "application/problem+json"
    return answer_of(
        status, lambda name: headers.get(name.lower()), body, preset=preset, wall_s=wall_s
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        (" 120 ", 120.0),
        ("0", 0.0),
        ("9" * 5000, float("9" * 12)),
        (formatdate(1_700_000_002, usegmt=True), 2.0),
        ("Tue, 14 Nov 2023 22:13:22 -0000", 2.0),
        (formatdate(1_600_000_000, usegmt=True), 0.0),
        ("-1", None),
        ("soon", None),
        ("٣", None),
        ("", None),
        ("Tue, 99 Nov 2023 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_junk_is_ignored(value, seconds):
    """C-11: seconds and HTTP dates."""
    assert read(Retry_After=value, wall_s=1_700_000_000.0).retry_after_s == seconds


def test_the_clock_of_the_server_counts_for_a_date():
    later, sent = formatdate(5_000_010, usegmt=True), formatdate(5_000_000, usegmt=True)
    assert read(Retry_After=later, Date=sent, wall_s=9e9).retry_after_s == 10.0


@pytest.mark.parametrize(
    ("document", "code", "advice"),
    [
        ({"code": "in-progress", "retry": "same-key", "detail": "…", "new": [1]}, "in-progress", 1),
        ({"type": "https://docs.example/problems#key-reused"}, "key-reused", 0),
        ({"type": "https://docs.example/problems/key-reused"}, "key-reused", 0),
        ({"error": {"code": "idempotency_key_in_use"}}, "idempotency_key_in_use", 0),
        ({"error": "words", "code": 7, "retry": "maybe", "type": "about:blank"}, None, 0),
        ({"type": ""}, None, 0),
        ([1], None, 0),
    ],
)
def test_a_problem_is_read_by_its_code_and_advice(document, code, advice):
    """C-27: other titles, details and members change nothing."""
    answer = read(409, json.dumps(document).encode())
    assert (answer.code, answer.advice) == (code, "same-key" if advice else None)


@pytest.mark.parametrize("body", [b"{", b"[" * 60_000, b'{"code": "' + b"x" * 70_000 + b'"}'])
def test_a_hostile_body_is_no_problem_document(body):
    assert read(409, body).code is None
    assert read(409, b'{"code": "in-progress"}', content_type="text/html").code is None


def test_markers_and_hints_are_read_from_the_headers_of_the_preset():
    """C-19: a replay is visible."""
    assert read(202, Idempotent_Replayed="true", Location="/x") == Answer(
        202, is_replay=True, location="/x"
    )
    assert read(201, Idempotent_Replayed="True") == Answer(201, is_replay=True)
    preset = Preset(name="own", retry_header="Should-Retry", replayed_header=None)
    assert read(500, preset=preset, Should_Retry="false", Idempotent_Replayed="true") == Answer(
        500, hint=False
    )
    assert read(500, preset=preset, Should_Retry="perhaps").hint is None


def test_only_the_bodies_that_can_decide_are_read():
    assert is_body_read(409, "application/problem+json")
    assert is_body_read(200, "application/json", is_poll=True)
    assert not is_body_read(200, "application/json")
    assert not is_body_read(500, None)
