"""One route at a time, with FastAPI: the policy is beside the route it guards."""

from fastapi import FastAPI
from pydantic import BaseModel

from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///charges.db")


class Charge(BaseModel):
    """What is to be paid."""

    amount: int
    currency: str


@app.post("/charges", status_code=201)
@idempotent(required=True, window="72h", recovery="manual")
async def charge(body: Charge, operation: CurrentOperation) -> dict[str, object]:
    """Charge once, however often the request is sent."""
    # The provider gets a key of its own, the same in every attempt of this operation.
    provider_key = operation.derive("charge")
    return {"amount": body.amount, "provider_key": provider_key, "see": operation.reference}
