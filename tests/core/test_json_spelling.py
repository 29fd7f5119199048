"""One machine for many calls spells JSON as the public encoder does, with or without it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.json_spelling import speller

VALUE = {"b": [1, "é", None, True], "a": {"c": -2}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
options = st.fixed_dictionaries({"sort_keys": st.booleans(), "ensure_ascii": st.booleans()})


@given(json_values, options)
def test_it_spells_as_the_standard_library_does(value, chosen):
    """F1, L1: what was stored by one release is compared and read by the next."""
    assert speller(**chosen)(value) == json.dumps(value, separators=(",", ":"), **chosen)


@pytest.mark.parametrize("made", [None, lambda *_: lambda _value, _level: ("null",)])
def test_an_interpreter_without_that_machine_spells_the_same(made, monkeypatch):
    """F1: a retry may meet another interpreter than the first request did."""
    monkeypatch.setattr(json.encoder, "c_make_encoder", made)
    spelled = speller(sort_keys=True, ensure_ascii=False)
    monkeypatch.undo()
    assert spelled(VALUE) == '{"a":{"c":-2},"b":[1,"é",null,true]}'


def test_what_json_cannot_say_goes_to_default():
    assert speller(default=str)([1 + 2j]) == '["(1+2j)"]'
    with pytest.raises(TypeError):
        speller()([1 + 2j])


def test_what_is_no_number_is_refused_if_asked_for():
    with pytest.raises(ValueError, match="not JSON compliant"):
        speller(allow_nan=False)(float("nan"))
    assert speller()(float("nan")) == "NaN"


def test_a_circle_ends_in_a_recursion_error():
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(RecursionError):
        speller()(circle)
