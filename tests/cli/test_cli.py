"""The command line: the commands for operators, and the messages for wrong usage."""

import io
import json
import os
import sqlite3
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest

import coatcheck
from coatcheck.cli import main
from coatcheck.cli import operations as finding
from coatcheck.core.describe import iso
from coatcheck.core.key import reference_of
from coatcheck.core.progress import NOTHING, Note, Resolution, Step, encoded, progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING, Record, Swap
from coatcheck.core.response import (
    SEALED,
    Response,
    decode_response,
    decode_value,
    encode_response,
    encode_value,
)
from coatcheck.stores.memory import MemoryStore

COMMANDS = ("demo", "lookup", "list", "resolve", "sweep", "migrate", "doctor")

HOUR_MS = 3_600_000
BODY = b'{"secret": "of the customer"}'
URL = "postgresql://shop:hunt@er's@db/shop"
BY_ADA = ("--by", "ada", "--why", "asked the bank")


def record_of(number: int, now_ms: int, **changes) -> Record:
    created_ms = now_ms - 2 * HOUR_MS
    record = Record(
        id=bytes([number]) * 16,
        version=created_ms,
        state=COMPLETED,
        attempt=1,
        fingerprint=b"f" * 16,
        created_ms=created_ms,
        lease_until_ms=0,
        window_until_ms=created_ms + 24 * HOUR_MS,
        expires_ms=created_ms + 25 * HOUR_MS,
        nonce=number,
        label="POST /orders",
        scope="5c0pe5c0pe5c0pe0",
        key=f"key-{number}-of-the-client",
        progress=None,
        response=None,
    )
    return record._replace(**changes)


class StoredRecords:
    """A store in a file, with the records that a test needs."""

    def __init__(self, path):
        self.path = path
        self.url = f"sqlite:///{path}"
        store = coatcheck.open_store(self.url)
        self.now_ms = store.now_ms()
        store.close()

    def put(self, number: int, **changes) -> str:
        """Store a record and return its reference."""
        record = record_of(number, self.now_ms, **changes)
        store = coatcheck.open_store(self.url)
        assert store.swap([Swap(record.id, 0, record)]) == [None]
        store.close()
        return reference_of(record.id)


@pytest.fixture
def records(tmp_path) -> StoredRecords:
    return StoredRecords(tmp_path / "records.db")


def run_command(capsys, *words: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    code = main(words)
    output = capsys.readouterr()
    return code, output.out, output.err


# ---------------------------------------------------------------------------------------- lookup


def test_an_operation_is_found_by_its_reference_as_people_type_it(records, capsys):
    """K5: the reference is enough to find the operation."""
    response = encode_response(Response(201, [(b"x-a", b"b")], BODY))
    reference = records.put(7, response=response, attempt=3)
    records.put(8)
    for text in (reference, reference.lower(), reference.replace("-", "")):
        code, out, _err = run_command(capsys, "lookup", text, "--store", records.url)
        assert code == 0
        facts = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert facts["reference"] == reference
        assert facts["state"] == "completed"
        assert facts["label"] == "POST /orders"
        assert facts["attempt"] == "3"
        assert facts["scope"] == "5c0pe5c0pe5c0pe0"
        assert facts["created"].endswith("Z")
        assert facts["expires"] > facts["created"]
        assert facts["response"] == f"status 201, {len(BODY)} bytes"


def test_an_operation_is_found_by_its_key(records, capsys):
    """K5: the key is enough as well; one key of two callers is two operations."""
    records.put(1, key="shared key")
    records.put(2, key="shared key", scope="another")
    records.put(3)
    code, out, _err = run_command(capsys, "lookup", "shared key", "--store", records.url, "--json")
    assert code == 0
    assert {facts["scope"] for facts in json.loads(out)} == {"5c0pe5c0pe5c0pe0", "another"}


def test_a_key_that_looks_like_a_reference_is_found_as_well(records, capsys):
    records.put(1, key="7D3F92AB1C4E")
    assert run_command(capsys, "lookup", "7D3F92AB1C4E", "--store", records.url)[0] == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://shop:hunter2@db/shop", "postgresql://…@db/shop"),
        ("mysql://shop:hunter2@ho/me?x@db:3306/shop", "mysql://…@db:3306/shop"),
        ("redis://cache:6379/0?password=hunter2", "redis://cache:6379/0"),
        ("sqlite:///orders.db", "sqlite:///orders.db"),
    ],
)
def test_no_password_of_a_store_is_printed(url, shown, monkeypatch, capsys):
    """X3, O3: neither in the help, which shows the default, nor in a message."""
    monkeypatch.setenv("COATCHECK_STORE", url)
    monkeypatch.setattr(finding, "open_store", lambda _url, *, create: MemoryStore())
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    printed = [capsys.readouterr().out, run_command(capsys, "lookup", "nothing")[2]]
    assert all(shown in "".join(text.split()) for text in printed)
    assert "hunter2" not in "".join(printed)


