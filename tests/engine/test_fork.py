"""Forks: an engine that was made, and used, before the fork works in the parent and in the child.

Each test is a script of its own, because a fork inside a test run copies the test run.
"""

import subprocess
import sys
import textwrap

import pytest

# 40 s: two processes that start, work for some milliseconds and end.
SCRIPT_S_MAX = 40

PREAMBLE = """
import asyncio, os, sys, threading, traceback
from coatcheck import AsyncEngine, Engine, Policy

URL = "sqlite:///" + sys.argv[1]
calls = []

def handler(*args):
    calls.append(args)
    return os.getpid()

async def handler_async(*args):
    return handler(*args)

class Sync:
    def __init__(self, **options):
        self.engine = Engine(URL, **options)
    def run(self, key, function=handler):
        return self.engine.run(key, function, scope="s")
    def close(self):
        self.engine.close()

class Async:
    def __init__(self, **options):
        self.engine = AsyncEngine(URL, **options)
    def run(self, key, function=handler_async):
        return asyncio.run(self.engine.run(key, function, scope="s"))
    def close(self):
        asyncio.run(self.engine.close())

subject = {"sync": Sync, "async": Async}[sys.argv[2]]

def in_child(work):
    '''Fork; the child does *work* and ends; its exit code, and the parent goes on at once.'''
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def ended(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run_script(tmp_path, flavour, script):
    # Newer Pythons warn of forks in processes with threads, which is what these tests are about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning"]
    command += ["-c", PREAMBLE + textwrap.dedent(script)]
    ran = subprocess.run(
        [*command, str(tmp_path / "keys.db"), flavour],
        capture_output=True,
        text=True,
        timeout=SCRIPT_S_MAX,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


@pytest.mark.parametrize("is_used", [False, True], ids=["made before", "used before"])
def test_an_engine_from_before_the_fork_works_in_parent_and_child(tmp_path, flavour, is_used):
    """L1: both guard the same keys, each with connections and threads of its own."""
    script = f"""
        guard = subject()
        if {is_used}:
            guard.run("before")
        def work():
            assert guard.run("child") == os.getpid()
            assert guard.run("child") == os.getpid()
            if {is_used}:
                assert guard.run("before") == os.getppid()
            guard.close()
        child = in_child(work)
        assert guard.run("parent") == os.getpid()
        ended(child)
        assert guard.run("child") == child
        assert guard.run("parent") == os.getpid()
        guard.close()
        print(len(calls))
    """
    assert run_script(tmp_path, flavour, script) == ("2\n" if is_used else "1\n")


def test_a_child_of_a_busy_parent_works(tmp_path, flavour):
    """L1: whatever locks other threads of the parent held at that moment."""
    script = """
        guard = subject()
        stop = threading.Event()
        def busy(name):
            number = 0
            while not stop.is_set():
                guard.run(f"{name}{number}")
                number += 1
        threads = [threading.Thread(target=busy, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        guard.run("warm")
        for number in range(5):
            def work():
                for key in "xyz":
                    assert guard.run(f"{key}{number}") == os.getpid()
                guard.close()
            ended(in_child(work))
        stop.set()
        for thread in threads:
            thread.join()
        guard.close()
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"


def test_what_runs_in_the_parent_is_not_renewed_by_the_child(tmp_path, flavour):
    """L5: the child holds no claims, and its heartbeat is its own."""
    script = """
        guard = subject(policy=Policy(lease="300ms", window="1h"))
        def forks():
            def work():
                assert guard.engine.attempts.heartbeat.leases == {}
                assert guard.run("child") == os.getpid()
                assert guard.engine.attempts.heartbeat._thread.is_alive()
                guard.close()
            ended(in_child(work))
            return "parent"
        async def forks_async():
            return forks()
        guard.run("outer", forks if isinstance(guard, Sync) else forks_async)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("coatcheck-heartbeat") == 1, names
        guard.close()
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"


def test_attempts_of_parent_and_child_never_look_like_one(tmp_path, flavour):
    """L5: an attempt knows itself by its nonce, so no two processes may draw the same ones."""
    script = """
        guard = subject()
        new = lambda: guard.engine.attempts.new_request(b"i", b"", key="k", caller="", label="l")
        new()
        read, write = os.pipe()
        ended(in_child(lambda: os.write(write, repr([new().nonce for _ in range(9)]).encode())))
        theirs = eval(os.read(read, 10_000))
        ours = [new().nonce for _ in range(9)]
        assert len({*ours, *theirs}) == 18
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"


def test_a_child_is_not_locked_out_of_what_the_parent_was_using(tmp_path, flavour):
    """L1: of a store in memory it has a copy, with the lock as it was at that moment."""
    script = """
        import signal
        URL = "memory://"
        guard = subject()
        guard.run("before")
        store = guard.engine.store if isinstance(guard, Sync) else guard.engine.store.blocking
        def work():
            signal.alarm(20)
            assert guard.run("before") == os.getppid()
            assert guard.run("child") == os.getpid()
        with store._mutex, guard.engine.attempts.replay_cache._mutex:
            child = in_child(work)
        ended(child)
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"


def test_a_child_asks_with_threads_of_its_own(tmp_path, flavour):
    """L6: though all of the parent's hang, and one of them was about to end at that moment."""
    script = """
        import signal
        from coatcheck.engine.reconcile_calls import CALLS_MAX, ReconcileCall
        guard = subject()
        calls = guard.engine.attempts.reconcile_calls
        def work():
            signal.alarm(20)
            assert calls.wait(ReconcileCall(os.getpid, 20), None) == os.getpid()
        for _ in range(CALLS_MAX):
            assert calls._free.acquire(blocking=False)
        with calls._free._cond:
            child = in_child(work)
        ended(child)
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"


def test_a_child_that_exits_without_closing_leaves_the_parent_alone(tmp_path, flavour):
    """L1."""
    script = """
        guard = subject()
        guard.run("before")
        ended(in_child(lambda: guard.run("child")))
        assert guard.run("after") == os.getpid()
        assert guard.run("before") == os.getpid()
        guard.close()
        print("done")
    """
    assert run_script(tmp_path, flavour, script) == "done\n"
