"""`coatcheck resolve`: the decision of a person, in words and in the record."""

import io
import json
import os
import sqlite3
from base64 import b64encode

import pytest

import coatcheck
from coatcheck.core.progress import NOTHING, Note, encoded, progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING
from coatcheck.core.response import SEALED, Response, decode_response, decode_value

BODY = b'{"charge": 7}'
BY_ADA = ("--by", "ada", "--why", "asked the bank")


@pytest.fixture
def resolve(records):
    def resolve(reference, *words, yes=("--yes",)):
        return records.run("resolve", reference, *words, *BY_ADA, *yes)

    return resolve


def answer_in(records) -> Response:
    return decode_response(records.only().response)


def test_an_operation_is_resolved_as_happened_with_a_response(records, resolve):
    """L6, O1: and the output has what retries get."""
    reference = records.put(1, state=IN_DOUBT)
    answer = ("--status", "201", "--header", "Location:/orders/7", "--body", BODY.decode())
    code, out, err = resolve(reference, "--completed", *answer)
    gets = (
        f"201, Location: /orders/7, Content-Type: application/json, with the body {BODY.decode()}"
    )
    assert (code, out, err) == (0, f"{reference} is completed: retries get {gets}\n", "")
    headers = [(b"location", b"/orders/7"), (b"content-type", b"application/json")]
    assert answer_in(records) == Response(201, headers, BODY)
    (resolution,) = progress_of(records.only()).resolutions
    assert resolution[1:] == ("happened", "ada", "asked the bank")


@pytest.mark.parametrize(
    ("body", "headers", "content_type"),
    [
        (b"charged", (), b"text/plain; charset=utf-8"),
        (b"\xff\xfe\x00", (), b"application/octet-stream"),
        (BODY, ("--header", "content-TYPE: text/csv"), b"text/csv"),
    ],
)
def test_the_body_may_come_from_a_file_or_a_pipe(
    records, resolve, monkeypatch, tmp_path, *, body, headers, content_type
):
    """L6, O1: with the type that it looks like, unless one is given."""
    (tmp_path / "answer").write_bytes(body)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
    for number, name in enumerate((str(tmp_path / "answer"), "-")):
        reference = records.put(number, state=IN_DOUBT)
        words = ("--completed", "--status", "200", "--body-file", name, *headers)
        assert resolve(reference, *words)[0] == 0
        answer = decode_response(records.all()[number].response)
        assert answer == Response(200, [(b"content-type", content_type)], body)


def test_a_response_without_a_body_has_no_type(records, resolve):
    """L6."""
    reference = records.put(1, state=IN_DOUBT)
    assert resolve(reference, "--completed", "--status", "204", "--empty")[0] == 0
    assert answer_in(records) == Response(204, [], b"")


def test_an_operation_is_resolved_as_not_happened_by_its_key(records, resolve):
    """L6, O1: its notes are kept."""
    progress = encoded(NOTHING.with_note(Note(1, 1, "about to charge")))
    reference = records.put(1, state=IN_DOUBT, progress=progress)
    code, out, _err = resolve("key-1-of-the-client", "--failed")
    assert (code, out) == (0, f"{reference} is failed: the next retry executes it\n")
    assert records.only().state == FAILED
    assert progress_of(records.only()).notes


def test_a_function_is_completed_with_a_value(records, resolve):
    """L6."""
    reference = records.put(1, state=IN_DOUBT, label="charges", scope="")
    document = json.loads(resolve(reference, "--completed", "--value", '{"a": null}', "--json")[1])
    assert (document["resolved"], document["operation"]["state"]) == (True, "completed")
    assert decode_value(records.only().response) == {"a": None}


def test_a_function_is_not_completed_with_a_response(records, resolve):
    """L6."""
    reference = records.put(1, state=IN_DOUBT, label="charges", scope="")
    code, _out, err = resolve(reference, "--completed", "--status", "200", "--empty")
    assert (code, "is a function: give --value JSON" in err) == (2, True)
    assert records.only().state == IN_DOUBT


