"""Roll out coatcheck in an application that runs already: observe, then guard one route.

Run it: python examples/rollout.py
"""

import asyncio
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import httpx
from fastapi import FastAPI

from coatcheck import AsyncEngine, Decision, Policy
from coatcheck.server.fastapi import IdempotencyMiddleware, idempotent

app = FastAPI()
charges: list[int] = []


@app.post("/orders", status_code=201)
async def order(order: dict[str, int]) -> dict[str, int]:
    return order


@app.post("/charges", status_code=201)
@idempotent(mode="record", required=True)
async def charge(charge: dict[str, int]) -> dict[str, int]:
    charges.append(charge["cents"])
    return {"charge": len(charges)}


@app.post("/views", status_code=201)
@idempotent(mode="record", on_outage="execute")
async def view() -> None:
    """A page view: counted twice during an outage does less harm than not at all."""


def guard(decisions: Queue[Decision], switch: Path) -> AsyncEngine:
    """Add the middleware: it observes every route that says nothing else."""
    policy = Policy(mode="observe")
    engine = AsyncEngine("memory://", policy, observers=[decisions.put])
    app.add_middleware(IdempotencyMiddleware, engine=engine, disabled_by=switch)
    return engine


async def main() -> None:
    """Send requests to both routes, and then switch one of them off."""
    decisions: Queue[Decision] = Queue()
    with TemporaryDirectory() as directory:
        switch = Path(directory, "coatcheck.off")
        engine = guard(decisions, switch)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def send(path: str, key: str, cents: int) -> int:
                headers = {"Idempotency-Key": key} if key else {}
                response = await client.post(path, json={"cents": cents}, headers=headers)
                return response.status_code

            for path, key, cents in (
                *(("/orders", "k-1", 5), ("/orders", "k-1", 5), ("/orders", "k-1", 6)),
                *(("/charges", "", 5), ("/charges", "k-1", 5), ("/charges", "k-1", 5)),
            ):
                status = await send(path, key, cents)
                decision = await asyncio.to_thread(decisions.get, timeout=5)
                print(status, decision.label, decision.outcome, decision.code)

            await asyncio.to_thread(switch.write_text, "POST /charges\n")
            await asyncio.sleep(1.1)  # the file is read again after a second
            print(await send("/charges", "k-1", 5), f"{len(charges)} charges")
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
