"""The same promises for plain functions: `engine.run` and `engine.guard`."""

import copy
import threading

import pytest

from coatcheck import (
    KeyBusy,
    KeyExpired,
    KeyRejected,
    KeyReused,
    Misconfigured,
    OutcomeUnknown,
    ResultUnavailable,
    StoreUnavailable,
    current_operation,
)

from .api import Api, until
from .conftest import OpenApi
from .doubles import Faulty
from .shop import WAIT_S_MAX


class Counted:
    """A function that counts its calls."""

    def __init__(self, result=None, *, errors=()) -> None:
        self.__qualname__ = "Counted"
        self.result = result
        self.errors = list(errors)
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.result


@pytest.mark.parametrize(
    "value",
    [None, 0, False, "", {}, [], 0.0, b"", b"\x00\xff", "text", {"a": [1, None]}, 2**70],
    ids=repr,
)
def test_every_value_is_a_result(open_api: OpenApi, value):
    """L2: nothing, zero, false and empty too; from memory and from the store."""
    api = open_api()
    function = Counted(value)
    again = Counted("another")
    results = [
        api.run("k-1", function, scope="s"),
        api.run("k-1", again, scope="s"),
        open_api().run("k-1", again, scope="s"),
    ]
    assert results == [value] * 3
    assert {type(result) for result in results} == {type(value)}
    assert (function.calls, again.calls) == (1, 0)


def test_what_a_retry_gets_is_what_the_first_call_got(api: Api):
    """L2: JSON knows no tuples, so the first call gets a list, too."""
    assert api.run("k-1", Counted((1, 2)), scope="s") == [1, 2]
    assert api.run("k-1", Counted(), scope="s") == [1, 2]


def test_a_result_that_cannot_be_kept_reaches_the_first_caller(api: Api):
    """L12: a retry is told that it happened."""
    thing = object()
    assert api.run("k-1", Counted(thing), scope="s") is thing
    with pytest.raises(ResultUnavailable):
        api.run("k-1", Counted(), scope="s")


def test_other_arguments_with_the_same_key_are_refused(api: Api):
    """F1."""
    function = Counted()
    api.run("k-1", function, 1, scope="s")
    with pytest.raises(KeyReused) as caught:
        api.run("k-1", function, 2, scope="s")
    assert caught.value.reference
    assert function.calls == 1


class Basket:
    """An argument that is neither JSON nor a dataclass, but has a value."""

    def __init__(self, item: str) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Basket) and other.item == self.item

    __hash__ = None  # type: ignore[assignment]  # it may change


class Slotted(Basket):
    """The same without a dictionary."""

    __slots__ = ("item",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({("coat", "red"): 1}, {("coat", "red"): 2}),
        ({1: "coat", "gift": False}, {1: "hat", "gift": False}),
        ({b"coat": 1}, {b"coat": 2}),
        (10**5_000, 10**5_001),
        (Basket("coat"), Basket("hat")),
        (Slotted("coat"), Slotted("hat")),
    ],
    ids=["tuples", "mixed", "bytes", "digits", "object", "slots"],
)
def test_arguments_that_json_cannot_say_are_never_taken_for_equal(api: Api, one, other):
    """F1: the second call never gets the first one's result, but a retry does."""
    function = Counted("paid")
    api.run("k-1", function, 1, one, scope="s")
    with pytest.raises(KeyReused):
        api.run("k-1", function, 1, other, scope="s")
    assert api.run("k-1", function, 1, copy.deepcopy(one), scope="s") == "paid"
    assert function.calls == 1


def test_an_exception_gives_the_key_of_a_function_back(api: Api):
    """L4."""
    function = Counted("done", errors=[ValueError("a bug")])
    with pytest.raises(ValueError, match="a bug"):
        api.run("k-1", function, scope="s")
    assert api.run("k-1", function, scope="s") == "done"
    assert function.calls == 2


def test_a_scope_keeps_the_same_keys_apart(api: Api):
    """S1."""
    one, other = Counted("one"), Counted("other")
    assert api.run("k-1", one, scope="a") == "one"
    assert api.run("k-1", other, scope="b") == "other"


def named_place(module: str, result: str):
    """A function called `place`, as *module* has it."""
    names: dict[str, object] = {"__name__": module, "result": result}
    exec("def place(number):\n    return result", names)
    return names["place"]


