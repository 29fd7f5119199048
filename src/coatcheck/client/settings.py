"""The settings of a client: its retry policy, its preset, its budget and its clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from coatcheck.client.keys import new_uuid4, new_uuid7
from coatcheck.client.presets import preset_of
from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy, seconds
from coatcheck.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, pauses and random numbers; a test brings its own."""

    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    random: Callable[[], float] = random.random
    sleep: Callable[[float], object] = time.sleep
    async_sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Settings:
    """What every call of a client needs; see `settings_of`."""

    retry: RetryPolicy
    preset: Preset
    budget: RetryBudget
    clock: Clock
    new_key: Callable[[], str]
    buffer: bool


class ClientSettings(TypedDict, total=False):
    """
    What every client takes, beside the options of its library.

    *retry* says how often and how long a request is sent.
    """

    retry: RetryPolicy | None
    # What the API expects: "default", "ietf", "stripe", "paypal", "adyen", "square", or a `Preset`.
    preset: Preset | str
    # Limits the retries of all calls; give several clients of one server the same.
    budget: RetryBudget | None
    # Time and pauses, for tests.
    clock: Clock | None
    # The version of the UUIDs that are the keys; those of version 7 begin with the time.
    key_version: Literal[4, 7]


class BufferSettings(ClientSettings, total=False):
    """
    What a transport and a client of aiohttp take.

    *buffer*: whether the whole response of a request with a key is read, so that a response that
    breaks off is a reason to send the request again; by default True.
    """

    buffer: bool


def settings_of(
    *,
    retry: RetryPolicy | None = None,
    preset: Preset | str = "default",
    budget: RetryBudget | None = None,
    clock: Clock | None = None,
    key_version: Literal[4, 7] = 4,
    buffer: bool = True,
) -> Settings:
    """The settings of a client; see `ClientSettings`."""
    retry = RetryPolicy() if retry is None else retry
    budget = RetryBudget() if budget is None else budget
    for name, given, kind in (("retry", retry, RetryPolicy), ("budget", budget, RetryBudget)):
        if not isinstance(given, kind):
            raise Misconfigured(f"{name} is a {type(given).__name__}; it must be a {kind.__name__}")
    preset = preset_of(preset)
    if key_version not in (4, 7):
        raise Misconfigured(f"key_version is {key_version!r}; choose 4 or 7")
    return Settings(
        retry=checked_policy(retry, preset),
        preset=preset,
        budget=budget,
        clock=Clock() if clock is None else clock,
        new_key=new_uuid7 if key_version == 7 else new_uuid4,
        buffer=buffer,
    )


def checked_policy(retry: RetryPolicy, preset: Preset) -> RetryPolicy:
    """*retry*; raises `Misconfigured` if it is longer than the API of *preset* remembers keys."""
    if preset.window is not None and retry.deadline_s > seconds("window", preset.window):
        raise Misconfigured(
            f"deadline ({retry.deadline!r}) is longer than the {preset.window} for which "
            f"{preset.name} remembers a key"
        )
    return retry
