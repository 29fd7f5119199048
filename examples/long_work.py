"""Work that takes longer than a client should wait: 202 first, and the result where one asks.

Run it: uvicorn examples.long_work:app

    curl -i -X POST localhost:8000/reports -H 'Idempotency-Key: r-1' -H 'Content-Type: …' -d '…'
    curl -i localhost:8000/idempotency/operations/…        # the Location of that answer
"""

import asyncio

from fastapi import FastAPI
from pydantic import BaseModel

import coatcheck
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

engine = coatcheck.AsyncEngine("sqlite:///work.db", secret="the same on every node")
app = FastAPI()
app.add_middleware(IdempotencyMiddleware, engine=engine)

# Your own queue, whatever it is: RabbitMQ, SQS, a table.
queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()


class Report(BaseModel):
    """What is to be written."""

    title: str
    pages: int


@app.post("/reports", status_code=201)
@idempotent(in_flight="202", required=True)
async def write_report(report: Report, operation: CurrentOperation) -> dict[str, str]:
    """Answer at once, and go on in this process."""
    await operation.accept()
    for page in range(report.pages):
        await asyncio.sleep(0.01)  # the work
        await operation.progress((page + 1) / report.pages, f"page {page + 1}")
    return {"report": report.title}


@app.post("/films")
@idempotent(in_flight="202", required=True)
async def cut_film(film: Report, operation: CurrentOperation) -> None:
    """Give the work to a queue; kept for ten minutes, until a worker takes it."""
    handed = await operation.hand_over(lease="10m")
    await queue.put((handed, film.title))


async def work_off_one() -> coatcheck.Response:
    """In the worker: the film is cut once, however often the queue delivers it."""
    handed, title = await queue.get()
    return await engine.resume(handed, cut, title)


async def cut(title: str) -> coatcheck.Happened:
    """Do the work; what is returned is what the client is served."""
    return coatcheck.Happened(201, [("Content-Type", "text/plain")], f"{title}, cut".encode())
