"""The laws of all brokers: whatever is killed, each event has its effect once (E1)."""

from __future__ import annotations

from functools import partial

import pytest

from tests.consumer import (
    test_faststream,
    test_kafka,
    test_nats,
    test_rabbitmq,
    test_redis_streams,
    test_sqs,
)
from tests.consumer.crashes import no_crash_loses_or_repeats_an_effect
from tests.consumer.law import Ledger, each_event_has_its_effect_once
from tests.support.servers.postgres import postgres

SOURCES = {
    "rabbitmq": test_rabbitmq.source,
    "nats": test_nats.source,
    "redis_streams": test_redis_streams.source,
    "kafka": partial(test_kafka.source, "kafka"),
    "aiokafka": partial(test_kafka.source, "aiokafka"),
    "sqs": test_sqs.source,
    "faststream": test_faststream.source,
}


@pytest.fixture(params=SOURCES)
def source(request):
    """A queue of each broker."""
    return SOURCES[request.param]()


@pytest.fixture
def on_sqlite(tmp_path):
    return Ledger(f"sqlite:///{tmp_path}/ledger.db")


@pytest.fixture
def on_postgres():
    return Ledger(postgres().fresh_database())


def test_a_worker_that_dies_at_any_point_loses_no_message(source, on_sqlite):
    no_crash_loses_or_repeats_an_effect(source, on_sqlite)


@pytest.mark.timeout(1_000)
def test_each_event_has_its_effect_once_although_workers_are_killed(source, on_sqlite):
    each_event_has_its_effect_once(source, on_sqlite)


# One broker: what a handler does in its transaction is the same for all.
@pytest.mark.parametrize("source", ["rabbitmq"], indirect=True)
def test_on_postgresql_a_worker_that_dies_at_any_point_loses_no_message(source, on_postgres):
    no_crash_loses_or_repeats_an_effect(source, on_postgres)


@pytest.mark.parametrize("source", ["rabbitmq"], indirect=True)
@pytest.mark.timeout(1_000)
def test_on_postgresql_each_event_has_its_effect_once(source, on_postgres):
    each_event_has_its_effect_once(source, on_postgres)