def test_a_body_is_never_shown(records, capsys):
    """O3: no bodies, in no format."""
    reference = records.put(1, response=encode_response(Response(200, [], BODY)))
    value = records.put(2, response=encode_value("of the customer"))
    for text in (reference, value):
        for options in ([], ["--json"]):
            code, out, _err = run_command(capsys, "lookup", text, "--store", records.url, *options)
            assert code == 0
            assert "of the customer" not in out
            assert "bytes" in out


def test_json_has_the_same_facts_as_the_text(records, capsys):
    reference = records.put(1, response=encode_response(Response(402, [], BODY)))
    _code, out, _err = run_command(capsys, "lookup", reference, "--store", records.url, "--json")
    (facts,) = json.loads(out)
    assert facts["reference"] == reference
    assert facts["key"] == "key-1-of-the-client"
    assert facts["response"] == {"status": 402, "bytes": len(BODY)}
    assert facts["lease_until"] is None


def test_a_crashed_attempt_can_be_distinguished_from_a_running_one(records, capsys):
    """L5: the lease of a crashed attempt has expired."""
    crashed = records.put(1, state=RUNNING, lease_until_ms=records.now_ms - 1)
    running = records.put(2, state=RUNNING, lease_until_ms=records.now_ms + HOUR_MS)
    assert (
        "the next retry takes over"
        in run_command(capsys, "lookup", crashed, "--store", records.url)[1]
    )
    out = run_command(capsys, "lookup", running, "--store", records.url)[1]
    assert "lease until" in out
    assert "takes over" not in out


def test_what_is_not_there_is_not_found(records, capsys):
    for text in ("7D3F-92AB-1C4E", "no such key"):
        code, out, err = run_command(capsys, "lookup", text, "--store", records.url)
        assert (code, out) == (1, "")
        assert text in err
    code, out, _err = run_command(capsys, "lookup", "no such key", "--store", records.url, "--json")
    assert (code, json.loads(out)) == (1, [])


def test_a_near_miss_of_a_reference_is_a_miss(records, capsys):
    """K5: the range scan compares 56 of the 60 bits, so the last character is compared by hand."""
    reference = records.put(1)
    near = reference[:-1] + ("0" if reference[-1] != "0" else "1")
    assert run_command(capsys, "lookup", near, "--store", records.url)[0] == 1


def test_control_characters_in_a_key_are_escaped(records, capsys):
    reference = records.put(1, key="\x1b[2J\x07", label="POST /\x1b]0;title\x07")
    for words in (["lookup", reference], ["list"]):
        out = run_command(capsys, *words, "--store", records.url)[1]
        assert "\x1b" not in out
        assert "\x07" not in out
        assert "\\x1b" in out


# ------------------------------------------------------------------------------------------ list


def references(out: str) -> set[str]:
    return {line.split()[0] for line in out.splitlines()[1:] if not line.startswith(" ")}


