"""The shop: POST /orders charges through the provider and confirms the order.

    python -m coatcheck.demo.shop DIRECTORY GUARD PROVIDER_PORT

Where it is guarded it passes a key of its own to the provider, `operation.derive("charge")`: the
same for every attempt at one order. So when the shop dies between charge and confirmation, the
attempt that takes over gets the charge that was made, not a second one.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import coatcheck
from coatcheck.demo.serving import endpoint, guarded, serve
from coatcheck.demo.wire import BROKEN, Answer, connect, exchange

DATABASE = "shop.db"

# 20 ms to write the confirmation. The money is taken and the customer does not know it: this is
# the moment in which a crash hurts.
CONFIRM_S = 0.02
# 1.5 s: how long the orders of a killed shop wait before somebody takes over. Short, because the
# demo is; the shop renews it three times in that span, and who loses it all the same loses nothing.
LEASE = "1.5s"


def main(directory: Path, guard: str, provider_port: int) -> None:
    """Serve POST /orders."""

    def order(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            charged = _charge(provider_port, asked)
        except BROKEN:
            return 502, {"detail": "the payment provider could not be reached"}
        if charged.status != 201:
            return 502, {"detail": f"the payment provider answered {charged.status}"}
        time.sleep(CONFIRM_S)
        # Drawn by chance: an order that is executed twice gives itself away by two numbers.
        number = f"N-{secrets.token_hex(4).upper()}"
        return 201, {"number": number, "order": asked["order"], **charged.document}

    serve(guarded(endpoint("/orders", order), guard, directory / DATABASE, lease=LEASE))


def _charge(provider_port: int, asked: dict[str, Any]) -> Answer:
    operation = coatcheck.current_operation()
    key = None if operation is None else operation.derive("charge")
    with closing(connect(provider_port)) as connection:
        return exchange(connection, "/charges", asked, key)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
