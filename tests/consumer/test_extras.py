"""Each broker's module needs its own library only, and names the extra that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The module of each broker, the library that it needs, and the extra.
LIBRARIES = {
    "nats": ("nats", "nats"),
    "redis_streams": ("redis", "redis"),
    "kafka": ("confluent_kafka", "kafka"),
    "aiokafka": ("aiokafka", "aiokafka"),
    "sqs": ("botocore", "sqs"),
    "faststream": ("faststream", "faststream"),
}
PROGRAM = """
import importlib, sys
for name in {hidden}:
    sys.modules[name] = None
import coatcheck.consumer
try:
    importlib.import_module("coatcheck.consumer.{module}")
except coatcheck.MissingExtra as error:
    print(error)
"""


def printed_without(module, hidden):
    program = PROGRAM.format(module=module, hidden=sorted(hidden))
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("module", LIBRARIES)
def test_a_module_without_its_library_names_the_extra(module):
    library, extra = LIBRARIES[module]
    assert f"pip install 'coatcheck[{extra}]'" in printed_without(module, [library])


def test_a_module_needs_no_library_of_another_broker():
    others = {library for library, _ in LIBRARIES.values()} - {"nats"}
    assert printed_without("nats", others) == ""