def test_an_operation_that_is_not_in_doubt_is_not_changed(records, resolve):
    """L6: exit code 1, with the current record."""
    reference = records.put(1)
    before = records.only()
    code, out, err = resolve(reference, "--failed")
    assert (code, out, err) == (1, "", f"coatcheck: {reference} is completed already\n")
    code, out, _err = resolve(reference, "--failed", "--json")
    assert (code, json.loads(out)["operation"]["state"]) == (1, "completed")
    code, out, _err = resolve("7D3F-92AB-1C4E", "--failed", "--json")
    assert (code, json.loads(out)["operation"]) == (1, None)
    assert records.only() == before


def test_what_cannot_be_decided_is_refused_before_anyone_is_asked(records, resolve):
    """L6: no question whose answer changes nothing."""
    completed = records.put(1)
    running = records.put(2, state=RUNNING, lease_until_ms=records.now_ms - 1)
    for reference, option, words in (
        (completed, "--abandoned", "is completed already"),
        (running, "--abandoned", ""),
        (running, "--correct", "nothing to correct"),
    ):
        code, _out, err = resolve(reference, "--failed", option, yes=())
        assert (code, words in err) == ((1, True) if words else (2, True)), err


def test_a_key_of_several_operations_is_not_resolved(records, resolve):
    """S1, L6: each is listed by its reference; two of one reference by their ids."""
    one = records.put(1, state=IN_DOUBT, key="k")
    other = records.put(2, state=IN_DOUBT, key="k", label="POST /charges")
    code, _out, err = resolve("k", "--failed")
    assert (code, f"{one} (POST /orders), {other} (POST /charges)" in err) == (1, True)
    twin = bytes([2]) * 15 + b"!"
    records.put(3, state=IN_DOUBT, id=twin)
    code, _out, err = resolve(other, "--failed")
    assert (code, f"{twin.hex()} (POST /orders)" in err) == (1, True)
    assert resolve(twin.hex(), "--failed")[0] == 0
    assert [record.state for record in records.all()] == [IN_DOUBT, IN_DOUBT, FAILED]


def test_an_abandoned_operation_can_be_resolved_before_it_is_in_doubt(records, resolve):
    """L6."""
    reference = records.put(1, state=RUNNING, lease_until_ms=records.now_ms - 1)
    code, _out, err = resolve(reference, "--failed")
    assert (code, "not in doubt yet" in err) == (1, True)
    assert resolve(reference, "--failed", "--abandoned")[0] == 0


def test_a_decision_can_be_corrected_and_both_are_kept(records, resolve):
    """L6, O1: what a person has decided, but never what was executed."""
    reference = records.put(1, state=IN_DOUBT)
    assert resolve(reference, "--failed")[0] == 0
    happened = ("--completed", "--status", "201", "--empty")
    code, _out, err = resolve(reference, *happened)
    assert (code, "--correct" in err) == (1, True)
    assert resolve(reference, *happened, "--correct")[0] == 0
    assert (records.only().state, answer_in(records).status) == (COMPLETED, 201)
    assert resolve(reference, "--failed", "--correct")[0] == 0
    decided = [resolution.outcome for resolution in progress_of(records.only()).resolutions]
    assert decided == ["did not happen", "happened", "did not happen"]
    executed = records.put(2)
    code, _out, err = resolve(executed, "--failed", "--correct")
    assert (code, "nothing to correct" in err) == (1, True)
    assert records.all()[1].state == COMPLETED