def test_a_list_is_filtered_by_state_and_age(records, capsys):
    """O1: operations that need a decision can be listed."""
    old = records.put(1, state=IN_DOUBT)
    new = records.put(2, state=IN_DOUBT, version=records.now_ms, created_ms=records.now_ms)
    done = records.put(3)
    store = ("--store", records.url)
    assert references(run_command(capsys, "list", *store)[1]) == {old, new, done}
    assert references(run_command(capsys, "list", *store, "--state", "in_doubt")[1]) == {old, new}
    narrow = ("--state", "in_doubt", "--older-than", "1h")
    assert references(run_command(capsys, "list", *store, *narrow)[1]) == {old}
    code, out, err = run_command(capsys, "list", *store, "--state", "failed")
    assert (code, out) == (0, "")
    assert err == "coatcheck: no operations found\n"


def test_a_list_has_a_limit_and_mentions_that_there_is_more(records, capsys):
    for number in range(5):
        records.put(number)
    _code, out, err = run_command(capsys, "list", "--store", records.url, "--limit", "3")
    assert len(references(out)) == 3
    assert "more" in err
    _code, out, err = run_command(capsys, "list", "--store", records.url, "--limit", "5")
    assert (len(references(out)), err) == (5, "")


def test_a_list_shows_the_beginning_of_keys_only(records, capsys):
    records.put(1, key="3f2a91c0-secret-of-a-caller")
    out = run_command(capsys, "list", "--store", records.url)[1]
    assert "3f2a91c0…" in out
    assert "secret" not in out


def test_a_list_for_programs_is_one_document(records, capsys):
    records.put(1, state=IN_DOUBT)
    (facts,) = json.loads(run_command(capsys, "list", "--store", records.url, "--json")[1])
    assert facts["state"] == "in_doubt"


# ----------------------------------------------------------------------------------------- steps, notes and resolutions

SECRET = "of the customer"
PROGRESS = encoded(
    NOTHING.with_step(Step("reserve", 1, encode_value(SECRET)))
    .with_note(Note(1_800_000_000_000, 2, "about to charge \x1b[2J"))
    .with_resolution(Resolution(1_800_000_000_000, "run again", "ada", "the bank was away"))
)


def test_steps_notes_and_resolutions_of_an_operation_in_doubt_are_shown(records, capsys):
    """O1, L6: all that a person needs, in both commands, but no results of steps."""
    reference = records.put(1, state=IN_DOUBT, attempt=2, progress=PROGRESS)
    for words in (["lookup", reference], ["list", "--state", "in_doubt"]):
        _code, out, _err = run_command(capsys, *words, "--store", records.url)
        assert "step       " in out
        assert "reserve: done by attempt 1" in out
        assert "2027-01-15T08:00:00Z attempt 2: about to charge" in out
        assert "2027-01-15T08:00:00Z run again, by ada: the bank was away" in out
        assert SECRET not in out
        assert "\x1b" not in out
        _code, out, _err = run_command(capsys, *words, "--store", records.url, "--json")
        (facts,) = json.loads(out)
        assert facts["attempt"] == 2
        assert facts["steps"] == [{"name": "reserve", "attempt": 1, "is_done": True}]
        assert facts["notes"][0]["what"] == "about to charge \x1b[2J"
        assert facts["resolutions"][0]["by"] == "ada"
        assert SECRET not in out


