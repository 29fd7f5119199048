"""Steps: an order is charged and shipped, and a retry continues where an attempt has failed.

Run it: python examples/steps.py
"""

import tempfile

import coatcheck
from coatcheck import DidNotHappen, Happened, Operation, current_operation

CHARGED: dict[str, str] = {}  # the payment provider's data, by our derived keys
SHIPPED: list[str] = []


def charge(amount: int, key: str) -> str:
    """Stands for the provider: it takes the money, but its response is lost."""
    CHARGED[key] = f"{amount} from the card"
    raise TimeoutError("the provider did not answer")


def ask_provider(operation: Operation) -> Happened | DidNotHappen:
    """Find the outcome of a charge during which an attempt has failed."""
    found = CHARGED.get(operation.derive("charge"))
    return Happened(value=found) if found else DidNotHappen()


def place(order: str) -> dict[str, str]:
    """Place one order; a later attempt does not repeat a step that was completed."""
    operation = current_operation()
    assert operation is not None
    operation.note({"about to charge": 30})  # for operators, if this ends in doubt
    charged = operation.step(
        "charge", charge, 30, operation.derive("charge"), at_most_once=True, probe=ask_provider
    )
    operation.step("ship", SHIPPED.append, order)
    return {"order": order, "charged": charged}


def main() -> None:
    """Fail in the charge; the second attempt queries the provider, and ships."""
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
