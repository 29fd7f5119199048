"""HTTP clients that retry safely: one key for each action, sent until the answer is definite.

`httpx2`, `httpx`, `requests` and `aiohttp` have a client for the library of that name.
"""

from coatcheck.client.call import Action
from coatcheck.client.presets import PRESETS
from coatcheck.client.settings import BufferSettings, ClientSettings, Clock
from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.core.client.send import Result, result_of

__all__ = [
    "PRESETS",
    "Action",
    "BufferSettings",
    "ClientSettings",
    "Clock",
    "Preset",
    "Result",
    "RetryBudget",
    "RetryPolicy",
    "result_of",
]