def test_an_operation_in_doubt_is_shown_with_its_times(records, capsys):
    """O1, L6: when it may have happened, and until when its retries are refused."""
    began_ms = records.now_ms - HOUR_MS
    times = {"version": began_ms, "lease_until_ms": began_ms + 60_000}
    reference = records.put(1, state=IN_DOUBT, attempt=2, **times)
    began, lease_until = iso(began_ms), iso(began_ms + 60_000)
    window_until, expires = iso(records.now_ms + 22 * HOUR_MS), iso(records.now_ms + 23 * HOUR_MS)
    out = run_command(capsys, "list", "--store", records.url)[1]
    times_text = f"attempt 2 began {began}, lease until {lease_until}, window until {window_until}"
    assert f"times      {times_text}" in out
    out = run_command(capsys, "lookup", reference, "--store", records.url)[1]
    for name, at in (
        ("created", iso(records.now_ms - 2 * HOUR_MS)),
        ("last attempt", began),
        ("lease until", lease_until),
        ("window until", window_until),
        ("expires", expires),
    ):
        assert f"{name:<12} {at}\n" in out
    for words in (["lookup", reference], ["list"]):
        (facts,) = json.loads(run_command(capsys, *words, "--store", records.url, "--json")[1])
        assert (facts["last_attempt"], facts["lease_until"]) == (began, lease_until)
        assert (facts["window_until"], facts["expires"]) == (window_until, expires)


def test_a_list_has_no_details_of_operations_that_are_not_in_doubt(records, capsys):
    records.put(1, progress=PROGRESS)
    out = run_command(capsys, "list", "--store", records.url)[1]
    assert "reserve" not in out
    assert "began" not in out


# --------------------------------------------------------------------------------------- resolve


def stored_record(records) -> Record:
    store = coatcheck.open_store(records.url)
    (record,) = store.find(coatcheck.stores.Query()).records
    store.close()
    return record


def resolved(capsys, records, reference, *words):
    return run_command(capsys, "resolve", reference, "--store", records.url, *words, *BY_ADA)


def test_an_operation_is_resolved_as_happened_with_a_response(records, capsys, tmp_path):
    """L6, O1."""
    reference = records.put(1, state=IN_DOUBT)
    body = tmp_path / "answer.json"
    body.write_bytes(BODY)
    answer = ("--status", "201", "--header", "Location:/orders/7", "--header", "X-A: b", "--body")
    result = resolved(capsys, records, reference, "--completed", *answer, str(body))
    assert result == (0, f"{reference} is completed\n", "")
    headers = [(b"location", b"/orders/7"), (b"x-a", b"b")]
    assert decode_response(stored_record(records).response) == Response(201, headers, BODY)
    (resolution,) = progress_of(stored_record(records)).resolutions
    assert resolution[1:] == ("happened", "ada", "asked the bank")


def test_the_body_may_come_from_standard_input(records, capsys, monkeypatch):
    reference = records.put(1, state=IN_DOUBT)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BODY)))
    assert resolved(capsys, records, reference, "--completed", "--body", "-")[0] == 0
    assert decode_response(stored_record(records).response) == Response(200, [], BODY)


def test_an_operation_is_resolved_as_not_happened(records, capsys):
    """L6, O1: its steps, notes and resolutions are kept."""
    reference = records.put(1, state=IN_DOUBT, progress=PROGRESS)
    code, out, _err = resolved(capsys, records, reference, "--failed", "--json")
    document = json.loads(out)
    assert (code, document["resolved"], document["reason"]) == (0, True, None)
    assert document["operation"]["state"] == "failed"
    assert len(document["operation"]["resolutions"]) == 2
    assert stored_record(records).state == FAILED


def test_a_function_is_completed_with_a_value(records, capsys):
    """L6."""
    reference = records.put(1, state=IN_DOUBT, label="charges", scope="")
    assert resolved(capsys, records, reference, "--completed", "--value", '{"a": null}')[0] == 0
    assert decode_value(stored_record(records).response) == {"a": None}


def test_an_operation_that_is_not_in_doubt_is_not_changed(records, capsys):
    """L6: exit code 1, with the current record."""
    reference = records.put(1)
    before = stored_record(records)
    code, out, err = resolved(capsys, records, reference, "--failed")
    assert (code, out) == (1, "")
    assert err == f"coatcheck: {reference} is completed already\n"
    code, out, _err = resolved(capsys, records, reference, "--failed", "--json")
    document = json.loads(out)
    assert (code, document["resolved"]) == (1, False)
    assert document["operation"]["state"] == "completed"
    code, out, _err = resolved(capsys, records, "7D3F-92AB-1C4E", "--failed", "--json")
    assert (code, json.loads(out)["operation"]) == (1, None)
    assert stored_record(records) == before


