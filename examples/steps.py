"""Steps: an order that is charged and shipped, and goes on where an attempt has died.

Run it: python examples/steps.py
"""

import tempfile

import coatcheck
from coatcheck import DidNotHappen, Happened, Operation, current_operation

CHARGED: dict[str, str] = {}  # what the payment provider knows, by our derived keys
SHIPPED: list[str] = []


def charge(amount: int, key: str) -> str:
    """The provider's part: it takes the money, and its answer is lost on the way."""
    CHARGED[key] = f"{amount} from the card"
    raise TimeoutError("the provider did not answer")


def ask_provider(operation: Operation) -> Happened | DidNotHappen:
    """What became of the charge in which an attempt has died."""
    found = CHARGED.get(operation.derive("charge"))
    return Happened(value=found) if found else DidNotHappen()


def place(order: str) -> dict[str, str]:
    """One order: each step is remembered, and a later attempt does not take it again."""
    operation = current_operation()
    assert operation is not None
    operation.note({"about to charge": 30})  # for whoever has to find out later
    charged = operation.step(
        "charge", charge, 30, operation.derive("charge"), at_most_once=True, probe=ask_provider
    )
    operation.step("ship", SHIPPED.append, order)
    return {"order": order, "charged": charged}


def main() -> None:
    """The first attempt dies in the charge; the second one asks, and ships."""
    with (
        tempfile.TemporaryDirectory() as directory,
        coatcheck.Engine(f"sqlite:///{directory}/orders.db") as engine,
    ):
        try:
            engine.run("order-42", place, "42", scope="orders")
        except TimeoutError as error:
            print("first attempt:", error)
        print("second attempt:", engine.run("order-42", place, "42", scope="orders"))
        print("charged", len(CHARGED), "time, shipped", len(SHIPPED), "time")


if __name__ == "__main__":
    main()