def test_functions_of_one_name_in_two_modules_are_two_operations(api: Api):
    """S1: where no scope is given."""
    ordered, refunded = named_place("orders", "ordered"), named_place("refunds", "refunded")
    assert api.run("order-42", ordered, 42) == "ordered"
    assert api.run("order-42", refunded, 42) == "refunded"


def test_a_function_without_a_name_needs_a_scope(api: Api):
    """S1: else all of them are one operation, and the second never runs."""
    done: list[str] = []
    with pytest.raises((Misconfigured, ValueError)):
        api.run("order-42", lambda: done.append("charged"))
    assert done == []


def test_a_call_that_still_runs_makes_others_wait(open_api: OpenApi):
    """L1, L3: and all get its result."""
    api = open_api(wait="1h", lease="2h")
    entered, may_go_on = threading.Event(), threading.Event()

    def slow() -> str:
        entered.set()
        assert may_go_on.wait(WAIT_S_MAX)
        return "the one"

    first = api.workers.submit(lambda: api.run("k-1", slow, scope="s"))
    assert entered.wait(WAIT_S_MAX)
    second = api.workers.submit(lambda: api.run("k-1", Counted("another"), scope="s"))
    until(lambda: api.waiters() == 1)
    may_go_on.set()
    assert first.result(20) == second.result(20) == "the one"


def test_a_call_that_still_runs_is_told_of_with_the_same_words(open_api: OpenApi):
    """L3: as over HTTP."""
    api = open_api(in_flight="409")

    def outer() -> str:
        with pytest.raises(KeyBusy) as caught:
            api.run("k-1", Counted(), scope="s")
        assert caught.value.retry_after_s == 1
        assert caught.value.problem.code == "in-progress"
        return "outer"

    assert api.run("k-1", outer, scope="s") == "outer"


def test_a_guarded_function_takes_its_key_from_its_arguments(api: Api):
    """K4: every call is a guarded one."""
    orders: list[int] = []

    def place(number: int, note: str = "") -> int:
        orders.append(number)
        return len(orders)

    guarded = api.guard(place, key=lambda number, note="": f"order-{number}", scope="orders")
    assert [guarded(1), guarded(2), guarded(1), guarded(2)] == [1, 2, 1, 2]
    assert orders == [1, 2]
    with pytest.raises(KeyReused):
        guarded(1, "another note")


@pytest.mark.parametrize("key", [None, ""])
def test_a_call_that_has_no_key_of_its_own_is_refused(api: Api, key: object):
    """K3, K4: two orders without a number are two orders, and not one that is called "None"."""
    placed: list[str] = []
    guarded = api.guard(placed.append, key=lambda _what: key, scope="orders")
    for what in ("a coat", "a hat"):
        with pytest.raises(KeyRejected):
            guarded(what)
    assert placed == []


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_what_cannot_be_a_key_is_refused_for_functions_too(api: Api, key: str):
    """K3, X2."""
    function = Counted()
    with pytest.raises(KeyRejected):
        api.run(key, function, scope="s")
    assert function.calls == 0


def test_the_function_knows_its_operation(api: Api):
    """K5: inside, and only there."""
    seen = api.run("k-1", lambda: current_operation().key, scope="s")
    assert seen == "k-1"
    assert current_operation() is None


def test_without_the_store_no_function_runs(open_api: OpenApi, new_store):
    """D2."""
    store = Faulty(new_store())
    api = open_api(store=store)
    store.is_down = True
    function = Counted()
    with pytest.raises(StoreUnavailable):
        api.run("k-1", function, scope="s")
    assert function.calls == 0


def test_a_late_call_can_be_refused(open_api: OpenApi, clock):
    """T2."""
    api = open_api(on_expired="refuse")
    api.run("k-1", Counted(), scope="s")
    clock.advance(24 * 3_600)
    with pytest.raises(KeyExpired):
        api.run("k-1", Counted(), scope="s")


def test_a_failure_with_an_unclear_end_is_parked(open_api: OpenApi):
    """L4, L5: under a policy that runs nothing twice."""
    api = open_api(recovery="manual")
    with pytest.raises(ValueError, match="a bug"):
        api.run("k-1", Counted(errors=[ValueError("a bug")]), scope="s")
    with pytest.raises(OutcomeUnknown):
        api.run("k-1", Counted(), scope="s")