def test_an_abandoned_operation_can_be_resolved_before_it_is_in_doubt(records, capsys):
    """L6."""
    reference = records.put(1, state=RUNNING, lease_until_ms=records.now_ms - 1)
    code, _out, err = resolved(capsys, records, reference, "--failed")
    assert (code, "not in doubt yet" in err) == (1, True)
    assert resolved(capsys, records, reference, "--failed", "--abandoned")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--failed", "--status", "201"), "leave out --status"),
        (("--completed", "--status", "201", "--value", "1"), "--value is for functions"),
        (("--completed", "--value", "{"), "--value is not valid JSON"),
        (("--completed", "--value", "[" * 50_000), "--value is not valid JSON"),
        (("--completed", "--value", "1"), "is a request"),
        (("--completed", "--body", "no/such/file"), "no/such/file"),
        (("--failed", "--by", " "), "by is ' '"),
    ],
    ids=lambda words: " ".join(words)[:40] if isinstance(words, tuple) else "",
)
def test_a_wrong_decision_is_one_line_of_error(records, capsys, words, message):
    reference = records.put(1, state=IN_DOUBT)
    command = ("resolve", reference, "--store", records.url, *BY_ADA, *words)
    code, out, err = run_command(capsys, *command)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert stored_record(records).state == IN_DOUBT


def test_a_body_over_the_limit_is_refused(records, capsys, tmp_path, monkeypatch):
    """X2."""
    monkeypatch.setattr("coatcheck.cli.resolve.BODY_BYTES_MAX", 10)
    body = tmp_path / "answer.json"
    body.write_bytes(BODY)
    reference = records.put(1, state=IN_DOUBT)
    code, _out, err = resolved(capsys, records, reference, "--completed", "--body", str(body))
    assert (code, "more than 10 bytes" in err) == (2, True)


def test_an_encrypted_operation_is_not_resolved_without_the_keys(records, capsys):
    """X1."""
    reference = records.put(1, state=IN_DOUBT, progress=bytes([SEALED]) + b"whatever")
    code, _out, err = resolved(capsys, records, reference, "--failed")
    assert (code, "give --keyring FILE" in err) == (2, True)
    assert "encrypted" in run_command(capsys, "lookup", reference, "--store", records.url)[1]


def test_an_encrypted_operation_is_resolved_with_the_keys(records, capsys, tmp_path):
    """X1: and the decision is encrypted, too."""
    key, file = os.urandom(32), tmp_path / "keys.json"
    file.write_text(json.dumps({"2026": b64encode(key).decode()}))
    with coatcheck.Engine(records.url, keyring=coatcheck.KeyRing({"2026": key})) as engine:
        assert engine.run("k", lambda: "sealed", scope="s") == "sealed"
    reference = records.put(1, state=IN_DOUBT)
    (tmp_path / "answer.json").write_bytes(BODY)
    answer = ("--completed", "--body", str(tmp_path / "answer.json"))
    code, _out, err = resolved(capsys, records, reference, *answer)
    assert (code, "give --keyring" in err) == (2, True)
    assert resolved(capsys, records, reference, *answer, "--keyring", str(file))[::2] == (0, "")
    written = sqlite3.connect(records.path).execute(
        "select progress, response from coatcheck_records"
    )
    assert not [blob for row in written for blob in row if blob and blob[0] != SEALED]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "c2hvcnQ="}', '{"a": "not base64"}'])
