"""Problems and errors: one table, complete in both directions."""

import inspect
import json
import pickle
import re
from typing import get_args

import pytest

from coatcheck import errors
from coatcheck.core.problem import KINDS, Code, problem

ID = bytes(range(16))
CLASSES = [
    thing
    for thing in vars(errors).values()
    if inspect.isclass(thing) and issubclass(thing, errors.CoatcheckError)
]


@pytest.mark.parametrize("code", KINDS)
def test_every_problem_is_a_whole_document(code):
    """K3: the members of RFC 9457 and ours, and only the beginning of the key."""
    refusal = problem(code, key="secret-key-of-ann", id=ID, reason="because")
    document = json.loads(refusal.document("https://docs.example/problems"))
    assert set(document) == {"type", "title", "status", "detail", "code", "retry", "reference"}
    assert document["type"] == f"https://docs.example/problems#{code}"
    assert document["status"] == KINDS[code].status
    assert document["code"] == code
    assert document["retry"] in {"same-key", "new-key", "never"}
    assert document["title"]
    assert "secret-key-of-ann" not in document["detail"]
    assert document["reference"] == refusal.reference


def test_the_table_is_complete_in_both_directions():
    """Every code has a row, and every refusal that can be raised has a code."""
    assert list(KINDS) == list(get_args(Code))
    refusals = {c for c in CLASSES if issubclass(c, errors.Refused)} - {errors.Refused}
    assert {kind.error for kind in KINDS.values()} == refusals | {errors.StoreUnavailable}


# Clients act on these.
ON_THE_WIRE = {
    "key-missing": (400, "new-key", None),
    "key-invalid": (400, "new-key", None),
    "key-reused": (422, "never", None),
    "in-progress": (409, "same-key", 1),
    "outcome-unknown": (409, "never", None),
    "result-unavailable": (409, "never", None),
    "key-expired": (409, "never", None),
    "body-incomplete": (400, "same-key", None),
    "body-too-large": (413, "never", None),
    "caller-refused": (401, "same-key", None),
    "too-many-waiting": (429, "same-key", 1),
    "too-many-keys": (429, "same-key", 60),
    "too-many-attempts": (409, "never", None),
    "store-unavailable": (503, "same-key", 1),
}


def test_status_and_retry_of_each_problem_are_fixed():
    """K3, F1, L3, T2, D2, X2: the table "on the wire"."""
    seen = {code: (kind.status, kind.retry, kind.retry_after_s) for code, kind in KINDS.items()}
    assert seen == ON_THE_WIRE


def test_a_problem_without_an_operation_has_no_reference():
    document = json.loads(problem("key-missing", reason="Idempotency-Key").document(""))
    assert "reference" not in document


def test_a_policy_may_choose_another_status():
    assert problem("key-reused", status=409).status == 409


@pytest.mark.parametrize("code", KINDS)
def test_every_problem_is_an_error_for_functions(code):
    error = problem(code, key="k", id=ID, reason="because").error()
    assert type(error) is KINDS[code].error
    assert "because" in str(error) or "{reason}" not in KINDS[code].words


def test_a_refusal_has_its_reference_and_when_to_retry():
    """K5."""
    error = problem("in-progress", key="k", id=ID).error()
    assert isinstance(error, errors.KeyBusy)
    assert error.reference == problem("in-progress", id=ID).reference
    assert error.retry_after_s == 1
    error = problem("in-progress", retry_after_s=7).error()
    assert error.retry_after_s == 7
    assert "retry after 7 s" in str(error)


def drawn():
    """Each class of the drawn tree: its parent, and the statuses beside it."""
    parents = []
    for line in errors.__doc__.splitlines():
        found = re.match(
            r"((?:│   |    )*(?:[├└]── )?)([A-Z]\w+)(?: \((\w+)\))? {2,}([\d, ]*)", line
        )
        if found:
            depth = len(found[1]) // 4
            parents[depth:] = [found[2]]
            above = {parents[depth - 1]} if depth else {"Exception"}
            yield found[2], above | {found[3]} - {None}, set(map(int, re.findall(r"\d+", found[4])))


def test_the_drawn_tree_is_the_tree_of_classes():
    actual = {c.__name__: {base.__name__ for base in c.__bases__} for c in CLASSES}
    assert {name: above for name, above, _ in drawn()} == actual


def test_the_statuses_in_the_tree_are_those_of_the_problems():
    actual = {c.__name__: set() for c in CLASSES}
    for code, kind in KINDS.items():
        # An incomplete body is a broken message: its key was not looked at.
        if code != "body-incomplete":
            actual[kind.error.__name__].add(kind.status)
    assert {name: statuses for name, _, statuses in drawn()} == actual


def examples():
    refusal = problem("key-reused", key="k", id=ID)
    for error_class in CLASSES:
        if issubclass(error_class, errors.Refused):
            yield error_class(refusal)
        elif error_class is errors.MissingExtra:
            yield error_class("fastapi", "FastAPI")
        elif error_class is errors.StepsChanged:
            yield error_class("charge card", "charge")
            yield error_class(None, "charge")
        elif error_class is errors.StepInDoubt:
            yield error_class("charge")
            yield error_class("charge", "it is done")
        elif error_class is errors.StepFailed:
            yield error_class("charge", "Declined", "no money")
        elif error_class is errors.SagaUndone:
            yield error_class("checkout", "42", "charge", "Declined", "no money")
            yield error_class("checkout", "42", "", "KeyError", "")
        elif error_class is errors.SagaBlocked:
            yield error_class("checkout", "7D3F-92AB-1C4E", "charge:undo", "it raised OSError")
            yield error_class("checkout", "7D3F-92AB-1C4E", "", "its definition has changed")
        elif error_class is errors.StoreUnavailable:
            yield error_class("down", is_ambiguous=True)
        else:
            yield error_class("why")


@pytest.mark.parametrize("error", list(examples()), ids=lambda error: type(error).__name__)
def test_every_error_survives_a_process_pool(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_missing_extra_names_the_command_that_installs_it():
    error = errors.MissingExtra("fastapi", "FastAPI")
    assert "pip install 'coatcheck[fastapi]'" in str(error)
    assert isinstance(error, ImportError)
