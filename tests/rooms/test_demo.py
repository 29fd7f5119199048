"""The demo: it tells the truth, it can fail, and it leaves nothing behind.

One whole story with few orders is told for all tests of its outcome, because it takes seconds.
"""

import io
import json
import os
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
from coatcheck.cli.demo import DEMO_SEED
from coatcheck.demo import command
from coatcheck.demo.client import Receipt
from coatcheck.demo.display import Display
from coatcheck.demo.fates import draw
from coatcheck.demo.processes import Service
from coatcheck.demo.provider import charges_in
from coatcheck.demo.tally import count
from coatcheck.demo.wire import BROKEN, Answer, connect, exchange

ORDERS = 20

# 10 s for what takes a tenth of one; who needs longer has not noticed that its parent is gone.
GONE_S_MAX = 10.0


class Told:
    """One story: what was printed, and what it means."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.shown = done.stderr
        self.facts = json.loads(done.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Told:
    keep = tmp_path_factory.mktemp("demo") / "kept here"
    arguments = ["demo", "--orders", str(ORDERS), "--json", "--keep", str(keep)]
    return Told(
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


def test_with_keys_every_order_is_charged_exactly_once(told):
    """L1, L5: lost answers, requests at the same instant and a kill -9, and not one charge twice."""
    tally = told.facts["with_coatcheck"]
    assert tally["broken"] == []
    assert (told.code, told.facts["promise_held"]) == (0, True)
    assert (tally["charges"], tally["double_charged"], tally["overcharged_cents"]) == (ORDERS, 0, 0)
    charged = charges_in(Path(told.facts["directory"]))
    assert sorted(charged) == [(order.name, order.cents) for order in draw(ORDERS, DEMO_SEED)]


def test_without_keys_the_same_orders_are_charged_twice(told):
    tally = told.facts["without_keys"]
    assert tally["double_charged"] > 0
    assert tally["overcharged_cents"] > 0
    assert tally["charges"] > ORDERS
    charged = charges_in(Path(told.facts["directory"]) / "without-keys")
    assert len(charged) == tally["charges"]


def test_both_halves_meet_the_same_fates(told):
    left, right = told.facts["without_keys"], told.facts["with_coatcheck"]
    assert left["repeated"] == right["repeated"] > 0
    assert min(left["answers_lost"], right["answers_lost"]) > 0
    assert left["kills"] == right["kills"] == 1
    assert min(left["requests"], right["requests"]) > ORDERS


def test_the_killed_order_is_taken_over_and_can_be_looked_up(told, capsys):
    """K5, L5: the reference that the demo shows leads to the operation."""
    witness = told.facts["witness"]
    assert witness["attempt"] >= 2
    words = shlex.split(witness["lookup"])
    assert main(words[words.index("lookup") :]) == 0
    shown = capsys.readouterr().out
    assert witness["reference"] in shown
    assert "POST /orders" in shown
    assert "status 201" in shown
    assert "N-" not in shown  # the order number is in the body, which is nobody's business


def test_progress_goes_beside_the_document_and_without_escapes(told):
    assert "with coatcheck" in told.shown
    assert "orders charged twice or more" in told.shown
    assert "\x1b" not in told.shown


def test_a_guard_that_forgets_is_found_out(tmp_path, capsys):
    """L1: the demo can fail; without this it would prove nothing."""
    code = command.run(
        orders=8, seed=DEMO_SEED, keep=tmp_path / "kept", as_json=False, guard="forgetful"
    )
    shown = capsys.readouterr().out
    assert code == 1
    assert f"The promise did not hold (seed {DEMO_SEED})" in shown
    assert "charged more than once (order-0" in shown
    assert "Every order was charged exactly once" not in shown
    charged = [name for name, _cents in charges_in(tmp_path / "kept")]
    assert len(charged) > len(set(charged))


# ---------------------------------------------------------------------------------------- fates


def test_the_same_seed_draws_the_same_fates():
    assert draw(50, 1) == draw(50, 1)
    assert draw(50, 1) != draw(50, 2)
    assert draw(50, 1)[:20] == draw(20, 1)


def test_a_third_of_the_answers_is_lost():
    answers = [is_lost for order in draw(3_000, DEMO_SEED) for is_lost in order.losses]
    assert sum(answers) / len(answers) == pytest.approx(1 / 3, abs=0.02)


# -------------------------------------------------------------------------------------- counting


def receipts_of(orders):
    return [
        Receipt(order, requests=1, answers=1, numbers={f"N-{order.name}"}, is_confirmed=True)
        for order in orders
    ]


def broken_by(change) -> list[str]:
    """What the tally says of three good orders, after *change* has done harm to one of them."""
    orders = draw(3, 1)
    receipts = receipts_of(orders)
    charges = [(order.name, order.cents) for order in orders]
    change(receipts, charges)
    return list(count(receipts, charges, kills=0, seconds=1.0).broken)


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
def test_every_way_to_break_the_promise_is_reported(change, sentence):
    assert broken_by(change) == [sentence]


def test_orders_charged_once_and_confirmed_once_break_nothing():
    assert broken_by(lambda _receipts, _charges: None) == []


def test_overcharged_money_is_what_was_taken_beyond_the_orders():
    orders = draw(2, 1)
    charges = [(orders[0].name, orders[0].cents)] * 3 + [(orders[1].name, orders[1].cents)]
    tally = count(receipts_of(orders), charges, kills=1, seconds=1.0)
    assert tally.overcharged_cents == 2 * orders[0].cents
    assert (tally.double_charged, tally.charges) == (1, 4)


# --------------------------------------------------------------------------------------- display


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_line_that_fits_and_is_drawn_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Display(stream).progress("without keys", 10, 20, note="a note that is longer than the line")
    drawn = stream.getvalue().removeprefix("\r\x1b[2K")
    assert "10 of 20" in drawn
    assert len(drawn) < 60
    assert "\n" not in drawn


def test_a_file_gets_whole_lines_in_its_own_encoding():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = Display(stream)
    display.open(orders=3, seed=1)
    display.progress("without keys", 1, 3)
    tally = count(receipts_of(draw(3, 1)), [], kills=0, seconds=1.0)
    display.finish("without keys", tally)
    shown = raw.getvalue().decode("ascii")
    assert "\r" not in shown
    assert "without keys    ####" in shown


# -------------------------------------------------------------------------------------- the wire

WHOLE = b"HTTP/1.0 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def answer_to(said: bytes) -> Answer:
    """What the client makes of a server that says *said* and is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            caller, _address = listener.accept()
            with caller, caller.makefile("rb") as asked:
                while asked.readline().strip():
                    pass
                asked.read(2)  # the body; closing with unread bytes would reset the connection
                caller.sendall(said)

        server = threading.Thread(target=speak)
        server.start()
        try:
            with closing(connect(listener.getsockname()[1])) as connection:
                return exchange(connection, "/orders", {}, "k-1")
        finally:
            server.join(10)


