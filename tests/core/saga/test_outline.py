"""The outline of a saga: which steps its source names (E3)."""

from coatcheck.core.saga.outline import OutlineStep, changed_words, read_outline, signature_of

SOURCE = """
@sagas.saga("trip", key=lambda trip: trip.id)
async def trip(saga, trip):
    hold = await saga.step("flight", book, trip, undo=cancel, probe=find)
    await saga.gather(saga.step("hotel", book), saga.step(f"car-{trip.id}", book, undo=agency.no))
    other.step("not this")
    saga.pivot()
    saga.step()
    await saga.step("mail")
"""


def test_the_steps_are_read_in_their_order():
    assert read_outline(SOURCE) == (
        OutlineStep("flight", "book", "cancel", "find"),
        OutlineStep("hotel", "book", group=1),
        OutlineStep("f'car-{trip.id}'", "book", "agency.no", group=1),
        OutlineStep("pivot", is_pivot=True),
        OutlineStep("mail"),
    )


def test_a_source_without_a_function_has_no_steps():
    assert read_outline("key=lambda saga: saga.step('x')),") == ()
    assert read_outline("x = 1") == ()
    assert read_outline("def f():\n    pass") == ()
    assert read_outline("def f(self):\n    self.step('x')", is_method=True) == ()


def test_the_saga_is_the_second_argument_of_a_method():
    source = "def trip(self, saga, /, trip):\n    self.step('y')\n    saga.step('x')"
    assert read_outline(source, is_method=True) == (OutlineStep("x"),)


def test_the_signature_has_what_may_not_change():
    """E3: names, order, undos and the pivot; not which function does it."""
    signature = signature_of(read_outline(SOURCE))
    names = ["flight (undo)", "hotel", "f'car-{trip.id}' (undo)", "pivot", "mail"]
    assert signature == names
    many = tuple(OutlineStep(f"step {number}") for number in range(1_000))
    assert 10 < len(signature_of(many)) < 300


def test_a_change_is_named():
    assert changed_words(["a", "b", "b"], ["a", "c", "c"]).endswith("began: b gone; c new")
    assert changed_words(["a"], ["a", "c"]).endswith("began: c new")
    assert changed_words(["a", "b"], ["b", "a"]).endswith("began: the order of its steps")
