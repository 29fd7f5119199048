"""In doubt: operations whose outcome is unknown, and how to resolve them.

Run it: python examples/in_doubt.py
"""

import tempfile
from contextlib import suppress

import coatcheck
from coatcheck import DidNotHappen, Happened, Operation, current_operation
from coatcheck.core.record import IN_DOUBT
from coatcheck.stores import Query

is_answering = False


def charge(order: str) -> str:
    """Charge at a provider that accepts no key and cannot be queried."""
    operation = current_operation()
    assert operation is not None
    operation.note({"about to charge": order})
    if not is_answering:
        raise TimeoutError("the provider did not answer")
    return f"charged for {order}"


def find_doubts(engine: coatcheck.Engine) -> dict[str, str]:
    """Print everything that is in doubt, with its notes; return the references by key."""
    found = [Operation(record) for record in engine.store.find(Query(state=IN_DOUBT)).records]
    for operation in sorted(found, key=lambda operation: operation.key):
        print(operation, [note.what for note in operation.notes])
    return {operation.key: operation.reference for operation in found}


def main() -> None:
    """Leave three charges in doubt, and resolve each in another way."""
    global is_answering  # noqa: PLW0603 - the provider answers again
    with (
        tempfile.TemporaryDirectory() as directory,
        coatcheck.Engine(f"sqlite:///{directory}/charges.db", "payments") as engine,
    ):
        for order in ("41", "42", "43"):
            with suppress(TimeoutError):
                engine.run(order, charge, order, scope="charges")
        is_answering = True
        doubts = find_doubts(engine)
        engine.resolve(doubts["41"], Happened(value="charge 7"), by="ada", why="in the bank list")
        engine.resolve(doubts["42"], DidNotHappen(), by="ada", why="not in the bank list")
        engine.rerun(doubts["43"], charge, "43, by hand", by="ada", why="the provider lost it")
        for order in ("41", "42", "43"):
            print(order, engine.run(order, charge, order, scope="charges"))


if __name__ == "__main__":
    main()
