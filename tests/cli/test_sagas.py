"""`coatcheck sagas`: what a person sees of sagas, and decides about blocked ones (E3)."""

import json

import pytest

from coatcheck.saga import Retry, SagaBlocked, Sagas, SagaUndone

BY_ADA = ("--by", "ada", "--why", "they said so", "--yes")


class Shop:
    """A process with a saga whose undo fails as long as it is told to."""

    def __init__(self, url):
        self.errors = []
        self.refunds = 0
        self.sagas = Sagas(url, retry=Retry(tries=1), recover_every_s=None)
        self.checkout = self.sagas.saga("checkout", key=str)(self._checkout)
        self.mail = self.sagas.saga("mail", key=str)(self._mail)

    def _refund(self):
        if self.errors:
            raise self.errors.pop()
        self.refunds += 1

    def _checkout(self, saga, order):
        saga.step("charge", lambda: "secret receipt", undo=self._refund)
        raise ValueError(order)

    def late(self):
        raise TimeoutError("no answer from the hotel")

    def _mail(self, saga, order):
        return saga.step("send", lambda: order)


@pytest.fixture
def shop(records):
    made = Shop(records.url)
    yield made
    made.sagas.close()


def blocked(shop, key="42"):
    """A saga that is blocked at its undo; its reference."""
    shop.errors.append(OSError())
    with pytest.raises(SagaBlocked) as caught:
        shop.checkout(key)
    return caught.value.reference


def test_sagas_are_listed_and_shown_with_what_to_do(records, shop):
    """E3, O1: neither prints what a step returned."""
    assert shop.mail("7") == "7"
    records.put(1)
    reference = blocked(shop)
    code, shown, _ = records.run("sagas", "list")
    assert code == 0
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [
        reference,
        shop.sagas.show("7").reference,
    ]
    assert "charge:undo" in shown
    code, shown, _ = records.run("sagas", "list", "--state", "blocked", "--fail-if-any")
    assert (code, len(shown.splitlines())) == (1, 2)
    assert [run["key"] for run in records.json("sagas", "list", "--name", "mail")] == ["7"]
    for key in ("42", "checkout:42", reference):
        code, shown, _ = records.run("sagas", "show", key)
        assert code == 0
        assert "state        blocked" in shown
        assert "blocked      charge:undo: it was called once and last raised OSError" in shown
        assert f"coatcheck sagas resume {reference} --step charge:undo --skip" in shown
        assert "secret receipt" not in shown
    assert records.json("sagas", "show", reference)["blocked_at"] == "charge:undo"
    assert records.run("sagas", "show", "42", "--picture")[1].startswith("flowchart TD")


def test_a_blocked_saga_is_resumed_and_another_process_continues_it(records, shop):
    """E3: with who and why."""
    blocked(shop)
    code, shown, _ = records.run("sagas", "resume", "42", *BY_ADA)
    assert code == 0
    assert "continues" in shown
    assert shop.sagas.show("42").state == "waiting"
    shop.sagas.engine.recovery.round()
    assert (shop.sagas.show("42").state, shop.refunds) == ("undone", 1)
    assert "resumed, by ada: they said so" in records.run("sagas", "show", "42")[1]


def test_what_a_decision_about_a_saga_did_is_json_for_programs(records, shop):
    """O1: with the reason if it did nothing."""
    blocked(shop)
    code, shown, _ = records.run("sagas", "resume", "42", "--json", *BY_ADA)
    assert (code, json.loads(shown)) == (0, {"resumed": True, "reason": None})
    code, shown, error = records.run("sagas", "resume", "43", "--json", *BY_ADA)
    reason = json.loads(shown)["reason"]
    assert (code, json.loads(shown)["resumed"], error) == (1, False, f"coatcheck: {reason}\n")


@pytest.mark.parametrize(
    ("how", "refunds"),
    [(("--skip",), 0), (("--happened", "null"), 0), (("--did-not-happen",), 1)],
)
def test_a_person_decides_about_one_step(records, shop, how, refunds):
    """E3."""
    blocked(shop)
    assert records.run("sagas", "resume", "42", "--step", "charge:undo", *how, *BY_ADA)[0] == 0
    with pytest.raises(SagaUndone):
        shop.checkout("42")
    assert shop.refunds == refunds