def test_a_key_file_that_cannot_be_read_is_refused_and_not_shown(records, capsys, tmp_path, text):
    """X1, O3."""
    file = tmp_path / "keys.json"
    file.write_text(text)
    code, _out, err = resolved(
        capsys, records, records.put(1, state=IN_DOUBT), "--failed", "--keyring", str(file)
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "not base64" not in err
    nowhere = resolved(capsys, records, "7D3F-92AB-1C4E", "--failed", "--keyring", "/nowhere")
    assert (nowhere[0], "--keyring" in nowhere[2]) == (2, True)


# ------------------------------------------------------------------------------ sweep and doctor


def test_a_sweep_deletes_only_records_whose_retention_is_over(records, capsys):
    """T3: a running operation with a live lease is kept."""
    records.put(1, expires_ms=records.now_ms - 1)
    records.put(
        2, expires_ms=records.now_ms - 1, state=RUNNING, lease_until_ms=records.now_ms + HOUR_MS
    )
    kept = records.put(3)
    assert run_command(capsys, "sweep", "--store", records.url)[:2] == (0, "swept 1 record\n")
    assert json.loads(run_command(capsys, "sweep", "--store", records.url, "--json")[1]) == {
        "swept": 0
    }
    assert kept in references(run_command(capsys, "list", "--store", records.url)[1])


def test_the_doctor_finds_nothing_wrong_with_a_new_store(records, capsys):
    code, out, _err = run_command(capsys, "doctor", "--store", records.url)
    assert code == 0
    assert out.startswith("ok")
    findings = json.loads(run_command(capsys, "doctor", "--store", records.url, "--json")[1])
    assert {finding["level"] for finding in findings} == {"ok"}


# ------------------------------------------------------------------------------- wrong usage

BAD_STORES = [
    ("sqlite:///no/such/place.db", "/no/such/place.db"),
    ("sqlite:///absent.db", "/absent.db"),
    ("sqlite://", "names no file"),
    ("mongodb://here", "no store is known"),
    ("absent.db", "no store is known"),
    ("http://[", "is not a URL"),
    ("memory://", "memory:// ends with its process"),
]


@pytest.mark.parametrize(
    "command",
    [["lookup", "x"], ["list"], ["resolve", "x", "--failed", *BY_ADA], ["sweep"], ["doctor"]],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("bad", BAD_STORES, ids=lambda bad: bad[0])
def test_a_wrong_store_url_is_one_line_of_error(command, bad, tmp_path, monkeypatch, capsys):
    url, message = bad
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(capsys, *command, "--store", url)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing is created


def test_a_database_without_our_tables_is_not_changed(tmp_path, capsys):
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table theirs (x)")
    connection.close()
    before = path.read_bytes()
    code, _out, err = run_command(capsys, "list", "--store", f"sqlite:///{path}")
    assert code == 2
    assert "has no coatcheck tables" in err
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_one_line_of_error(tmp_path, capsys):
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam, this is not a database. " * 50)
    code, _out, err = run_command(capsys, "doctor", "--store", f"sqlite:///{path}")
    assert code == 2
    assert "not an SQLite database" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["lookup"],
        ["list", "--state", "asleep"],
        ["list", "--older-than", "soon"],
        ["list", "--older-than", "9999999999999999d"],
        ["list", "--limit", "0"],
        ["list", "--after", "7D3F-92AB-1C4E"],
        ["resolve", "7D3F-92AB-1C4E", *BY_ADA],
        ["resolve", "7D3F-92AB-1C4E", "--failed", "--completed", *BY_ADA],
        ["resolve", "7D3F-92AB-1C4E", "--failed", "--by", "ada"],
        ["resolve", "7D3F-92AB-1C4E", "--failed", "--why", "asked the bank"],
        ["resolve", "7D3F-92AB-1C4E", "--completed", "--status", "99", *BY_ADA],
        ["resolve", "7D3F-92AB-1C4E", "--completed", "--header", "x", *BY_ADA],
        ["resolve", "7D3F-92AB-1C4E", "--completed", "--header", "x: a\nb: c", *BY_ADA],
        ["migrate", "sqlite:///a.db", "--store", "sqlite:///b.db"],
        ["unheard-of"],
    ],
)
def test_a_wrong_argument_is_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: coatcheck" in capsys.readouterr().err


