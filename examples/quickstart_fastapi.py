from fastapi import FastAPI

from coatcheck.server.fastapi import IdempotencyMiddleware

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")
orders: list[dict[str, str]] = []


@app.post("/orders", status_code=201)
async def place(order: dict[str, str]) -> dict[str, str | int]:
    orders.append(order)
    return {"number": len(orders), **order}
