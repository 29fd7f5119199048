"""The settings of a client: its retry policy, its preset, its budget and its clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

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


def settings_of(
    *,
    retry: RetryPolicy | None = None,
    preset: Preset | str = "default",
    budget: RetryBudget | None = None,
    clock: Clock | None = None,
    key_version: Literal[4, 7] = 4,
    buffer: bool = True,
) -> Settings:
    """
    The settings of a client.

    Args:
        retry: how often and how long it sends a request.
        preset: what the API expects: "default", "ietf", "stripe", "paypal", "adyen", "square", or a
            `Preset`.
        budget: limits the retries of all calls; give several clients of one server the same.
        clock: time and pauses, for tests.
        key_version: the version of the UUIDs that are the keys.
        buffer: whether a transport or middleware reads the whole response of a request with a key,
            so that a response that breaks off is a reason to send it again.
    """
    retry = RetryPolicy() if retry is None else retry
    preset = preset_of(preset)
    if key_version not in (4, 7):
        raise Misconfigured(f"key_version is {key_version!r}; choose 4 or 7")
    if preset.window is not None and retry.deadline_s > seconds("window", preset.window):
        raise Misconfigured(
            f"deadline ({retry.deadline!r}) is longer than the {preset.window} for which "
            f"{preset.name} remembers a key"
        )
    return Settings(
        retry=retry,
        preset=preset,
        budget=RetryBudget() if budget is None else budget,
        clock=Clock() if clock is None else clock,
        new_key=new_uuid7 if key_version == 7 else new_uuid4,
        buffer=buffer,
    )
