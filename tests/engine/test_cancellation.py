"""A handler that awaits what was cancelled fails like any other: it lives, and is over (L4)."""

import asyncio

import pytest

from coatcheck import AsyncEngine, OutcomeUnknown, Policy
from coatcheck.core.record import FAILED, IN_DOUBT, RUNNING
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.stores import Query
from tests.support.http import AsgiExchange, with_key

RETRY, MANUAL = Policy(wait=0), Policy(wait=0, recovery="manual")


async def awaits_what_is_cancelled():
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def state_in(engine):
    return (await engine.store.find(Query())).records[0].state


async def works():
    return "worked"


@pytest.mark.parametrize(("policy", "state"), [(RETRY, FAILED), (MANUAL, IN_DOUBT)])
def test_a_function_that_awaits_a_cancelled_task_has_failed(policy, state):
    """L4: its key is not held until a lease ends."""

    async def use():
        async with AsyncEngine("memory://", policy) as engine:
            with pytest.raises(asyncio.CancelledError):
                await engine.run("k", awaits_what_is_cancelled, scope="s")
            assert await state_in(engine) == state
            if state == FAILED:
                assert await engine.run("k", works, scope="s") == "worked"
            else:
                with pytest.raises(OutcomeUnknown):
                    await engine.run("k", works, scope="s")

    asyncio.run(use())


@pytest.mark.parametrize("front", [False, True], ids=["bare", "behind a middleware that cancels"])
def test_a_request_that_awaits_a_cancelled_task_has_failed(front):
    """L4: as without us, its server gets the cancellation."""

    async def app(_scope, _receive, _send):
        await awaits_what_is_cancelled()

    async def use():
        async with AsyncEngine("memory://", RETRY) as engine:
            made = AsgiExchange("POST", "/charges", with_key("k"), b"").run(
                IdempotencyMiddleware(app, engine=engine)
            )
            with pytest.raises(asyncio.CancelledError):
                await (asyncio.wait_for(made, 20) if front else made)
            assert await state_in(engine) == FAILED

    asyncio.run(use())


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_caller_that_is_cancelled_leaves_its_lease(how):
    """L5: what its function has done by then is unknown."""

    async def use():
        is_in = asyncio.Event()

        async def hangs():
            is_in.set()
            await asyncio.Event().wait()

        async with AsyncEngine("memory://", RETRY) as engine:
            run = asyncio.create_task(engine.run("k", hangs, scope="s"))
            await is_in.wait()
            if how == "cancel":
                run.cancel()
                await asyncio.wait((run,))
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(run, 0)
            assert await state_in(engine) == RUNNING

    asyncio.run(use())
