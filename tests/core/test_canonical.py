"""F2: one spelling for every JSON value, whatever the interpreter's encoder is made of."""

import json

import pytest

from coatcheck.core import canonical

VALUE = {"b": [1, "é", None, True], "a": {"c": -2}}
SPELLED = '{"a":{"c":-2},"b":[1,"é",null,true]}'


def test_the_machine_that_is_made_once_spells_as_the_public_encoder_does():
    spelled = canonical._made_spelling()
    assert spelled(VALUE) == canonical._ENCODER.encode(VALUE) == SPELLED


@pytest.mark.parametrize("made", [None, lambda *_: lambda _value, _level: ("null",)])
def test_an_interpreter_without_that_machine_spells_the_same(made, monkeypatch):
    monkeypatch.setattr(json.encoder, "c_make_encoder", made)
    spelled = canonical._made_spelling()
    monkeypatch.undo()
    assert spelled(VALUE) == SPELLED
