"""Spans and metrics for OpenTelemetry, printed in place of being sent to a collector."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import set_tracer_provider

from coatcheck import Engine
from coatcheck.metrics import opentelemetry


def shown(span: ReadableSpan) -> str:
    found = span.attributes or {}
    return f"{span.name}: {found['coatcheck.outcome']}, attempt {found['coatcheck.attempt']}\n"


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=shown)))
set_tracer_provider(provider)

engine = Engine("memory://")
opentelemetry.instrument(engine)  # the global providers, unless you give others


def charge(cents: int) -> int:
    return cents


if __name__ == "__main__":
    for _ in range(2):
        engine.run("order-17", charge, 2_000, scope="charges")
    engine.close()
