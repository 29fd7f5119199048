"""Metrics and spans for `prometheus_client` and OpenTelemetry, each in a module of its own."""
