"""Decisions of a client: which requests it sends again, when, and for how long."""