def test_what_cannot_be_decided_changes_nothing(records, shop, monkeypatch):
    """E3, O1."""
    assert shop.mail("42") == "42"
    blocked(shop)
    before = records.all()
    wrong = [
        (("42",), "'42' is several sagas: give one of"),
        (("nothing",), "there is no saga 'nothing'"),
        (("checkout:",), "there is no saga"),
        (("mail:42",), "the saga is not blocked: it is completed"),
        (("42", "--name", "checkout", "--step", "x", "--skip"), "'x' is not open in this saga"),
    ]
    for words, error in wrong:
        code, _, shown = records.run("sagas", "resume", *words, *BY_ADA)
        assert (code, error in shown) == (1, True), shown
    usage = [
        (("--step", "charge:undo"), "--step needs one of"),
        (("--skip",), "--step needs one of"),
        (("--step", "a", "--skip", "--did-not-happen"), "only one of"),
        (("--step", "a", "--skip", "--accept-change"), "leave out --step"),
        (("--step", "charge:undo", "--happened", "{"), "not valid JSON"),
    ]
    for words, error in usage:
        code, _, shown = records.run("sagas", "resume", "checkout:42", *words, *BY_ADA)
        assert (code, error in shown) == (2, True), shown
    monkeypatch.setattr("coatcheck.cli.sagas.confirm", lambda _question, yes: yes)
    code, _, shown = records.run("sagas", "resume", "checkout:42", *BY_ADA[:-1])
    assert (code, "nothing was changed" in shown) == (1, True)
    assert records.all() == before
    assert records.run("sagas", "show", "nothing")[0] == 1


def test_a_blocked_saga_is_not_decided_like_a_request(records, shop, caplog):
    """E3, O1: it would count as completed, and its undos would never run; the log says so, too."""
    reference = blocked(shop)
    assert f"see coatcheck sagas show {reference}" in caplog.text
    code, shown, _ = records.run("lookup", reference)
    assert code == 0
    assert f"coatcheck sagas show {reference}" in shown
    assert "coatcheck resolve" not in shown
    before = records.all()
    for how in (("--completed", "--value", "7"), ("--failed",)):
        code, _, error = records.run("resolve", reference, *how, *BY_ADA)
        assert (code, f"decide with coatcheck sagas show {reference}" in error) == (1, True), error
    assert records.all() == before


def test_a_saga_whose_definition_has_changed_can_continue_with_the_new_one(records, shop):
    """E3: the command is shown."""
    reference = blocked(shop)
    shop.checkout._steps = ["another step"]
    assert records.run("sagas", "resume", "42", *BY_ADA)[0] == 0
    with pytest.raises(SagaBlocked, match=r"its definition has changed .*charge \(undo\) gone"):
        shop.checkout("42")
    _, shown, _ = records.run("sagas", "show", "42")
    assert f"coatcheck sagas resume {reference} --accept-change --by YOU" in shown
    assert "sagas.resolve" not in shown
    assert records.run("sagas", "resume", "42", "--accept-change", *BY_ADA)[0] == 0
    with pytest.raises(SagaUndone):
        shop.checkout("42")


def test_a_command_that_is_shown_can_be_pasted_into_a_shell(records, shop):
    """O1: also if the step has a space in its name."""

    @shop.sagas.saga("slow", key=str)
    def slow(saga, _number):
        saga.step("send the mail", shop.late)

    with pytest.raises(SagaBlocked, match="last raised TimeoutError: no answer from the hotel"):
        slow(1)
    _, shown, _ = records.run("sagas", "show", "1")
    assert "--step 'send the mail' --skip" in shown
    _, _, error = records.run("sagas", "resume", "1", "--step", "x", "--skip", *BY_ADA)
    assert error.endswith("decide about one of send the mail\n")


def test_a_store_without_sagas_says_so(records):
    records.put(1)
    code, shown, error = records.run("sagas", "list", "--fail-if-any")
    assert (code, shown, error) == (0, "", "coatcheck: no sagas found\n")
