"""One charge, four providers: which recovery a payment route needs depends on its provider.

Run it: python examples/payments.py
Each provider takes the money, but its response is lost; the client retries with the same key.
"""

import asyncio
import json
import tempfile
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

import coatcheck
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent


class Charge(BaseModel):
    """What the client sends."""

    cents: int


class Provider:
    """Does not answer the first call. With *knows_keys*, calls with one key are one charge."""

    def __init__(self, *, knows_keys: bool = False) -> None:
        self.charges: list[dict[str, Any]] = []
        self._knows_keys = knows_keys
        self._fails = True

    async def charge(self, cents: int, key: str = "") -> dict[str, Any]:
        """Take the money."""
        found = await self.find(key) if self._knows_keys else None
        if found is None:
            found = {"charge": len(self.charges) + 1, "cents": cents, "key": key}
            self.charges.append(found)
        if self._fails:
            self._fails = False
            raise TimeoutError("the provider did not answer")
        return found

    async def find(self, key: str) -> dict[str, Any] | None:
        """The charge that was made under *key*."""
        return next((charge for charge in self.charges if charge["key"] == key), None)


card, bank, terminal, shop = Provider(knows_keys=True), Provider(), Provider(), Provider()
shipped: list[int] = []
app = FastAPI()


# The provider accepts an idempotency key: run the handler again, with a derived key.
@app.post("/cards", status_code=201)
@idempotent(recovery="retry")
async def charge_card(charge: Charge, operation: CurrentOperation) -> dict[str, Any]:
    return await card.charge(charge.cents, key=operation.derive("charge"))


# The provider accepts no key, but can be queried: query it before the handler runs again.
async def ask_bank(operation: coatcheck.Operation) -> coatcheck.Happened | coatcheck.DidNotHappen:
    found = await bank.find(operation.derive("charge"))
    if found is None:
        return coatcheck.DidNotHappen()
    headers = [("content-type", "application/json")]
    return coatcheck.Happened(201, headers, json.dumps(found).encode())


@app.post("/transfers", status_code=201)
@idempotent(recovery="reconcile", reconcile=ask_bank)
async def transfer(charge: Charge, operation: CurrentOperation) -> dict[str, Any]:
    return await bank.charge(charge.cents, key=operation.derive("charge"))


# The provider accepts no key and cannot be queried: a person decides.
@app.post("/terminals", status_code=201)
@idempotent(recovery="manual")
async def charge_at_terminal(charge: Charge) -> dict[str, Any]:
    return await terminal.charge(charge.cents)


# Several effects: each is a step, and each is recovered in its own way.
async def ask_shop(operation: coatcheck.Operation) -> coatcheck.Happened | coatcheck.DidNotHappen:
    found = await shop.find(operation.derive("charge"))
    return coatcheck.DidNotHappen() if found is None else coatcheck.Happened(value=found)


@app.post("/orders", status_code=201)
@idempotent(recovery="retry")
async def order(charge: Charge, operation: CurrentOperation) -> dict[str, Any]:
    key = operation.derive("charge")
    paid = await operation.step(
        "charge", shop.charge, charge.cents, key, at_most_once=True, probe=ask_shop
    )
    await operation.step("ship", shipped.append, paid["charge"])
    return {"paid": paid["cents"]}


async def main() -> None:
    """Send each charge twice with one key; then resolve the terminal's by hand."""
    with tempfile.TemporaryDirectory() as directory:
        engine = coatcheck.AsyncEngine(f"sqlite:///{directory}/payments.db", "payments")
        app.add_middleware(IdempotencyMiddleware, engine=engine)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def post(path: str) -> httpx.Response:
                return await client.post(
                    path, json={"cents": 500}, headers={"Idempotency-Key": "k"}
                )

            for path in ("/cards", "/transfers", "/orders", "/terminals"):
                first, second = await post(path), await post(path)
                print(path, first.status_code, second.status_code, second.json().get("code", ""))
            reference = second.headers["Idempotency-Reference"]
            receipt = coatcheck.Happened(201, [("content-type", "text/plain")], b"receipt 17")
            await engine.resolve(reference, receipt, by="ada", why="receipt 17 is on the roll")
            print("/terminals", (await post("/terminals")).text)
        await engine.close()
    money = [len(provider.charges) for provider in (card, bank, terminal, shop)]
    print("charges:", *money, "shipped:", len(shipped))


if __name__ == "__main__":
    asyncio.run(main())
