"""Metrics for Prometheus, on a page of the application itself."""

from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from coatcheck import AsyncEngine
from coatcheck.metrics import prometheus
from coatcheck.server.starlette import IdempotencyMiddleware


async def place(request: Request) -> JSONResponse:
    return JSONResponse(await request.json(), status_code=201)


engine = AsyncEngine("memory://")
prometheus.instrument(engine)

routes = [Route("/orders/{shop}", place, methods=["POST"]), Mount("/metrics", make_asgi_app())]
app = Starlette(routes=routes)
app.add_middleware(IdempotencyMiddleware, engine=engine)


if __name__ == "__main__":
    with TestClient(app) as client:
        for shop, item in (("17", "coat"), ("17", "coat"), ("17", "hat"), ("18", "coat")):
            headers = {"Idempotency-Key": f"order-of-{shop}"}
            client.post(f"/orders/{shop}", json={"item": item}, headers=headers)
        for line in client.get("/metrics/").text.splitlines():
            if line.startswith(("coatcheck_decisions_total", "coatcheck_in_flight")):
                print(line)
