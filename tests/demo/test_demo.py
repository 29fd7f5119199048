"""The demo: its numbers are true, it can fail, and it leaves nothing behind.

One run with few orders serves all tests of the result, because it takes seconds.
"""

import functools
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from coatcheck.cli import main
from coatcheck.demo import command
from coatcheck.demo.__main__ import DEMO_SEED
from coatcheck.demo.client import (
    NETWORK_ERRORS,
    Receipt,
    Response,
    connect,
    draw_orders,
    post,
)
from coatcheck.demo.processes import Service
from coatcheck.demo.report import Display, summarize
from coatcheck.demo.servers import charges_in

ORDERS = 20

# 10 s for what takes a tenth of a second.
EXIT_S_MAX = 10.0


class Run:
    """One run of the demo: exit code, report and JSON."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.shown = done.stderr
        self.facts = json.loads(done.stdout)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory) -> Run:
    keep = tmp_path_factory.mktemp("demo") / "kept here"
    arguments = ["demo", "--orders", str(ORDERS), "--json", "--keep", str(keep)]
    return Run(
        subprocess.run(
            [sys.executable, "-m", "coatcheck", *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            check=False,
            timeout=50,
        )
    )


def test_with_keys_every_order_is_charged_exactly_once(demo_run):
    """L1, L5: lost responses, simultaneous requests and a kill -9, and no order is charged twice."""
    summary = demo_run.facts["with_coatcheck"]
    assert summary["broken"] == []
    assert (demo_run.code, demo_run.facts["promise_held"]) == (0, True)
    assert (summary["charges"], summary["double_charged"], summary["overcharged_cents"]) == (
        ORDERS,
        0,
        0,
    )
    charged = charges_in(Path(demo_run.facts["directory"]))
    assert sorted(charged) == [
        (order.name, order.cents) for order in draw_orders(ORDERS, DEMO_SEED)
    ]


def test_without_keys_the_same_orders_are_charged_twice(demo_run):
    summary = demo_run.facts["without_keys"]
    assert summary["double_charged"] > 0
    assert summary["overcharged_cents"] > 0
    assert summary["charges"] > ORDERS
    charged = charges_in(Path(demo_run.facts["directory"]) / "without-keys")
    assert len(charged) == summary["charges"]


def test_the_network_does_the_same_to_both_halves(demo_run):
    left, right = demo_run.facts["without_keys"], demo_run.facts["with_coatcheck"]
    assert left["repeated"] == right["repeated"] > 0
    assert min(left["responses_lost"], right["responses_lost"]) > 0
    assert left["kills"] == right["kills"] == 1
    assert min(left["requests"], right["requests"]) > ORDERS


def test_the_killed_order_is_taken_over_and_can_be_looked_up(demo_run, capsys):
    """K5, L5: the demo prints the command that finds the operation."""
    example = demo_run.facts["example"]
    assert example["attempt"] >= 2
    words = shlex.split(example["lookup"])
    assert main(words[words.index("lookup") :]) == 0
    shown = capsys.readouterr().out
    assert example["reference"] in shown
    assert "POST /orders" in shown
    assert "status 201" in shown
    assert "N-" not in shown  # the order number is in the body, which is never printed


def test_with_json_the_report_is_on_standard_error_without_escape_sequences(demo_run):
    assert "with coatcheck" in demo_run.shown
    assert "orders charged twice or more" in demo_run.shown
    assert "\x1b" not in demo_run.shown


def test_the_report_names_the_condition_of_its_promise(demo_run):
    """L5, L6: the recovery policy, and the key that the provider gets; on one screen."""
    assert re.search(r"recovery after the kill +- +retry", demo_run.shown)
    assert 'operation.derive("charge")' in demo_run.shown
    lines = demo_run.shown.splitlines()
    assert len(lines) <= 24
    without_paths = [line for line in lines if "files in" not in line and ".db" not in line]
    assert max(map(len, without_paths)) <= 80


def test_a_demo_that_ended_well_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--orders", "4", "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert (facts["directory"], facts["example"]["lookup"]) == (None, "")
    assert "files in" not in shown.err
    assert "lookup" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_failed_keeps_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = functools.partial(command.run, orders=4, seed=DEMO_SEED, keep=None, as_json=False)
    assert run(guard="forgetful") == 1
    (directory,) = tmp_path.iterdir()
    assert f"files in {directory}" in capsys.readouterr().out


def test_the_demo_reports_a_guard_that_does_not_work(tmp_path, capsys):
    """L1: without this test the demo would prove nothing."""
    code = command.run(
        orders=8, seed=DEMO_SEED, keep=tmp_path / "kept", as_json=False, guard="forgetful"
    )
    shown = capsys.readouterr().out
    assert code == 1
    assert f"Not every order was charged exactly once (seed {DEMO_SEED})" in shown
    assert "charged more than once (order-0" in shown
    assert "Every order was charged exactly once" not in shown
    charged = [name for name, _cents in charges_in(tmp_path / "kept")]
    assert len(charged) > len(set(charged))


# ---------------------------------------------------------------------------------------- orders


def test_the_same_seed_draws_the_same_orders():
    assert draw_orders(50, 1) == draw_orders(50, 1)
    assert draw_orders(50, 1) != draw_orders(50, 2)
    assert draw_orders(50, 1)[:20] == draw_orders(20, 1)


def test_a_third_of_the_responses_is_lost():
    losses = [is_lost for order in draw_orders(3_000, DEMO_SEED) for is_lost in order.losses]
    assert sum(losses) / len(losses) == pytest.approx(1 / 3, abs=0.02)


# -------------------------------------------------------------------------------------- counting


def receipts_of(orders):
    return [
        Receipt(order, requests=1, responses=1, numbers={f"N-{order.name}"}, is_confirmed=True)
        for order in orders
    ]


def broken_by(change) -> list[str]:
    """Apply *change* to three good orders; return what the summary reports."""
    orders = draw_orders(3, 1)
    receipts = receipts_of(orders)
    charges = [(order.name, order.cents) for order in orders]
    change(receipts, charges)
    return list(summarize(receipts, charges, kills=0, seconds=1.0).broken)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r, c: c.append(c[0]), "1 order was charged more than once (order-0001)"),
        (lambda r, c: c.pop(0), "1 order was never charged (order-0001)"),
        (lambda r, c: c.append(("x", 1)), "1 order was charged but never ordered (x)"),
        (
            lambda r, c: c.__setitem__(0, (c[0][0], c[0][1] + 1)),
            "1 order was charged a wrong amount (order-0001)",
        ),
        (
            lambda r, c: setattr(r[0], "is_confirmed", False),
            "1 order was never confirmed (order-0001)",
        ),
        (
            lambda r, c: r[0].numbers.add("N-2"),
            "1 order was confirmed with several numbers (order-0001)",
        ),
    ],
)
def test_every_wrong_charge_or_confirmation_is_reported(change, sentence):
    assert broken_by(change) == [sentence]


def test_orders_that_are_charged_and_confirmed_once_are_not_reported():
    assert broken_by(lambda _receipts, _charges: None) == []


def test_the_overcharged_amount_is_what_exceeds_the_orders():
    orders = draw_orders(2, 1)
    charges = [(orders[0].name, orders[0].cents)] * 3 + [(orders[1].name, orders[1].cents)]
    summary = summarize(receipts_of(orders), charges, kills=1, seconds=1.0)
    assert summary.overcharged_cents == 2 * orders[0].cents
    assert (summary.double_charged, summary.charges) == (1, 4)


# --------------------------------------------------------------------------------------- display


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar_that_fits_its_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Display(stream).show_progress(
        "without keys", 10, 20, note="a note that is longer than the line"
    )
    drawn = stream.getvalue().removeprefix("\r\x1b[2K")
    assert "10 of 20" in drawn
    assert len(drawn) < 60
    assert "\n" not in drawn


def test_a_file_gets_complete_lines_in_its_own_encoding():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = Display(stream)
    display.show_introduction(orders=3, seed=1)
    display.show_progress("without keys", 1, 3)
    summary = summarize(receipts_of(draw_orders(3, 1)), [], kills=0, seconds=1.0)
    display.show_half("without keys", summary)
    shown = raw.getvalue().decode("ascii")
    assert "\r" not in shown
    assert "without keys    ####" in shown


# -------------------------------------------------------------------------------------- responses

COMPLETE = b"HTTP/1.0 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def response_from(content: bytes) -> Response:
    """Return what the client reads from a server that sends *content* and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            caller, _address = listener.accept()
            with caller, caller.makefile("rb") as request:
                while request.readline().strip():
                    pass
                request.read(2)  # the body; closing with unread bytes would reset the connection
                caller.sendall(content)

        server = threading.Thread(target=respond)
        server.start()
        try:
            with closing(connect(listener.getsockname()[1])) as connection:
                return post(connection, "/orders", {}, "k-1")
        finally:
            server.join(10)


