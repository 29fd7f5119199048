"""`coatcheck erase`, `stats`, `sweep` and `doctor`."""

from coatcheck.core.identity import scope_of_caller
from coatcheck.core.record import FAILED, IN_DOUBT, RUNNING
from coatcheck.core.response import Response, encode_response
from tests.cli.conftest import HOUR_MS

SCOPE = scope_of_caller("customer-17", b"pepper")


def test_everything_of_one_caller_is_erased(shared):
    """R3: except what runs, which is reported."""
    others = shared.put(1)
    for number, state in ((2, IN_DOUBT), (3, FAILED), (4, 1)):
        shared.put(number, scope=SCOPE, state=state)
    lease_ms = shared.now_ms + HOUR_MS
    running = shared.put(5, scope=SCOPE, state=RUNNING, lease_until_ms=lease_ms)
    words = ("erase", "--caller", "customer-17", "--secret", "pepper")
    code, out, err = shared.run(*words, "--dry-run")
    assert (code, out) == (0, "would erase 3 records\n")
    assert err == f"coatcheck: left alone, because they run or have just changed: {running}\n"
    assert shared.run(*words)[0] == 2  # not confirmed
    assert len(shared.all()) == 5
    assert shared.json(*words, "--yes") == {"is_dry_run": False, "erased": 3, "left": [running]}
    assert {facts["reference"] for facts in shared.json("list")} == {others, running}
    assert shared.run(*words, "--yes")[:2] == (0, "erased 0 records\n")


def test_the_digest_of_a_caller_is_enough_to_erase(records):
    """R3: as `lookup` shows it."""
    reference = records.put(1, scope=SCOPE)
    (facts,) = records.json("lookup", reference)
    assert records.run("erase", "--caller", facts["caller"], "--yes")[0] == 0
    assert records.all() == []


def test_a_compact_store_does_not_pretend_to_erase(records):
    """R3: it does not keep whose its records are."""
    records.put(1, scope=SCOPE[:1], key="")
    code, _out, err = records.run("erase", "--caller", SCOPE, "--yes")
    assert (code, "the store is compact" in err) == (2, True)


def test_records_are_counted_by_state_and_label(shared):
    """O1."""
    answer = encode_response(Response(201, [], b"12345"))
    shared.put(1, response=answer)
    shared.put(2, response=answer, created_ms=shared.now_ms - 4 * HOUR_MS)
    shared.put(3, state=IN_DOUBT, label="POST /charges")
    code, out, _err = shared.run("stats")
    rows = [line.split(maxsplit=1)[0] for line in out.splitlines()]
    assert (code, rows) == (0, ["state", "completed", "in", "total"])
    assert ["completed", "2", "4", "h", "ago", f"{2 * len(answer):,}", "POST", "/orders"] in [
        line.split() for line in out.splitlines()
    ]
    counted = shared.json("stats")
    assert (counted["records"], counted["body_bytes"]) == (3, 2 * len(answer))
    assert [(c["state"], c["label"], c["records"]) for c in counted["counts"]] == [
        ("completed", "POST /orders", 2),
        ("in_doubt", "POST /charges", 1),
    ]
    assert counted["oldest"] == counted["counts"][0]["oldest"]


def test_an_empty_store_is_counted_too(records):
    """O1."""
    assert records.run("stats") == (0, "", "coatcheck: the store has no records\n")
    empty = {"records": 0, "oldest": None, "body_bytes": 0, "counts": []}
    assert records.json("stats") == empty


def test_a_sweep_deletes_only_records_whose_retention_is_over(records):
    """T3: a running operation with a live lease is kept; in a pipe nothing is animated."""
    over_ms = records.now_ms - 1
    records.put(1, expires_ms=over_ms)
    records.put(2, expires_ms=over_ms, state=RUNNING, lease_until_ms=records.now_ms + HOUR_MS)
    records.put(3)
    assert records.run("sweep") == (0, "swept 1 record\n", "")
    assert records.json("sweep") == {"swept": 0}
    assert len(records.all()) == 2


def test_the_doctor_finds_nothing_wrong_with_a_new_store(records):
    """D3, O1."""
    code, out, _err = records.run("doctor")
    assert (code, {line.split()[0] for line in out.splitlines()}) == (0, {"level", "ok"})
    assert {finding["level"] for finding in records.json("doctor")} == {"ok"}
