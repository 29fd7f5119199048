"""Engines bind a store, a clock and a policy to flows, and perform what flows ask for.

`sync` and `asynchronous` guard functions, each on its driver (`driver`, `driver_async`); `desk` is
what they share; `heart` renews leases of what is `held`, each `apart` from the others, does the
`finishing` of what could not be written, and begins the `sweeping`; `waiting` is the line of
duplicates, and `bell` wakes those on other nodes; `asking` asks what became of an attempt;
`reconciler` settles what was abandoned, and `resolving` what a person decides; `resuming` hands
work over to a queue, and takes it up there; `cache` answers replays from memory; `clock` is the
store's time.
`transaction` and `transaction_async` perform what happens in a transaction of the application's
own; `together` is what they share.
"""

from coatcheck.engine.asynchronous import AsyncEngine
from coatcheck.engine.sync import Engine

__all__ = ["AsyncEngine", "Engine"]