def test_a_response_that_is_cut_off_anywhere_is_an_error():
    """A kill -9 between two writes of a server may leave a status 201 and nothing more."""
    assert response_from(COMPLETE).status == 201
    for end in range(len(COMPLETE)):
        with pytest.raises(NETWORK_ERRORS):
            response_from(COMPLETE[:end])


# ------------------------------------------------------------------------------------- processes

PARENT = """
import sys, time
from pathlib import Path
from coatcheck.demo.processes import Service
with Service("provider", Path(sys.argv[1]), "none") as service:
    print(service.port, flush=True)
    sys.stdin.read()
"""


def refuses(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


def test_servers_do_not_outlive_a_killed_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert not refuses(port)
        parent.kill()
    deadline = time.monotonic() + EXIT_S_MAX
    while not refuses(port) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert refuses(port)


def test_nothing_is_sent_to_the_port_of_a_killed_server(tmp_path):
    """The system may give it to another program, such as a server of a test beside this one."""
    service = Service("provider", tmp_path, "none")
    service.start()
    assert not refuses(service.port)
    service.kill()
    assert service.port == 0
    with pytest.raises(NETWORK_ERRORS):
        connect(service.port)


def test_a_server_that_cannot_start_names_its_log(tmp_path):
    service = Service("provider", tmp_path, "no such guard")
    with pytest.raises(RuntimeError, match=r"the provider did not start; see .*provider\.log"):
        service.start()
    assert "no such guard" in (tmp_path / "provider.log").read_text()


# A shell without job control starts background jobs that ignore Ctrl-C, and so do their children.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("coatcheck", run_name="__main__")
"""


def test_an_interrupted_demo_ends_its_servers_and_removes_its_files(tmp_path):
    shown: list[str] = []
    demo = subprocess.Popen(
        [sys.executable, "-u", "-c", INTERRUPTIBLE, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with demo:
        deadline = threading.Timer(EXIT_S_MAX, demo.kill)
        deadline.start()
        while not list(tmp_path.glob("coat-*/without-keys/shop.log")) and demo.poll() is None:
            time.sleep(0.01)  # until the deadline kills it
        demo.send_signal(signal.SIGINT)
        shown += demo.communicate(timeout=30)
        deadline.cancel()
    assert demo.returncode == 130
    assert "Traceback" not in "".join(shown)
    assert list(tmp_path.iterdir()) == []


def inside_a_lock():
    """Ctrl-C while a lock is being acquired: another error is raised."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        threading.Lock().release()


def inside_a_finalizer():
    """Ctrl-C where exceptions are dropped."""
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [inside_a_lock, inside_a_finalizer])
def test_an_interrupt_ends_the_demo_wherever_it_came(tmp_path, monkeypatch, interrupt):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "run_story", lambda **_: interrupt())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["demo"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_runs_in_any_thread(tmp_path, monkeypatch):
    """Only the main thread can handle Ctrl-C."""
    codes = []

    def fail(**_):
        raise RuntimeError("the shop did not start")

    monkeypatch.setattr(command, "run_story", fail)
    words = ["demo", "--keep", str(tmp_path / "kept")]
    thread = threading.Thread(target=lambda: codes.append(main(words)))
    thread.start()
    thread.join()
    assert codes == [1]


@pytest.mark.parametrize("words", [["--orders", "0"], ["--orders", "many"], ["--seed", "x"]])
def test_a_wrong_number_is_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", *words])
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_a_directory_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
