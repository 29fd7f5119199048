"""R1: in observe mode everything runs as before, and the reports say what would have been."""

import logging
import threading

import pytest

from coatcheck import Decision, Engine, Misconfigured, Policy
from coatcheck.core.record import COMPLETED, RUNNING
from coatcheck.telemetry import Observed
from tests.support.failing_stores import Faulty
from tests.support.http import ORDER
from tests.support.times import WAIT_S_MAX, eventually

from .api import Api, OpenApi
from .shop import Call, Gate, Said, in_turn, raises, says

OURS = {"idempotency-reference", "idempotent-replayed"}


class Watcher:
    """Remembers decisions and events; they come from background threads."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.events: list[Observed] = []

    @property
    def settings(self):
        return {"observers": [self.decisions.append], "listeners": [self._listen]}

    def _listen(self, event: object) -> None:
        if isinstance(event, Observed):
            self.events.append(event)

    def outcomes(self, count: int) -> list[tuple[str, str]]:
        """The outcomes of the first *count* requests, when all of them are reported."""
        eventually(lambda: len(self.events) >= count)
        assert len(self.decisions) == len(self.events) == count
        assert [event.outcome for event in self.events] == [d.outcome for d in self.decisions]
        return [(decision.outcome, decision.code) for decision in self.decisions]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def store(new_store) -> Faulty:
    return Faulty(new_store())


@pytest.fixture
def api(open_api: OpenApi, store: Faulty, watcher: Watcher) -> Api:
    return open_api(mode="observe", store=store, settings=watcher.settings)


@pytest.mark.persists
def test_a_retry_runs_again_and_is_reported_as_a_replay(api: Api, watcher: Watcher):
    """R1."""
    first = api.post()
    watcher.outcomes(1)
    again = api.post()
    assert watcher.outcomes(2) == [("executed", ""), ("would_replay", "")]
    assert [first.body, again.body] == [b'{"order": 1}', b'{"order": 2}']
    assert not OURS & {name for response in (first, again) for name, _ in response.headers}
    assert {decision.label for decision in watcher.decisions} == {"POST /orders"}
    (reference,) = {decision.reference for decision in watcher.decisions}
    record = api.record(reference)
    assert (record.state, record.label, record.response) == (
        *(COMPLETED, "POST /orders (observed)"),
        None,
    )


def test_a_request_that_would_be_refused_runs(open_api: OpenApi, watcher: Watcher):
    """R1, K1, F1, X2: for each reason that is known before the handler."""
    api = open_api(mode="observe", required=True, body_bytes_max=20, settings=watcher.settings)
    assert api.post(None).status == 201
    assert api.post("a, b").status == 201
    assert api.post("k-1", body=b"x" * 21).status == 201
    assert api.post("k-1").status == 201
    watcher.outcomes(4)
    assert api.post("k-1", body=b'{"item": 2}').status == 201
    assert watcher.outcomes(5) == [
        ("would_refuse", "key-missing"),
        ("would_refuse", "key-invalid"),
        ("would_refuse", "body-too-large"),
        ("executed", ""),
        ("would_refuse", "key-reused"),
    ]
    assert [call.body for call in api.shop.effects][2:4] == [b"x" * 21, ORDER]


def test_a_request_without_a_key_is_not_reported(api: Api, watcher: Watcher):
    """R1, S3: record mode would not guard it."""
    assert api.post(None).status == 201
    assert api.send("GET", "/orders").status == 201
    api.post()
    assert watcher.outcomes(1) == [("executed", "")]


@pytest.mark.parametrize(
    ("in_flight", "outcome"),
    [("wait", "would_wait"), ("202", "would_wait"), ("409", "would_refuse")],
)
def test_a_simultaneous_duplicate_runs_without_waiting(
    open_api: OpenApi, watcher: Watcher, in_flight: str, outcome: str
):
    """R1, L3."""
    api = open_api(mode="observe", in_flight=in_flight, settings=watcher.settings)
    gate = Gate()
    api.shop.answers["/orders"] = in_turn(gate, says(201, b"second"))
    first = api.start_post()
    gate.wait_until_entered()
    eventually(lambda: [record.state for record in api.records()] == [RUNNING])
    assert api.post().body == b"second"
    assert watcher.outcomes(1) == [(outcome, "in-progress")]
    gate.open()
    assert first.result(WAIT_S_MAX).body == b"done"
    assert watcher.outcomes(2)[1] == ("executed", "")


def test_the_claim_of_a_long_request_is_renewed(open_api: OpenApi, watcher: Watcher, clock):
    """R1, L5: after its lease a duplicate would still have waited."""
    api = open_api(mode="observe", settings=watcher.settings)
    gate = Gate()
    api.shop.answers["/orders"] = in_turn(gate, says(201))
    first = api.start_post()
    gate.wait_until_entered()
    eventually(lambda: api.engine.attempts.heartbeat.leases)
    clock.advance(15)
    api.engine.attempts.heartbeat.tick()
    clock.advance(15)
    api.post()
    assert watcher.outcomes(1) == [("would_wait", "in-progress")]
    gate.open()
    first.result(WAIT_S_MAX)
    watcher.outcomes(2)
    assert not api.engine.attempts.heartbeat.leases


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (says(503), [("executed", ""), ("executed", "")]),
        (says(404), [("executed", ""), ("would_replay", "")]),
        (raises(ValueError("a bug")), [("failed", ""), ("failed", "")]),
    ],
)
def test_an_outcome_counts_as_in_record_mode(api: Api, watcher: Watcher, handler, expected):
    """R1, L4: what is not kept would have run again."""
    api.shop.answers["/orders"] = handler
    for count in (1, 2):
        api.post()
        outcomes = watcher.outcomes(count)
    assert outcomes == expected
    assert api.effects() == 2


def test_an_error_of_the_application_is_raised_as_before(api: Api):
    """R1."""
    api.shop.answers["/orders"] = raises(ValueError("a bug"))
    assert isinstance(api.post().error, ValueError)


def test_a_large_body_reaches_the_application_whole(api: Api, watcher: Watcher):
    """R1: over 1 MiB it is not read in advance, and compared by its length."""
    large = b"a" * 3_000_000
    for count, body in enumerate((large, large, large + b"a"), 1):
        length = [("Content-Length", str(len(body)))]
        assert api.post(body=body, headers=length).status == 201
        watcher.outcomes(count)
    assert [len(call.body) for call in api.shop.effects] == [3_000_000, 3_000_000, 3_000_001]
    assert watcher.outcomes(3) == [
        *(("executed", ""), ("would_replay", "")),
        ("would_refuse", "key-reused"),
    ]


def test_a_store_that_hangs_delays_nothing(api: Api, store: Faulty, watcher: Watcher):
    """R1, D2: the response is there while the store still has not answered."""
    may_answer = threading.Event()
    store.before = lambda _swaps: may_answer.wait(WAIT_S_MAX)
    assert api.post().status == 201
    assert watcher.decisions == []
    may_answer.set()
    assert watcher.outcomes(1) == [("executed", "")]


def test_an_outage_hurts_nothing_and_is_logged_once(
    api: Api, store: Faulty, watcher: Watcher, caplog
):
    """R1, D2: each request is reported; the error is not repeated for each."""
    store.is_down = True
    for _ in range(5):
        assert api.post().status == 201
    assert watcher.outcomes(5) == [("would_refuse", "store-unavailable")] * 5
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("coatcheck: requests are not observed: the store is unavailable")


def test_a_store_that_is_down_at_the_end_hurts_nothing(api: Api, store: Faulty, watcher: Watcher):
    """R1, D2."""

    def handler(_call: Call) -> Said:
        eventually(lambda: api.engine.attempts.heartbeat.leases)
        store.is_down = True
        return Said()

    api.shop.answers["/orders"] = handler
    assert api.post().status == 201
    assert watcher.outcomes(1) == [("executed", "")]


def test_an_observed_key_means_nothing_in_record_mode(
    open_api: OpenApi, store: Faulty, watcher: Watcher
):
    """R1: a retry that crosses the change of the mode runs, as it would have without us."""
    observing = open_api(mode="observe", store=store, settings=watcher.settings)
    recording = open_api(store=store)
    observing.post()
    watcher.outcomes(1)
    first, again = recording.post(), recording.post()
    assert (first.status, first.is_replay, again.is_replay) == (201, False, True)
    observing.post()
    assert watcher.outcomes(2)[1] == ("would_replay", "")


def test_a_handler_may_use_its_operation(api: Api, watcher: Watcher):
    """R1, K5: steps run and are not recorded, so that a marked route can be observed, too."""
    called: list[str] = []

    def handler(call: Call) -> Said:
        operation = call.operation
        assert (operation.key, operation.attempt, operation.fence) == ("k-1", 1, 0)
        assert len(operation.derive("charge")) == 36
        operation.note("about to charge")
        operation.progress(0.5, "half")
        assert operation.step("charge", lambda: called.append("charge") or 7) == 7
        return Said()

    api.shop.answers["/orders"] = handler
    assert [api.post().status, api.post().status] == [201, 201]
    assert called == ["charge", "charge"]


def test_what_cannot_be_observed_runs(open_api: OpenApi, caplog):
    """R1: a mistake in `caller=` or `key=` is logged, and changes nothing."""

    def caller(_request):
        raise ZeroDivisionError

    api = open_api(mode="observe", caller=caller)
    assert api.post().status == 201
    assert "coatcheck: a request could not be observed" in caplog.messages


def test_a_natural_key_is_observed(open_api: OpenApi, watcher: Watcher):
    """R1, K4."""
    api = open_api(
        mode="observe", key=lambda request: request.json()["item"], settings=watcher.settings
    )
    for count in (1, 2):
        api.post(None)
        watcher.outcomes(count)
    api.post(None, body=b"{}")
    assert watcher.outcomes(3) == [
        *(("executed", ""), ("would_replay", "")),
        ("would_refuse", "key-invalid"),
    ]


def test_a_function_cannot_be_observed():
    """R1: that is said, and the function does not run."""
    with Engine("memory://", Policy(mode="observe")) as engine:
        with pytest.raises(Misconfigured, match="mode='observe' is for HTTP requests"):
            engine.run("k", print, scope="s")
        assert engine.run("k", lambda: 1, scope="s", policy=Policy()) == 1