def test_without_a_terminal_a_decision_must_be_confirmed_with_an_option(records, resolve):
    """L6: a script does not decide by mistake."""
    reference = records.put(1, state=IN_DOUBT)
    code, out, err = resolve(reference, "--failed", yes=())
    assert (code, out, "add --yes" in err) == (2, "", True)
    assert records.only().state == IN_DOUBT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either --completed or --failed"),
        (("--failed", "--completed"), "either --completed or --failed"),
        (("--failed", "--status", "201"), "leave out --status"),
        (("--failed", "--body-file", "x"), "leave out --body-file"),
        (("--completed",), "needs --status N and one of --body TEXT"),
        (("--completed", "--status", "201"), "needs --status N and one of"),
        (("--completed", "--empty"), "needs --status N and one of"),
        (("--completed", "--status", "201", "--body", "", "--empty"), "needs --status N and one"),
        (("--completed", "--status", "201", "--value", "1"), "--value is for functions"),
        (("--completed", "--value", "{"), "--value is not valid JSON"),
        (("--completed", "--value", "[" * 50_000), "--value is not valid JSON"),
        (("--completed", "--value", "null"), "is a request: give --status"),
        (("--completed", "--status", "200", "--body-file", "no/such/file"), "no/such/file"),
        (("--completed", "--status", "99", "--empty"), "99"),
        (("--completed", "--status", "200", "--empty", "--header", "x"), "not a header"),
        (("--completed", "--status", "200", "--empty", "--header", "x: a\nb: c"), "not a header"),
        (("--failed", "--by", " "), "by is ' '"),
        (("--failed", "--keyring", "/nowhere"), "--keyring"),
    ],
    ids=lambda words: " ".join(words)[:40] if isinstance(words, tuple) else "",
)
def test_a_wrong_decision_is_one_line_of_error(records, words, message):
    """O1: and changes nothing."""
    reference = records.put(1, state=IN_DOUBT)
    code, out, err = records.run("resolve", reference, *BY_ADA, *words, "--yes")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert err.startswith("coatcheck: ")
    assert records.only().state == IN_DOUBT


@pytest.mark.parametrize(("given", "missing"), [(BY_ADA[:2], "--why"), (BY_ADA[2:], "--by")])
def test_a_decision_needs_a_name_and_a_reason(records, given, missing):
    """L6."""
    code, _out, err = records.run("resolve", "k", "--failed", *given)
    assert (code, missing in err) == (2, True)


def test_a_body_over_the_limit_is_refused(records, resolve, tmp_path, monkeypatch):
    """X2."""
    monkeypatch.setattr("coatcheck.cli.resolve.BODY_BYTES_MAX", 10)
    (tmp_path / "answer").write_bytes(BODY)
    reference = records.put(1, state=IN_DOUBT)
    words = ("--completed", "--status", "200", "--body-file", str(tmp_path / "answer"))
    code, _out, err = resolve(reference, *words)
    assert (code, "more than 10 bytes" in err) == (2, True)


def test_an_encrypted_operation_is_resolved_only_with_the_keys(records, resolve, tmp_path):
    """X1: and the decision is encrypted, too."""
    key, file = os.urandom(32), tmp_path / "keys.json"
    file.write_text(json.dumps({"2026": b64encode(key).decode()}))
    with coatcheck.Engine(records.url, keyring=coatcheck.KeyRing({"2026": key})) as engine:
        assert engine.run("k", lambda: "sealed", scope="s") == "sealed"
    reference = records.put(1, state=IN_DOUBT)
    answer = ("--completed", "--status", "200", "--body", BODY.decode())
    code, _out, err = resolve(reference, *answer)
    assert (code, "give --keyring" in err) == (2, True)
    assert resolve(reference, *answer, "--keyring", str(file))[::2] == (0, "")
    path = records.url.removeprefix("sqlite:///")
    written = sqlite3.connect(path).execute("select progress, response from coatcheck_records")
    assert not [blob for row in written for blob in row if blob and blob[0] != SEALED]
    assert "encrypted" in records.run("lookup", reference)[1]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "c2hvcnQ="}', '{"a": "not base64"}'])
def test_a_key_file_that_cannot_be_read_is_refused_and_not_shown(records, resolve, tmp_path, text):
    """X1, O3."""
    (tmp_path / "keys.json").write_text(text)
    reference = records.put(1, state=IN_DOUBT)
    words = ("--failed", "--keyring", str(tmp_path / "keys.json"))
    code, _out, err = resolve(reference, *words)
    assert (code, err.count("\n"), "not base64" in err) == (2, 1, False)