def test_an_unknown_option_prints_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--bogus"])
    err = capsys.readouterr().err
    assert (ended.value.code, "usage: coatcheck sweep" in err, "--bogus" in err) == (2, True, True)


@pytest.mark.parametrize(
    "words", [["doctor", URL], ["--store", URL, "list"], ["list", "--limit", URL]]
)
def test_no_password_is_printed_if_the_store_is_in_the_wrong_place(words, capsys):
    """O1: `migrate` takes it without --store, so users may try that with other commands."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert (ended.value.code, "postgresql://…@db/shop" in err) == (2, True)
    assert "hunter" not in err


def test_a_json_list_that_was_cut_is_reported_on_standard_error(records, capsys):
    """O1: the document itself looks complete."""
    for number in (1, 2):
        records.put(number)
    _code, out, err = run_command(capsys, "list", "--json", "--limit", "1", "--store", records.url)
    assert (len(json.loads(out)), "there are more" in err) == (1, True)
    assert run_command(capsys, "list", "--json", "--limit", "2", "--store", records.url)[2] == ""


def test_a_long_list_is_read_page_by_page(records, capsys):
    """O1: each page prints how to get the next one; a program needs only the last id."""
    for number in range(5):
        records.put(number)
    found, after = [], []
    for _ in range(3):
        words = ("list", "--json", "--limit", "2", "--store", records.url, *after)
        _code, out, err = run_command(capsys, *words)
        found += [facts["id"] for facts in json.loads(out)]
        after = ["--after", found[-1]]
        assert (" ".join(after) in err) == (len(found) < 5)
    assert found == [(bytes([number]) * 16).hex() for number in range(5)]


def test_without_a_command_the_help_is_printed(capsys):
    code, _out, err = run_command(capsys)
    assert code == 2
    assert all(command in err for command in COMMANDS)


# ---------------------------------------------------------------------------------------- other


def test_the_default_store_comes_from_the_environment(records, capsys, monkeypatch):
    reference = records.put(1)
    monkeypatch.setenv("COATCHECK_STORE", records.url)
    assert run_command(capsys, "lookup", reference)[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  coatcheck {command}" in shown
    assert "--json" in shown


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=30
    )


def test_the_module_is_the_command():
    done = run("-m", "coatcheck", "--version")
    assert (done.returncode, done.stdout) == (0, f"coatcheck {coatcheck.__version__}\n")


def test_help_loads_no_servers_and_no_demo():
    script = (
        "import sys, coatcheck.cli\n"
        "try: coatcheck.cli.main(['--help'])\n"
        "except SystemExit: print(*sorted(sys.modules), sep='\\n')"
    )
    loaded = set(run("-c", script).stdout.splitlines())
    assert "coatcheck.cli" in loaded
    assert not [name for name in loaded if name.startswith(("coatcheck.demo", "coatcheck.server"))]
    assert "wsgiref" not in loaded


def test_a_closed_pipe_is_no_traceback(records):
    for number in range(40):
        records.put(number, label="POST /" + "long" * 1_000)
    command = [sys.executable, "-m", "coatcheck", "list", "--store", records.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lister:
        assert lister.stdout is not None
        assert lister.stderr is not None
        os.read(lister.stdout.fileno(), 1)
        lister.stdout.close()
        assert lister.stderr.read() == b""
    assert lister.returncode == 1


UNWRITABLE = [("&-", 0), *([("/dev/full", 2)] if Path("/dev/full").exists() else [])]


@pytest.mark.parametrize(("where", "code"), UNWRITABLE)
def test_output_that_cannot_be_written_is_no_traceback(records, where, code):
    """O1: exit code 0 if standard output is closed on purpose, 2 if writing failed."""
    records.put(1)
    script = f'exec "$0" -m coatcheck list --store "$1" >{where}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, records.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, code // 2)
    assert "Traceback" not in done.stderr
