"""Guarded functions: what they return comes back as it was, and one call is one call."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import (
    Engine,
    Happened,
    KeyReused,
    Misconfigured,
    Policy,
    ResultUnavailable,
    codec_for,
    current_operation,
)
from coatcheck.core.record import COMPLETED
from tests.support.engines import BY_ADA, Handler, Killed


@dataclass(frozen=True, slots=True)
class Line:
    price: Decimal
    tags: frozenset[str] = frozenset()


@dataclass
class Invoice:
    at: datetime
    lines: list[Line]
    by_name: dict[str, Line | None] = field(default_factory=dict)


INVOICE = Invoice(datetime(2026, 1, 1, tzinfo=UTC), [Line(Decimal("1.10"))], {"a": None})


class Vague:
    """Cannot be stored."""


@pytest.fixture
def engine(guards, store, clock):
    return guards.engine(store, clock=clock, sweep_every_s=None)


def returning(guards, hint, result, calls: list[int] | None = None) -> Callable[..., Any]:
    """A function of the engine's flavour that is annotated with *hint*."""

    def function(*args):
        if calls is not None:
            calls.append(1)
        return result

    flavoured = guards.flavoured(function)
    flavoured.__annotations__ = {"return": hint}
    return flavoured


def ways(guards, store) -> dict[str, Callable[[Any], Any]]:
    """Each way to guard a function, on an engine that has nothing in memory."""

    def attempt(function):
        engine, codec = guards.engine(store), codec_for(function.__annotations__["return"])

        async def main_async():
            async with engine.attempt("k", scope="attempt", codec=codec) as attempt:
                if not attempt.is_replay:
                    await attempt.complete(await function())
                return attempt.result

        def main():
            with engine.attempt("k", scope="attempt", codec=codec) as attempt:
                if not attempt.is_replay:
                    attempt.complete(function())
                return attempt.result

        return main_async() if guards.is_async else main()

    def register(function):
        engine = guards.engine(store)
        return engine.register("r", function).run("k", 1)

    return {
        "run": lambda f: guards.engine(store).run("k", f, scope="run"),
        "guard": lambda f: guards.engine(store).guard(key=lambda: "k", scope="guard")(f)(),
        "attempt": attempt,
        "register": register,
    }


@pytest.mark.parametrize("way", ["run", "guard", "attempt", "register"])
@pytest.mark.parametrize(
    ("hint", "result"), [(Invoice, INVOICE), (tuple[int, Decimal], (1, Decimal(2))), (int, 5)]
)
def test_a_result_is_the_same_at_the_first_call_and_at_a_retry(guards, store, way, hint, result):
    """R4: through the store, in every way to guard a function."""
    calls: list[int] = []
    function = returning(guards, hint, result, calls)
    got = [guards.done(ways(guards, store)[way](function)) for _ in range(3)]
    assert got == [result] * 3
    assert [type(each) for each in got] == [type(result)] * 3
    assert len(calls) == 1


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    )
    | st.binary()
    | st.dictionaries(st.integers(), st.text())
)
def test_without_an_annotation_the_first_call_gets_what_a_retry_gets(value):
    """R4: a tuple is a list from the start; what has no JSON raises at once."""
    with Engine("memory://", sweep_every_s=None, recover_every_s=None) as engine:
        try:
            first = engine.run("k", lambda: value, scope="s")
        except Misconfigured:
            with pytest.raises(ResultUnavailable):
                engine.run("k", lambda: value, scope="s")
            return
        again = engine.run("k", lambda: value, scope="s")
    assert (repr(again), again) == (repr(first), first)


def test_an_annotation_that_cannot_be_stored_is_refused_before_the_function_runs(guards, engine):
    """R4: at the decoration, and where there is none at the call."""
    calls: list[int] = []
    function = returning(guards, Vague, Vague(), calls)
    for guard in (
        lambda: engine.guard(key=lambda: "k")(function),
        lambda: engine.register("r", function),
        lambda: guards.done(engine.run("k", function)),
    ):
        with pytest.raises(Misconfigured, match="Vague cannot be stored as the result of a funct"):
            guard()
    assert calls == []
    assert engine.attempts._store.records == []


@pytest.mark.parametrize(
    "case",
    [
        (Any, Vague(), "of type Vague, which cannot be stored for a retry .it is neither JSON"),
        (Any, {"secret": Vague()}, "returned a value of type dict"),
        (int | Decimal, "secret", "a str, where Decimal is declared; a str, where int is declared"),
        (Line, Line(Decimal(1), {"secret"}), "Line.tags: a set, where frozenset is declared"),
    ],
)
def test_a_result_that_cannot_be_stored_raises_at_the_first_call(
    guards, engine, store, caplog, case
):
    """R4, L12: the work is done, so that nothing runs again."""
    hint, result, sentence = case
    calls: list[int] = []
    function = returning(guards, hint, result, calls)
    with pytest.raises(Misconfigured, match=sentence) as raised:
        guards.done(engine.run("k", function))
    assert "codec=" in str(raised.value)
    with pytest.raises(ResultUnavailable):
        guards.done(engine.run("k", function))
    assert (len(calls), store.record.state) == (1, COMPLETED)
    assert f"value of type {type(result).__name__}, which cannot be stored" in caplog.text
    assert "secret" not in caplog.text