def test_an_answer_that_is_cut_off_anywhere_is_no_answer():
    """A kill -9 between two writes of a server leaves a status that says 201, and nothing more."""
    assert answer_to(WHOLE).status == 201
    for end in range(len(WHOLE)):
        with pytest.raises(BROKEN):
            answer_to(WHOLE[:end])


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
    deadline = time.monotonic() + GONE_S_MAX
    while not refuses(port) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert refuses(port)


def test_a_server_that_cannot_start_says_where_to_look(tmp_path):
    service = Service("provider", tmp_path, "no such guard")
    with pytest.raises(RuntimeError, match=r"the provider did not start; see .*provider\.log"):
        service.start()
    assert "no such guard" in (tmp_path / "provider.log").read_text()


# A shell without job control has what runs behind ignore Ctrl-C, and so do all that that starts.
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
        deadline = threading.Timer(GONE_S_MAX, demo.kill)
        deadline.start()
        while not list(tmp_path.glob("coat-*/without-keys/shop.log")) and demo.poll() is None:
            time.sleep(0.01)  # until the deadline kills it
        demo.send_signal(signal.SIGINT)
        shown += demo.communicate(timeout=30)
        deadline.cancel()
    assert demo.returncode == 130
    assert "Traceback" not in "".join(shown)
    assert list(tmp_path.iterdir()) == []


def within_a_lock():
    """Ctrl-C, when a lock is taken and not noted as taken yet."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        threading.Lock().release()


def within_a_finalizer():
    """Ctrl-C, where whatever is raised goes no further."""
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [within_a_lock, within_a_finalizer])
def test_an_interrupt_counts_wherever_it_came(tmp_path, monkeypatch, interrupt):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "tell", lambda **_: interrupt())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["demo"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_may_be_told_in_any_thread(tmp_path, monkeypatch):
    """Only the first thread of a process is told of Ctrl-C."""
    codes = []

    def fail(**_):
        raise RuntimeError("the shop did not start")

    monkeypatch.setattr(command, "tell", fail)
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


def test_a_directory_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
