"""subscriptions/listen with taskIds on FastMCP, which has no such request of its own."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from fastmcp import Context, FastMCP

from taskstore.adapters.fastmcp import TasksExtension

AT_ONCE = timedelta(0)


class Gates:
    """A server with a tool that a test leads step by step."""

    def __init__(self, database_url: str, **options: Any) -> None:
        self.server = FastMCP("reports", **options)
        self.server.add_extension(TasksExtension(database_url, drain=AT_ONCE))
        self.report, self.finish = asyncio.Event(), asyncio.Event()

        @self.server.tool(task=True)
        async def report(ctx: Context) -> str:
            await self.report.wait()
            await ctx.report_progress(3, 10, "rendering")
            await self.finish.wait()
            return "done"


@pytest.fixture
def gates(database_url: str) -> Gates:
    return Gates(database_url)


async def heard(messages: "asyncio.Queue[dict[str, Any]]") -> dict[str, Any]:
    return await asyncio.wait_for(messages.get(), 60)


async def acknowledged(peer: Any) -> dict[str, Any]:
    """Return what the server will notify of."""
    message = await heard(peer.messages)
    assert message["method"] == "notifications/subscriptions/acknowledged"
    honored: dict[str, Any] = message["params"]["notifications"]
    return honored


async def test_a_listener_hears_of_every_change_until_the_task_is_finished(gates: Gates, connect: Any) -> None:
    """What the server cannot tell of is not acknowledged; the end of the tasks ends the stream."""
    async with connect(gates.server) as peer:
        task_id = await peer.start("report")
        listening = asyncio.create_task(peer.listen(taskIds=[task_id], toolsListChanged=True))
        honored = await acknowledged(peer)
        at_once = await heard(peer.pushed)
        gates.report.set()
        progress = await heard(peer.pushed)
        gates.finish.set()
        while (last := await heard(peer.pushed))["status"] == "working":
            pass
        ended = await asyncio.wait_for(listening, 60)

    assert honored == {"taskIds": [task_id]}
    assert (at_once["status"], progress["statusMessage"]) == ("working", "rendering (3/10)")
    assert (last["status"], last["result"]["structuredContent"]) == ("completed", {"result": "done"})
    assert ended["resultType"] == "complete"


async def test_only_ones_own_tasks_are_acknowledged(
    database_url: str, connect: Any, serve: Any, fastmcp_authorization: Any
) -> None:
    """Over HTTP; a stranger who knows an id learns neither that it exists nor what becomes of it."""
    gates = Gates(database_url, **fastmcp_authorization)

    async with serve(gates.server) as url, connect(url, token="alice") as alice, connect(url, token="bob") as bob:
        task_id = await alice.start("report")
        await asyncio.wait_for(bob.listen(taskIds=[task_id]), 60)
        honored = await acknowledged(bob)
        gates.report.set()
        gates.finish.set()
        await asyncio.wait_for(alice.listen(taskIds=[task_id]), 60)

    assert honored == {"taskIds": []}
    assert bob.pushed.empty()
    assert not alice.pushed.empty()


async def test_a_client_that_does_not_declare_cannot_listen_to_tasks(gates: Gates, connect: Any, refused: Any) -> None:
    """Capabilities count per request, and this is one."""
    async with connect(gates.server, declares=False) as peer:
        with refused(-32021):
            await peer.listen(taskIds=["tsk_1"])


async def test_a_server_does_not_claim_to_tell_of_its_tools(gates: Gates, connect: Any, refused: Any) -> None:
    """FastMCP does not publish such changes to clients of 2026-07-28; who believed it would keep an old list."""
    async with connect(gates.server) as peer:
        discovered = await peer.request("server/discover", {}, routed=False)
        with refused(-32601):
            await peer.listen(toolsListChanged=True)

    assert discovered["capabilities"]["tools"] == {"listChanged": False}
