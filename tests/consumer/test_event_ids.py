"""Event ids: from headers, attributes and CloudEvents in both modes (E1, K4)."""

from __future__ import annotations

import json

import pytest

from coatcheck.consumer import Headers, Message, event_ids


@pytest.mark.parametrize("prefix", ["ce_", "ce-", "cloudEvents:", "cloudEvents_"])
def test_a_cloudevent_in_binary_mode_is_known_by_its_source_and_id(prefix):
    message = Message(b"", Headers([(prefix + "id", "17"), (prefix + "source", "/orders")]))
    assert event_ids.cloudevent(message) == "/orders 17"


def test_a_cloudevent_in_structured_mode_is_known_by_its_source_and_id():
    body = json.dumps({"id": "17", "source": "/orders", "data": {}}).encode()
    headers = Headers([("Content-Type", "application/cloudevents+json; charset=utf-8")])
    assert event_ids.cloudevent(Message(body, headers)) == "/orders 17"


def test_other_json_is_no_cloudevent():
    headers = Headers([("content-type", "application/json")])
    assert event_ids.cloudevent(Message(b'{"id": "17"}', headers)) == ""


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"id": ""}'])
def test_a_structured_cloudevent_without_an_id_has_no_event_id(body):
    headers = Headers([("content-type", "application/cloudevents+json")])
    assert event_ids.cloudevent(Message(body, headers)) == ""


def test_long_sources_make_ids_that_fit_a_key_and_differ():
    ids = {
        event_ids.cloudevent(Message(b"", Headers([("ce_id", id), ("ce_source", "s" * 500)])))
        for id in ("1", "2")
    }
    assert len(ids) == 2
    assert all(len(id) < 255 for id in ids)


def test_the_default_is_the_id_of_a_cloudevent_or_the_message_id_of_the_publisher():
    assert event_ids.published_id(Message(b"", message_id="m-1")) == "m-1"
    both = Message(b"", Headers([("ce_id", "17")]), message_id="m-1")
    assert event_ids.published_id(both) == " 17"
    assert event_ids.published_id(Message(b"", delivery_id="broker's own")) == ""


def test_the_id_of_the_broker_is_used_only_where_it_is_asked_for():
    message = Message(b"", source="orders", delivery_id="17-0")
    assert event_ids.delivery_id(message) == "orders 17-0"
    assert event_ids.delivery_id(Message(b"", source="orders")) == ""


def test_a_header_is_found_in_any_case_and_of_any_type():
    message = Message(b"", Headers([("Order-Id", 17), ("raw", b"x"), ("none", None)]))
    assert event_ids.header("order-id")(message) == "17"
    assert dict(message.headers) == {"order-id": "17", "raw": "x", "none": ""}
    assert len(message.headers) == 3


def test_a_message_id_is_what_the_publisher_set():
    assert event_ids.message_id(Message(b"", message_id="m-1")) == "m-1"
