"""A handler that was changed between two attempts: what was begun or done is not forgotten (L6, L7).

Each test deploys one version of a handler, lets an attempt of it die or fail, and deploys another.
"""

import pytest

from coatcheck import DidNotHappen, Happened, Policy, current_operation
from coatcheck.core.progress import progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT
from coatcheck.errors import OutcomeUnknown, StepInDoubt, StepsChanged
from tests.engine.small_api import small_api
from tests.support.engines import BY_ADA, Killed, WatchedStore
from tests.support.times import Clock


class Release:
    """One version of a handler: the steps it takes, and how it ends."""

    def __init__(self, runs, *steps, ends="done", dies_in="", **options):
        self.runs = runs
        self.steps = steps
        self.options = options
        self.ends = ends
        self.dies_in = dies_in

    def _run(self, name):
        self.runs.append(name)
        if self.dies_in == name:
            raise Killed
        return name

    def handle(self):
        for name in self.steps:
            yield current_operation().step(name, self._run, name, **self.options)
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends


class Deployed:
    """One engine and one key, for every release."""

    def __init__(self, guards):
        self.guards = guards
        self.clock = Clock()
        self.store = WatchedStore()
        self.engine = guards.engine(self.store, Policy(lease="60s"), clock=self.clock)

    def run(self, release):
        handle = release.handle if isinstance(release, Release) else release
        return self.guards.run(self.engine, "order", handle, scope="shop")

    def rerun(self, release):
        handle = self.guards.flavoured(release.handle)
        return self.guards.done(self.engine.rerun(self.store.record.id, handle, **BY_ADA))

    def die(self, release):
        """An attempt of *release* dies, and its lease expires."""
        with pytest.raises(Killed):
            self.run(release)
        self.clock.advance(61)


@pytest.fixture
def deployed(guards):
    return Deployed(guards)


@pytest.fixture
def runs():
    return []


# --- a step that was begun --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"at_most_once": True}, {"probe": lambda _operation: DidNotHappen()}]
)
def test_a_step_that_was_begun_is_not_run_again_by_a_release_that_calls_it_plain(
    deployed, runs, options
):
    """L6: what was declared when it began counts, and not what is declared now."""
    deployed.die(Release(runs, "charge", dies_in="charge", **options))
    with pytest.raises(StepInDoubt):
        deployed.run(Release(runs, "charge"))
    assert deployed.store.record.state == IN_DOUBT
    assert runs == ["charge"]


def test_a_release_may_bring_the_probe_that_knows(deployed, runs):
    """L6: then there is no doubt."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    later = Release(runs, "charge", probe=lambda _operation: Happened(value="found"))
    assert deployed.run(later) == "done"
    assert runs == ["charge"]


def test_a_step_that_was_begun_and_is_gone_leaves_a_doubt(deployed, runs):
    """L6: whatever else the next release does, the outcome of the charge is still unknown."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    with pytest.raises(StepInDoubt, match="charge"):
        deployed.run(Release(runs))
    assert deployed.store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        deployed.run(Release(runs))


def test_a_step_that_was_begun_stays_for_the_attempt_after_one_that_fails(deployed, runs):
    """L6: an error ends nothing, so it hides nothing."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    with pytest.raises(ValueError, match="early"):
        deployed.run(Release(runs, ends=ValueError("early")))
    assert deployed.store.record.state == FAILED
    with pytest.raises(StepInDoubt):
        deployed.run(Release(runs))


def test_a_handler_may_go_on_after_a_step_that_failed_in_its_own_attempt(deployed):
    """L7: a declined card is a result."""

    def declined():
        raise ValueError("declined")

    def handle():
        with pytest.raises(ValueError, match="declined"):
            yield current_operation().step("charge", declined, at_most_once=True)
        return (yield current_operation().step("notify", lambda: "notified"))

    assert deployed.run(handle) == "notified"
    assert deployed.store.record.state == COMPLETED


def test_a_doubt_that_a_function_swallows_and_returns_after_is_still_one(deployed, runs):
    """L6: its result does not count."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))

    def swallow():
        with pytest.raises(StepInDoubt):
            yield current_operation().step("charge", runs.append, "again", at_most_once=True)
        return "all is well"

    with pytest.raises(StepInDoubt):
        deployed.run(swallow)
    assert (deployed.store.record.state, runs) == (IN_DOUBT, ["charge"])


# --- a step that is done ----------------------------------------------------------------------


def test_a_step_that_is_done_and_gone_fails_loudly(deployed, runs):
    """L7: the attempt has answered without knowing what was done, and runs no second time."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged, match="'charge'"):
        deployed.run(Release(runs))
    assert deployed.store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        deployed.run(Release(runs))
    assert runs == ["charge", "ship"]


def test_an_attempt_that_raises_need_not_have_taken_the_finished_steps(deployed, runs):
    """L7: its own error is raised, the claim is released, and the next one goes on."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(ValueError, match="sold out"):
        deployed.run(Release(runs, ends=ValueError("sold out")))
    assert deployed.store.record.state == FAILED
    assert deployed.run(Release(runs, "charge", "ship")) == "done"
    assert runs == ["charge", "ship", "ship"]


def test_an_operator_may_run_what_takes_no_steps(deployed, runs):
    """L6: the operator has found out what is done."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged):
        deployed.run(Release(runs))
    assert deployed.rerun(Release(runs, ends="by hand")) == "by hand"
    assert deployed.store.record.state == COMPLETED


def test_an_operator_can_continue_with_the_release_that_began_it(deployed, runs):
    """L6, L7: what is done stays done."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged):
        deployed.run(Release(runs))
    assert deployed.rerun(Release(runs, "charge", "ship")) == "done"
    assert runs == ["charge", "ship", "ship"]


# --- over HTTP --------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["wait", "202"])
@pytest.mark.parametrize(
    ("leaves", "answers", "status", "state"),
    [
        ("begun", 201, 409, IN_DOUBT),  # the doubt would vanish
        ("begun", 422, 409, IN_DOUBT),  # and the money is gone, perhaps
        ("begun", 503, 503, FAILED),  # nothing is final, so nothing is lost
        ("done", 201, 409, IN_DOUBT),  # it says "done", and does not know what was
        ("done", 422, 422, COMPLETED),  # it refuses, which is for the handler to decide
        ("done", 503, 503, FAILED),
        ("done", 401, 401, FAILED),
    ],
)
def test_a_response_without_the_step_that_was_taken_before(
    guards, store, caplog, leaves, answers, *, status, state, in_flight
):
    """L6, L7: the first release takes a step, and the second takes none."""
    requests = []

    def charge():
        if leaves == "begun":
            raise TimeoutError("no answer")
        return "charged"

    def place(operation):
        requests.append(1)
        if len(requests) > 1:
            return answers
        yield operation.step("charge", charge, at_most_once=leaves == "begun")
        return 503

    post = small_api(guards, place, store, policy=Policy(in_flight=in_flight))
    post()
    assert post().status == status
    assert store.record.state == state
    assert progress_of(store.record).step("charge") is not None
    assert any("'charge'" in message for message in caplog.messages) == (status == 409)
