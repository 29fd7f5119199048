"""The crash-window injector: a process that dies when it has charged, and what its retry does.

Run it: python examples/crash.py
"""

import multiprocessing
import tempfile
from pathlib import Path

from coatcheck import Engine, Policy, open_store
from coatcheck.verify import crash

# 1 s: as long as the retry must wait for the lease of the dead.
POLICY = Policy(lease="1s", wait="10s")


def charge(ledger: str) -> str:
    """The effect: a line in a file, where nobody can undo it."""
    with Path(ledger).open("a") as file:
        file.write("charged\n")
    return "done"


def die(url: str, ledger: str) -> None:
    """In a process of its own: killed as soon as the effect has happened."""
    injector = crash.Injector("after effect", crash.kill)
    engine = Engine(injector.store(open_store(url)), POLICY)  # around the store,
    effect = injector.effect(charge)  # and around the effect
    engine.run("order-42", lambda: effect(ledger), scope="orders")


def main() -> None:
    """Kill it, ask again, and count."""
    with tempfile.TemporaryDirectory() as directory:
        url, ledger = f"sqlite:///{directory}/orders.db", f"{directory}/ledger"
        process = multiprocessing.get_context("spawn").Process(target=die, args=(url, ledger))
        process.start()
        process.join()
        print("it ended with", process.exitcode)
        with Engine(url, POLICY) as engine:
            print("the retry:", engine.run("order-42", lambda: charge(ledger), scope="orders"))
        print("charged", len(Path(ledger).read_text().splitlines()), "times")


if __name__ == "__main__":
    main()