def test_in_transaction_mode_a_result_that_cannot_be_stored_commits_nothing(guards, tmp_path):
    """R4, T1."""
    engine = guards.engine(f"sqlite:///{tmp_path}/orders.db")
    with pytest.raises(Misconfigured, match="returned a value of type Vague"):
        guards.done(engine.transaction("k", returning(guards, Any, Vague()), scope="s"))
    assert guards.done(engine.transaction("k", returning(guards, Line, LINE), scope="s")) == LINE


LINE = Line(Decimal(1))


class Reversed:
    """A codec of an application."""

    def encode(self, value: str) -> str:
        return value[::-1]

    def decode(self, stored: str) -> str:
        return stored[::-1]


def test_a_codec_of_the_application_takes_the_place_of_the_annotation(guards, engine, store):
    """R4."""
    function = returning(guards, Vague, "abc")
    for _ in range(2):
        assert guards.done(engine.run("k", function, codec=Reversed())) == "abc"
    assert store.record.response == b'\x02"cba"'
    guarded = engine.guard(key=lambda: "g", codec=Reversed())(function)
    assert guards.done(guarded()) == "abc"


@pytest.mark.parametrize("codec", [Reversed, Line, "utf-8"])
def test_what_cannot_be_a_codec_is_refused_before_anything_runs(guards, engine, codec):
    """R4."""
    function = returning(guards, Any, 5)
    for guard in (
        lambda: engine.guard(key=lambda: "k", codec=codec)(function),
        lambda: guards.done(engine.run("k", function, codec=codec)),
        lambda: engine.attempt("k", scope="s", codec=codec),
    ):
        with pytest.raises(Misconfigured, match="must be an object with encode and decode"):
            guard()
    assert engine.attempts._store.records == []


def test_an_error_of_a_codec_is_raised_at_the_first_call(guards, engine):
    """R4."""
    with pytest.raises(Misconfigured, match=r"returned a value of type int, .*TypeError"):
        guards.done(engine.run("k", returning(guards, Any, 5), codec=Reversed()))


def test_a_result_that_an_earlier_release_stored_as_json_is_read_with_an_annotation(guards, engine):
    """R4: for example after an annotation was added."""
    guards.done(engine.run("k", returning(guards, Any, {"price": "1", "tags": []}), scope="s"))
    assert guards.done(engine.run("k", returning(guards, Line, None), scope="s")) == LINE


def test_a_step_returns_what_its_function_is_annotated_with(guards, engine, clock):
    """R4, L7: also to the attempt after it."""
    calls: list[int] = []
    charge = returning(guards, Line, LINE, calls)

    def handler():
        got = yield current_operation().step("charge", charge)
        if len(seen) == 0:
            seen.append(got)
            raise Killed
        return seen.append(got)

    seen: list[Any] = []
    policy = Policy(lease="1s")
    with pytest.raises(Killed):
        guards.run(engine, "k", handler, policy=policy, scope="s")
    clock.advance(60)
    guards.run(engine, "k", handler, policy=policy, scope="s")
    assert seen == [LINE, LINE]
    assert len(calls) == 1


def test_what_a_reconcile_function_found_out_is_returned_as_the_function_would(
    guards, store, clock
):
    """R4, L9: and so is the result of a rerun."""
    policy = Policy(recovery="reconcile", reconcile=lambda _: Happened(value=LINE), lease="1s")
    engine = guards.engine(store, policy, clock=clock, sweep_every_s=None, recover_every_s=None)
    guards.abandon(engine, scope="s")
    clock.advance(60)
    assert guards.done(engine.run("k", returning(guards, Line, None), scope="s")) == LINE


def test_a_rerun_returns_what_its_function_is_annotated_with(guards, store, clock):
    """R4, D4."""
    policy = Policy(recovery="manual", lease="1s")
    engine = guards.engine(store, policy, clock=clock, sweep_every_s=None, recover_every_s=None)
    guards.abandon(engine, scope="s")
    clock.advance(60)
    function = returning(guards, Line, LINE)
    rerun = engine.rerun(store.record.id, function, **BY_ADA, abandoned=True)
    assert guards.done(rerun) == LINE
    assert guards.done(engine.run("k", function, scope="s")) == LINE


# --- arguments --------------------------------------------------------------------------------


def test_a_call_that_is_written_in_two_ways_is_one_call(guards, engine):
    """F1."""

    def place(order, count=1, *, gift=False):
        return [order, count]

    if guards.is_async:
        plain = place

        async def place(order, count=1, *, gift=False):
            return plain(order, count, gift=gift)

    run = functools.partial(engine.run, "k", place)
    for call in (
        lambda: run(7),
        lambda: run(order=7),
        lambda: run(7, 1, gift=False),
        lambda: run(count=1, order=7),
    ):
        assert guards.done(call()) == [7, 1]
    for call in (lambda: run(8), lambda: run(7, 2), lambda: run(7, gift=True)):
        with pytest.raises(KeyReused):
            guards.done(call())


def test_a_call_that_its_function_does_not_take_claims_nothing(guards, engine):
    """F1, L9: under "manual" it would be in doubt."""
    handler = Handler()

    def place(order):
        return handler(order)

    policy = Policy(recovery="manual")
    with pytest.raises(TypeError, match="too many positional arguments"):
        guards.done(engine.run("k", place, 1, 2, colour="red", policy=policy))
    assert engine.attempts._store.records == []


def test_pydantic_is_not_imported_by_us():
    """R4: only the methods of the user's own model are called."""
    assert not any(
        "pydantic" in vars(module)
        for name, module in sys.modules.items()
        if name.startswith("coatcheck.")
    )
