"""Messages: what becomes of those that come in, and what those that go out look like."""
