"""The crash injector: a process is killed right after its effect, and the request is retried.

Run it: python examples/crash.py
"""

import multiprocessing
import tempfile
from pathlib import Path

from coatcheck import Engine, Policy, open_store
from coatcheck.verify import crash

# 1 s: the retry has to wait until the lease of the killed process expires.
POLICY = Policy(lease="1s", wait="10s")


def charge(ledger: str) -> str:
    """The effect: a line in a file, which is not rolled back."""
    with Path(ledger).open("a") as file:
        file.write("charged\n")
    return "done"


def die(url: str, ledger: str) -> None:
    """Run in a process of its own, which is killed right after the effect."""
    injector = crash.Injector("after effect", crash.kill)
    engine = Engine(injector.store(open_store(url)), POLICY)  # wraps the store,
    effect = injector.effect(charge)  # and the effect
    engine.run("order-42", lambda: effect(ledger), scope="orders")


def main() -> None:
    """Kill the process, retry, and count the effects."""
    with tempfile.TemporaryDirectory() as directory:
        url, ledger = f"sqlite:///{directory}/orders.db", f"{directory}/ledger"
        process = multiprocessing.get_context("spawn").Process(target=die, args=(url, ledger))
        process.start()
        process.join()
        print("the process ended with", process.exitcode)
        with Engine(url, POLICY) as engine:
            print(
                "the retry returned:",
                engine.run("order-42", lambda: charge(ledger), scope="orders"),
            )
        print("charged", len(Path(ledger).read_text().splitlines()), "times")


if __name__ == "__main__":
    main()
