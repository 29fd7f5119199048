"""`coatcheck lookup` and `coatcheck list`: what an operator sees of operations."""

import json

import pytest

import coatcheck
from coatcheck.cli import operations
from coatcheck.core.describe import iso
from coatcheck.core.identity import scope_of_caller
from coatcheck.core.progress import NOTHING, Note, Resolution, Step, encoded
from coatcheck.core.record import FAILED, IN_DOUBT, RUNNING
from coatcheck.core.response import Response, encode_response, encode_value
from coatcheck.server import callers
from coatcheck.server.wsgi import IdempotencyMiddleware
from coatcheck.stores.memory import MemoryStore
from tests.cli.conftest import HOUR_MS
from tests.support.http import environ_of, exchange_wsgi, with_key

SECRET = "of the customer"
BODY = json.dumps({"secret": SECRET}).encode()
PROGRESS = encoded(
    NOTHING.with_step(Step("reserve", 1, encode_value(SECRET)))
    .with_note(Note(1_800_000_000_000, 2, "about to charge \x1b[2J"))
    .with_resolution(Resolution(1_800_000_000_000, "run again", "ada", "the bank was away"))
)


def facts_in(out: str) -> dict[str, str]:
    return {line[:12].strip(): line[13:] for line in out.splitlines()}


def references(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:]]


# ---------------------------------------------------------------------------------------- lookup


def test_an_operation_is_found_as_people_name_it(shared):
    """K5, O1: by its reference, its id or its key."""
    response = encode_response(Response(201, [(b"x-a", b"b")], BODY))
    reference = shared.put(7, response=response, attempt=3)
    shared.put(8)
    id, key = (bytes([7]) * 16).hex(), "key-7-of-the-client"
    for text in (reference, reference.lower(), reference.replace("-", ""), id, key):
        code, out, _err = shared.run("lookup", text)
        facts = facts_in(out)
        assert (code, facts["reference"], facts["state"]) == (0, reference, "completed")
        assert (facts["label"], facts["attempt"]) == ("POST /orders", "3")
        assert facts["caller"] == "5c0be5c0be5c0be0"
        assert facts["created"] == f"{iso(shared.now_ms - 2 * HOUR_MS)} (2 h ago)"
        assert facts["response"] == f"status 201, {len(BODY)} bytes"
        assert facts["next"] == "retries get the stored response"
    assert shared.json("lookup", key)[0]["response"] == {"status": 201, "bytes": len(BODY)}


def test_the_error_of_a_failed_attempt_is_shown_without_its_text(records):
    """O1, O3: it may have what the client has sent."""
    with coatcheck.Engine(records.url) as engine, pytest.raises(LookupError):
        engine.run("order-1", {}.__getitem__, SECRET, scope="orders")
    code, out, _err = records.run("lookup", "order-1")
    assert (code, facts_in(out)["state"]) == (0, "failed")
    assert facts_in(out)["failure"] == "attempt 1 raised KeyError"
    assert SECRET not in out


def test_the_caller_s_name_and_the_policy_are_shown(records):
    """O1, R3: of an operation in doubt; erasing the caller erases the name."""

    def broken(_environ, _start_response):
        raise TimeoutError(SECRET)

    guarded = IdempotencyMiddleware(
        broken,
        store=records.url,
        policy="payments",
        caller=lambda _request: callers.Named(7, "Ada \x1b[2J"),
    )
    environ = environ_of("POST", "/charges", with_key("charge-1"), b"{}")
    assert isinstance(exchange_wsgi(guarded, environ).error, TimeoutError)
    guarded.engine.close()
    facts = facts_in(records.run("lookup", "charge-1")[1])
    scope = records.only().scope
    assert facts["caller"] == f"Ada \\x1b[2J ({scope})"
    assert facts["policy"].startswith("record mode, recovery manual, lease 20 s, window 3 d")
    assert facts["failure"] == "attempt 1 raised TimeoutError"
    assert records.json("lookup", "charge-1")[0]["caller_name"] == "Ada \x1b[2J"
    assert records.run("erase", "--caller", "7", "--yes")[0] == 0
    assert records.all() == []


