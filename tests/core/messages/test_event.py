"""Outgoing events: stored and read back (E5)."""

from __future__ import annotations

import pytest

from coatcheck.core.messages.event import OutgoingEvent, body_of, decode_event, encode_event
from coatcheck.errors import Misconfigured, Unreadable


def test_an_event_is_read_back_as_it_was():
    event = OutgoingEvent("orders", b"\x00\xff", "id-1", "order-7", {"a": "ä"})
    assert decode_event(encode_event(event)) == event


def test_the_stored_bytes_of_an_event_stay_the_same():
    event = OutgoingEvent("orders", b"1", "id-1", "k", {"a": "b"})
    stored = b'{"id":"id-1","topic":"orders","key":"k","headers":{"a":"b"},"body":"MQ=="}'
    assert encode_event(event) == stored


@pytest.mark.parametrize("stored", [b"{", b"[]", b'{"topic": "t"}', b'{"body": 7}'])
def test_an_event_of_a_newer_release_is_reported_and_not_guessed(stored):
    with pytest.raises(Unreadable):
        decode_event(stored)


def test_a_payload_is_bytes_or_json():
    assert body_of(b"1") == (b"1", "application/octet-stream")
    assert body_of({"a": "ä"}) == ('{"a":"ä"}'.encode(), "application/json")
    for odd in (object(), float("nan"), {1, 2}):
        with pytest.raises(Misconfigured):
            body_of(odd)
