"""How does coatcheck compare with the idempotency utility of Powertools for AWS Lambda?

On Redis by rate: Powertools is sync, so both run in 64 threads, and redis-py alone is the floor. On
DynamoDB by the number of requests, which are what AWS bills; moto's speed says nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any, TypeAlias
from unittest.mock import patch

import boto3
import redis
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)
from aws_lambda_powertools.utilities.idempotency.persistence.base import BasePersistenceLayer
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from botocore.httpsession import URLLib3Session

from benchmarks.comparison import (
    AT_A_TIME,
    DAY_MS,
    RESPONSE,
    ROUNDS,
    SLOT_S,
    SLOT_S_QUICK,
    place_sync,
)
from benchmarks.measuring import ROUNDS_QUICK, For, Samples, Slot, drive_threads, interleave
from benchmarks.report import TIMES, Row, Table
from coatcheck import Engine
from tests.support.servers.dynamodb import Dynamodb
from tests.support.servers.redis import Redis

Operation: TypeAlias = Callable[[int], object]
Contender: TypeAlias = Callable[[], AbstractContextManager[Operation]]

# A few are enough, because each takes the same number of requests.
KEYS = 32
# The second time, another engine replays the same keys.
COUNTED = ("claim and completion", "a cold replay")
# The region and the credentials for moto, which checks neither.
STAND_IN: dict[str, Any] = {
    "region_name": "eu-west-1",
    "aws_access_key_id": "unused",
    "aws_secret_access_key": "unused",
}

_numbers = count()


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    # Powertools warns that it does not run in a Lambda.
    warnings.filterwarnings("ignore", message="Couldn't determine the remaining time left")
    server = Redis()
    contenders: dict[str, Contender] = {
        "product": lambda: _product(f"{server.url}?prefix=bench{next(_numbers)}:"),
        "Powertools": partial(_powertools_on_redis, server.url),
        "redis-py": partial(_redis_py, server.url),
    }
    wall_s, rounds = (SLOT_S_QUICK, ROUNDS_QUICK) if quick else (SLOT_S, ROUNDS)
    try:
        slots = {name: _slot(make, wall_s) for name, make in contenders.items()}
        rows = _rows_of_speed(interleave(slots, rounds))
    finally:
        server.remove()
    stand_in = Dynamodb()
    try:
        rows += _rows_of_requests(stand_in)
    finally:
        stand_in.remove()
    return Table(
        name="powertools",
        question="keyed operations beside Powertools for AWS Lambda",
        rows=rows,
        notes=[
            f"Powertools {version('aws-lambda-powertools')}, in the column of the floor",
            "Redis with appendfsync everysec, both in 64 threads of one process",
            "DynamoDB is moto's server: requests are counted, time is not measured",
        ],
    )


def _rows_of_speed(found: dict[str, Samples]) -> list[Row]:
    ours, theirs, bare = found["product"], found["Powertools"], found["redis-py"]
    faster = ours.over(theirs)
    what = f"new keys on Redis, {AT_A_TIME} threads, operations/s"
    return [
        Row(
            what=f"{what}; floor: Powertools",
            product=ours,
            floor=theirs,
            ratios=[(f"{TIMES} Powertools", faster)],
        ),
        Row(
            what=f"{what}; floor: redis-py",
            product=ours,
            floor=bare,
            ratios=[(f"{TIMES} redis-py", ours.over(bare))],
        ),
    ]


def _slot(make: Contender, wall_s: float) -> Slot:
    def slot() -> float:
        with make() as operation:
            # Not measured: connecting and importing.
            drive_threads(operation, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
            return drive_threads(operation, For(wall_s), at_a_time=AT_A_TIME).per_second

    return slot


# --- requests ---------------------------------------------------------------------------------


def _rows_of_requests(stand_in: Dynamodb) -> list[Row]:
    url = stand_in.fresh_url()
    ours = _requests_of(lambda: _product(url))
    theirs = _requests_of(partial(_powertools_on_dynamodb, stand_in))
    return [
        Row(
            what=f"DynamoDB, requests for {counted}; floor: Powertools",
            product=Samples((ours[counted],)),
            floor=Samples((theirs[counted],)),
        )
        for counted in COUNTED
    ]


def _requests_of(make: Contender) -> dict[str, float]:
    """Return the requests per operation: the first time, and for another engine later."""
    found: dict[str, float] = {}
    for counted in COUNTED:
        with make() as operation:
            operation(-1)  # creates the table and reads the clock
            with _counted() as requests:
                drive_threads(operation, iter(range(KEYS)), at_a_time=KEYS)
        found[counted] = len(requests) / KEYS
    return found


@contextmanager
def _counted() -> Iterator[list[object]]:
    """Collect every request that botocore sends, including retries."""
    sent: list[object] = []
    send = URLLib3Session.send

    def counting(self: Any, request: Any) -> Any:  # noqa: ANN401 - as in the driver
        sent.append(request)
        return send(self, request)

    with patch.object(URLLib3Session, "send", counting):
        yield sent


# --- the contenders ---------------------------------------------------------------------------


@contextmanager
def _product(url: str) -> Iterator[Operation]:
    with Engine(url) as engine:
        yield lambda number: engine.run(f"order-{number}", place_sync, number, scope="orders")


def _guarded(layer: BasePersistenceLayer, prefix: str) -> Operation:
    def place(*, order: dict[str, int]) -> dict[str, object]:
        return place_sync(order["number"])

    guarded: Any = idempotent_function(
        place,
        data_keyword_argument="order",
        persistence_store=layer,
        config=IdempotencyConfig(expires_after_seconds=DAY_MS // 1_000),
        key_prefix=prefix,
    )
    return lambda number: guarded(order={"number": number})


@contextmanager
def _powertools_on_redis(url: str) -> Iterator[Operation]:
    client: Any
    with closing(redis.Redis.from_url(url, decode_responses=True)) as client:
        yield _guarded(CachePersistenceLayer(client=client), f"bench{next(_numbers)}")


@contextmanager
def _powertools_on_dynamodb(stand_in: Dynamodb) -> Iterator[Operation]:
    endpoint = f"http://127.0.0.1:{stand_in.port}"
    client: Any = boto3.client("dynamodb", endpoint_url=endpoint, **STAND_IN)
    if "powertools" not in client.list_tables()["TableNames"]:
        client.create_table(
            TableName="powertools",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
    yield _guarded(DynamoDBPersistenceLayer("powertools", boto3_client=client), "orders")
    client.close()


@contextmanager
def _redis_py(url: str) -> Iterator[Operation]:
    prefix = f"driver{next(_numbers)}:"
    with closing(redis.Redis.from_url(url)) as client:

        def operation(number: int) -> None:
            id = f"{prefix}order-{number}"
            client.set(id, b"fingerprint", nx=True, px=DAY_MS)
            place_sync(number)
            client.set(id, RESPONSE, px=DAY_MS)

        yield operation