def test_one_key_of_two_callers_is_two_operations(records):
    """S1, O1."""
    records.put(1, key="shared key")
    records.put(2, key="shared key", scope="another")
    records.put(3, key="7D3F92AB1C4E")  # looks like a reference
    found = records.json("lookup", "shared key")
    assert {facts["caller"] for facts in found} == {"5c0be5c0be5c0be0", "another"}
    assert records.run("lookup", "shared key")[1].count("reference") == 2
    assert records.run("lookup", "7D3F92AB1C4E")[0] == 0


def test_what_is_not_there_is_not_found(records):
    """K5: a search compares 56 of the 60 bits of a reference, so the rest is compared after it."""
    reference = records.put(1, key="")
    near = reference[:-1] + ("0" if reference[-1] != "0" else "1")
    for text in ("7D3F-92AB-1C4E", "no such key", near, "f" * 32, ""):
        code, out, err = records.run("lookup", text)
        assert (code, out, text in err) == (1, "", True)
        assert records.json("lookup", text) == []


def test_the_next_command_is_shown_for_each_state(records):
    """O1, L6: it can be typed as it is, with the same store."""
    later_ms, earlier_ms = records.now_ms + HOUR_MS, records.now_ms - HOUR_MS
    decided = Resolution(records.now_ms, "did not happen", "ada", "asked")
    shown = {
        records.put(1, state=IN_DOUBT): ["--completed --status 201 --body-file FILE", "--failed"],
        records.put(2, state=IN_DOUBT, scope=""): ["--completed --value JSON", "--failed"],
        records.put(3, state=RUNNING, lease_until_ms=earlier_ms): [
            "--abandoned --completed --status 201 --body-file FILE",
            "--abandoned --failed",
        ],
        records.put(4, state=RUNNING, lease_until_ms=later_ms): [],
        records.put(5, state=FAILED): [],
        records.put(6, state=FAILED, progress=encoded(NOTHING.with_resolution(decided))): [
            "--correct --completed --status 201 --body-file FILE"
        ],
    }
    for reference, options in shown.items():
        _code, out, _err = records.run("lookup", reference)
        commands = [line.strip() for line in out.splitlines() if line.startswith(" ")]
        who = f"--by YOU --why REASON --store {records.url}"
        assert commands == [f"coatcheck resolve {reference} {words} {who}" for words in options]
        (facts,) = records.json("lookup", reference)
        assert len(facts["next"]["commands"]) == len(options)


def test_a_crashed_attempt_can_be_distinguished_from_a_running_one(records):
    """L5, O1: in both commands."""
    crashed = records.put(1, state=RUNNING, lease_until_ms=records.now_ms - 1)
    running = records.put(2, state=RUNNING, lease_until_ms=records.now_ms + HOUR_MS)
    for reference, state in ((crashed, "lease expired"), (running, "running")):
        assert facts_in(records.run("lookup", reference)[1])["state"] == state
    rows = {row.split()[0]: row for row in records.run("list")[1].splitlines()}
    assert ("lease expired" in rows[crashed], "lease expired" in rows[running]) == (True, False)
    assert references(records.run("list", "--state", "lease_expired")[1]) == [crashed]


def test_the_history_is_shown_without_results_and_control_characters(records):
    """O1, O3, L6: all that a person needs to decide, and nothing that a client has hidden in it."""
    label, key = "POST /\x1b]0;title\x07", "\x1b[2J[bold]"
    reference = records.put(1, state=IN_DOUBT, progress=PROGRESS, label=label, key=key)
    _code, out, _err = records.run("lookup", reference)
    assert "reserve: done by attempt 1" in out
    assert "2027-01-15T08:00:00Z attempt 2: about to charge \\x1b[2J" in out
    assert "2027-01-15T08:00:00Z run again, by ada: the bank was away" in out
    assert "\\x1b[2J[bold]" in out  # nor is it markup
    printed = out + records.run("list")[1] + json.dumps(records.json("lookup", reference))
    assert not {"\x1b", "\x07"} & set(printed)
    assert SECRET not in printed


