"""Work that takes longer than a client should wait: a 202 first, the result by polling.

Run it: uvicorn examples.long_work:app

    curl -i -X POST localhost:8000/reports -H 'Idempotency-Key: r-1' -H 'Content-Type: …' -d '…'
    curl -i localhost:8000/idempotency/operations/…        # the Location of that response
"""

import asyncio

from fastapi import FastAPI
from pydantic import BaseModel

import coatcheck
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

engine = coatcheck.AsyncEngine("sqlite:///work.db", secret="the same on every node")
app = FastAPI()
app.add_middleware(IdempotencyMiddleware, engine=engine)

# Stands for your own queue: RabbitMQ, SQS, a table.
queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()


class Report(BaseModel):
    """Title and length of a report."""

    title: str
    pages: int


@app.post("/reports", status_code=201)
@idempotent(in_flight="202", required=True)
async def write_report(report: Report, operation: CurrentOperation) -> dict[str, str]:
    """Send the 202 at once, and continue in this process."""
    await operation.accept()
    for page in range(report.pages):
        await asyncio.sleep(0.01)  # the work
        await operation.progress((page + 1) / report.pages, f"page {page + 1}")
    return {"report": report.title}


@app.post("/films")
@idempotent(in_flight="202", required=True)
async def cut_film(film: Report, operation: CurrentOperation) -> None:
    """Put the work into a queue; a worker has ten minutes to take it."""
    token = await operation.defer(lease="10m")
    await queue.put((token, film.title))


async def work_off_one() -> coatcheck.Response:
    """Runs in the worker: the film is cut once, however often the queue delivers the message."""
    token, title = await queue.get()
    return await engine.run_deferred(token, cut, title)


async def cut(title: str) -> coatcheck.Happened:
    """Do the work and return the response for the client."""
    return coatcheck.Happened(201, [("Content-Type", "text/plain")], f"{title}, cut".encode())
