"""The engine: performs what the flows of `core` ask for, for threads and for event loops.

`attempts` is the seam: begin, complete, fail. `engine` and `async_engine` run it, for functions
here and for requests in `server`; `runner` performs effects. Beside them: `leases` (the heartbeat),
`waiters`, `replay_cache`, `key_quota`, `steps`, `deferred`, `transactions`, `recovery`,
`resolution` and `sweeper`.
"""

from coatcheck.engine.async_engine import AsyncEngine
from coatcheck.engine.engine import Engine

__all__ = ["AsyncEngine", "Engine"]