@pytest.mark.parametrize(
    "response", [encode_response(Response(200, [], BODY)), encode_value(SECRET)]
)
def test_a_body_is_never_shown(records, response):
    """O3: no bodies, in no format."""
    reference = records.put(1, response=response)
    for options in ([], ["--json"]):
        _code, out, _err = records.run("lookup", reference, *options)
        assert (SECRET in out, "bytes" in out) == (False, True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://shop:hunter2@db/shop", "postgresql://…@db/shop"),
        ("mysql://shop:hunter2@ho/me?x@db:3306/shop", "mysql://…@db:3306/shop"),
        ("redis://cache:6379/0?password=hunter2", "redis://cache:6379/0"),
    ],
)
def test_no_password_of_a_store_is_printed(url, shown, monkeypatch, records, capsys):
    """X3, O3: neither in the help, nor in a message, nor in the next command."""
    monkeypatch.setenv("COATCHECK_STORE", url)
    monkeypatch.setattr(operations, "open_store", lambda _url, *, create: MemoryStore())
    records.url = url
    found = [records.run("lookup", "nothing")[2]]
    assert shown in found[0]
    monkeypatch.setattr(operations, "find_operations", lambda *_: [records.only()])
    records.put(1, state=IN_DOUBT)
    found += [records.run("lookup", "x")[1], records.run("list", "--help")[1]]
    assert "hunter2" not in "".join(found)
    assert "--failed" in found[1]


# ------------------------------------------------------------------------------------------ list


def test_a_list_has_the_newest_first_with_their_ages(shared):
    """O1: and only the beginning of each key."""
    ages_ms = {1: 3 * 60_000, 2: 5_000, 3: 50 * HOUR_MS}
    made = {n: shared.put(n, created_ms=shared.now_ms - age) for n, age in ages_ms.items()}
    code, out, err = shared.run("list")
    assert (code, err) == (0, "")
    assert references(out) == [made[2], made[1], made[3]]
    assert [
        ("s ago" in row, "3 m ago" in row, "2 d ago" in row) for row in out.splitlines()[1:]
    ] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert ("key-1-of…" in out, "client" in out) == (True, False)
    assert [facts["reference"] for facts in shared.json("list")] == references(out)


def test_a_list_is_narrowed_by_state_label_caller_and_age(shared):
    """O1."""
    scope, new_ms = scope_of_caller("customer-17", b"pepper"), shared.now_ms
    old = shared.put(1, state=IN_DOUBT)
    new = shared.put(2, state=IN_DOUBT, version=new_ms, created_ms=new_ms)
    done = shared.put(3, label="POST /charges", scope=scope)
    for words, expected in (
        (["--state", "in_doubt"], {old, new}),
        (["--state", "in_doubt", "--older-than", "1h"], {old}),
        (["--newer-than", "1h"], {new}),
        (["--label", "POST /charges"], {done}),
        (["--caller", scope], {done}),
        (["--caller", "customer-17", "--secret", "pepper"], {done}),
    ):
        assert set(references(shared.run("list", *words)[1])) == expected
    for words in (["--state", "failed"], ["--caller", "customer-17"]):
        assert shared.run("list", *words) == (0, "", "coatcheck: no operations found\n")


def test_a_monitor_can_ask_for_operations_in_doubt(records):
    """O1, O3: by the exit code."""
    words = ("list", "--state", "in_doubt", "--fail-if-any")
    records.put(1)
    assert records.run(*words)[0] == 0
    records.put(2, state=IN_DOUBT)
    assert records.run(*words)[0] == records.run(*words, "--json")[0] == 1


def test_a_list_that_was_cut_is_reported_on_standard_error(records):
    """O1: a document looks complete."""
    for number in range(3):
        records.put(number)
    for options in ([], ["--json"]):
        _code, out, err = records.run("list", "--limit", "2", *options)
        assert (out.count("POST /orders"), "there are more" in err) == (2, True)
        assert records.run("list", "--limit", "3", *options)[2] == ""
