"""FastAPI, one route at a time: the policy is declared at the route."""

from fastapi import FastAPI
from pydantic import BaseModel

from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///charges.db")


class Charge(BaseModel):
    """How much to charge."""

    amount: int
    currency: str


@app.post("/charges", status_code=201)
@idempotent(required=True, window="72h", recovery="manual")
async def charge(body: Charge, operation: CurrentOperation) -> dict[str, object]:
    """Charge once, however often the request is sent."""
    # The key for the payment provider: the same in every attempt of this operation.
    provider_key = operation.derive("charge")
    return {"amount": body.amount, "provider_key": provider_key, "see": operation.reference}
