"""`coatcheck plan` and `coatcheck outbox`: what a person who runs clients sees and changes."""

import json

import httpx2
import pytest

from coatcheck import KeyRing
from coatcheck.cli import main
from coatcheck.client.httpx2 import Client
from coatcheck.client.outbox import Outbox, Pending, Refused
from tests.support.servers.postgres import postgres


@pytest.fixture
def run(capsys):
    """Run a command; return its exit code, standard output and error."""

    def command(*words: str) -> tuple[int, str, str]:
        code = main(words)
        output = capsys.readouterr()
        return code, output.out, output.err

    return command


def test_a_plan_says_whether_the_window_is_long_enough(run):
    """T4: for people by words, for programs by the exit code."""
    code, shown, _ = run("plan", "--rate", "1000", "--store", "redis", "--response-bytes", "679")
    assert code == 0
    assert "keys stored           90,000,000" in shown
    assert "90 GB in redis: 321 bytes for a key and 679 for its response" in shown
    assert "every retry is inside the window" in shown
    code, shown, _ = run("plan", "--window", "1h", "--retries-for", "2d")
    assert code == 1
    assert "a late retry would be executed again" in shown
    code, shown, _ = run("plan", "--window", "1h", "--retries-for", "2d", "--json")
    assert (code, json.loads(shown)["is_safe"]) == (1, False)


@pytest.mark.parametrize(
    "words", [("--window", "soon"), ("--rate", "-1"), ("--rate", "nan"), ("--store", "floppy")]
)
def test_a_plan_with_a_wrong_number_is_one_line(run, words):
    """T4."""
    code, shown, error = run("plan", *words)
    assert (code, shown, error.count("\n")) == (2, "", 1)
    assert error.startswith("coatcheck: ")


def refuse(_request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(402, json={"detail": "declined"})


@pytest.fixture
def actions(tmp_path):
    """An outbox with a refused action; its URL, and the action."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    client = Client(base_url="http://shop", transport=httpx2.MockTransport(refuse))
    outbox = Outbox(url, client=client, workers=1)
    ticket = outbox.submit("POST", "/charges", json={"cents": 5}, lane="order-17")
    outbox.drain()
    assert isinstance(ticket.result(), Refused)
    return url, ticket


def test_refused_actions_are_listed_with_the_answer_and_without_their_bodies(run, actions):
    """C3: all columns of a pipe, or JSON."""
    url, ticket = actions
    code, shown, _ = run("outbox", "list", "--outbox", url)
    assert code == 0
    for part in (ticket.key, "refused", "402", "POST /charges", "order-17"):
        assert part in shown
    assert "cents" not in shown
    code, shown, _ = run("outbox", "list", "--all", "--json", "--outbox", url)
    (action,) = json.loads(shown)
    assert (action["key"], action["state"], action["answer"]) == (ticket.key, "refused", 402)


def test_a_refused_action_is_sent_again_or_discarded(run, actions):
    """C3: with the same key; without a terminal nothing is deleted unless that is confirmed."""
    url, ticket = actions
    code, _, error = run("outbox", "discard", ticket.key, "--outbox", url)
    assert (code, "add --yes" in error) == (2, True)
    assert isinstance(ticket.result(), Refused)
    assert run("outbox", "retry", ticket.key, "--outbox", url)[0] == 0
    assert isinstance(ticket.result(), Pending)
    assert run("outbox", "list", "--outbox", url)[2] == "coatcheck: no actions found\n"
    assert run("outbox", "retry", ticket.key, "--outbox", url)[0] == 1  # it is pending
    assert run("outbox", "discard", ticket.key, "--yes", "--outbox", url)[0] == 0
    assert run("outbox", "discard", ticket.key, "--yes", "--outbox", url)[0] == 1
    assert run("outbox", "list", "--all", "--outbox", url)[2] == "coatcheck: no actions found\n"


def test_what_a_decision_about_an_action_did_is_json_for_programs(run, actions):
    """O1: with the reason if it did nothing."""
    url, ticket = actions
    for words, done in ((("retry",), "retried"), (("discard", "--yes"), "discarded")):
        command = ("outbox", words[0], ticket.key, *words[1:], "--json", "--outbox", url)
        code, shown, _ = run(*command)
        assert (code, json.loads(shown)) == (0, {done: True, "reason": None})
        code, shown, error = run(*command)
        again = json.loads(shown)
        assert (code, again[done], error) == (1, False, f"coatcheck: {again['reason']}\n")


def test_an_action_that_did_not_happen_is_sent_again_on_request(run, actions):
    """C5: with a new key only where the person says so."""
    url, ticket = actions
    assert run("outbox", "retry", ticket.key, "--did-not-happen", "--outbox", url)[0] == 0
    assert isinstance(ticket.result(), Pending)
    ticket._outbox.drain()
    assert run("outbox", "retry", ticket.key, "--new-key", "--outbox", url)[0] == 0
    entry = ticket._outbox.store.take(10**14, 1, probes=False)
    assert entry.key == ticket.key != entry.sent_key


def test_an_encrypted_outbox_is_listed_without_its_keys(run, tmp_path):
    """C3: what may be encrypted is not printed."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    client = Client(base_url="http://shop", transport=httpx2.MockTransport(refuse))
    outbox = Outbox(url, client=client, keyring=KeyRing({"k": b"k" * 32}))
    outbox.submit("POST", "/charges", json={"cents": 5})
    outbox.drain()
    code, shown, _ = run("outbox", "list", "--json", "--outbox", url)
    assert (code, json.loads(shown)[0]["answer"]) == (0, 402)


def test_an_outbox_in_postgresql_is_listed_and_none_is_created(run):
    """C3, O1."""
    url = postgres().fresh_url()
    code, _, error = run("outbox", "list", "--outbox", url)
    assert (code, "there is no outbox" in error) == (2, True)
    client = Client(base_url="http://shop", transport=httpx2.MockTransport(refuse))
    outbox = Outbox(url, client=client)
    ticket = outbox.submit("POST", "/charges", json={"cents": 5})
    outbox.drain()
    outbox.close()
    assert ticket.key in run("outbox", "list", "--outbox", url)[1]


def test_a_command_on_an_outbox_creates_none(run, tmp_path):
    """O1."""
    code, _, error = run("outbox", "list", "--outbox", f"sqlite:///{tmp_path}/none.db")
    assert (code, "there is no outbox" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []
