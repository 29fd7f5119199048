"""Engines bind a store, a clock and a policy to flows, and perform what flows ask for.

`sync` and `asynchronous` are the two drivers; `desk` is what they share; `heart` renews leases and
sweeps; `waiting` is the line of duplicates; `cache` answers replays from memory; `clock` is the
store's time.
"""

from coatcheck.engine.asynchronous import AsyncEngine
from coatcheck.engine.sync import Engine

__all__ = ["AsyncEngine", "Engine"]
