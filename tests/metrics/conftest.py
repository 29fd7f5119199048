"""Each test runs with both libraries, and with both engines."""

import pytest

from tests.metrics.readings import OpenTelemetryReadings, PrometheusReadings
from tests.support.engines import WatchedStore
from tests.support.times import Clock


@pytest.fixture(params=[PrometheusReadings, OpenTelemetryReadings], ids=["prometheus", "otel"])
def readings(request):
    return request.param()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return WatchedStore()


@pytest.fixture
def engine(guards, store, clock, readings):
    exporter = readings.exporter
    return guards.engine(
        *(store,),
        observers=[exporter.observe],
        listeners=[exporter.listen],
        clock=clock,
        sweep_every_s=60,
    )
