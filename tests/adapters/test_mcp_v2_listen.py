"""subscriptions/listen with taskIds: every change of a task is pushed, wherever it was made."""

import asyncio
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer

from taskstore import AuthContext, StoreOptions
from taskstore.adapters.mcp_v2 import TasksExtension


class Gates:
    """Lets a test lead the tool ``report`` step by step."""

    def __init__(self, server: MCPServer, tasks: TasksExtension) -> None:
        self.report, self.finish = asyncio.Event(), asyncio.Event()

        @server.tool()
        @tasks.task(mode="required", ttl=None)
        async def report(ctx: Context) -> str:
            await self.report.wait()
            await ctx.report_progress(3, 10, "rendering")
            await self.finish.wait()
            return "done"


@pytest.fixture
def gates(server: MCPServer, tasks: TasksExtension) -> Gates:
    return Gates(server, tasks)


async def acknowledgement(peer: Any) -> dict[str, Any]:
    """Return what the server will notify of."""
    message = await heard(peer.messages)
    assert message["method"] == "notifications/subscriptions/acknowledged"
    acknowledged: dict[str, Any] = message["params"]["notifications"]
    return acknowledged


async def heard(messages: "asyncio.Queue[dict[str, Any]]") -> dict[str, Any]:
    return await asyncio.wait_for(messages.get(), 60)


async def test_a_listener_hears_of_every_change_until_the_task_is_finished(
    server: MCPServer, gates: Gates, connect: Any
) -> None:
    """Each notification is what tasks/get would answer at that moment; and the end of the task ends the stream."""
    async with connect(server) as peer:
        task_id = await peer.start("report")
        listening = asyncio.create_task(peer.listen(taskIds=[task_id]))
        acknowledged = await acknowledgement(peer)
        at_once = await heard(peer.pushed)
        gates.report.set()
        progress = await heard(peer.pushed)
        gates.finish.set()
        while (last := await heard(peer.pushed))["status"] == "working":
            pass
        ended = await asyncio.wait_for(listening, 60)
        polled = await peer.get(task_id)

    assert acknowledged == {"taskIds": [task_id]}
    assert at_once["status"] == "working"
    assert progress["statusMessage"] == "rendering (3/10)"
    (subscription,) = {str(each["_meta"]) for each in (at_once, progress, last)}
    assert "io.modelcontextprotocol/subscriptionId" in subscription
    envelope = ("resultType", "_meta")
    assert {key: value for key, value in last.items() if key not in envelope} == {
        key: value for key, value in polled.items() if key not in envelope
    }
    assert "resultType" not in last
    assert ended["resultType"] == "complete"


async def test_a_change_by_another_process_is_pushed_too(database_url: str, connect: Any, serve: Any) -> None:
    """Behind one address the stream and the work are rarely in the same process."""
    servers = []
    for _ in range(2):
        tasks = TasksExtension(database_url, options=StoreOptions(max_ttl=None))
        server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan)
        servers.append((server, Gates(server, tasks)))
    (server, gates), (other, _) = servers

    async with serve(server) as url, serve(other) as other_url, connect(url) as peer, connect(other_url) as listener:
        task_id = await peer.start("report")
        listening = asyncio.create_task(listener.listen(taskIds=[task_id]))
        at_once = await heard(listener.pushed)
        gates.report.set()
        gates.finish.set()
        while (last := await heard(listener.pushed))["status"] == "working":
            pass
        await asyncio.wait_for(listening, 60)

    assert at_once["ttlMs"] is None
    assert last["result"]["structuredContent"] == {"result": "done"}


async def test_questions_are_pushed_as_they_are_asked(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, local: AuthContext
) -> None:
    """A client that listens need not poll at all: it learns what is asked, and when the answer has arrived."""
    question = {"method": "elicitation/create", "params": {"mode": "form", "message": "Sure?"}}

    async with connect(server, **can_be_asked) as peer:
        task = await tasks.store.create_task(auth=local)
        handle = tasks.store.handle(task)
        listening = asyncio.create_task(peer.listen(taskIds=[task.task_id]))
        await heard(peer.pushed)
        asking = asyncio.create_task(handle.ask({"sure": question}))
        asked = await heard(peer.pushed)
        await peer.update(task.task_id, {key: {"action": "accept"} for key in asked["inputRequests"]})
        await asking
        answered = await heard(peer.pushed)
        await handle.complete({"content": []})
        await asyncio.wait_for(listening, 60)

    assert list(asked["inputRequests"].values()) == [question]
    assert (answered["status"], "inputRequests" in answered) == ("working", False)


async def test_only_ones_own_tasks_are_acknowledged(
    database_url: str, connect: Any, serve: Any, authorization: dict[str, Any]
) -> None:
    """A stranger who knows an id learns neither that it exists nor what becomes of it."""
    tasks = TasksExtension(database_url)
    server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan, **authorization)
    gates = Gates(server, tasks)

    async with serve(server) as url, connect(url, token="alice") as alice, connect(url, token="bob") as bob:
        task_id = await alice.start("report")
        await asyncio.wait_for(bob.listen(taskIds=[task_id, "tsk_unknown"]), 60)
        acknowledged = await acknowledgement(bob)
        gates.report.set()
        gates.finish.set()
        await asyncio.wait_for(alice.listen(taskIds=[task_id]), 60)

    assert acknowledged == {"taskIds": []}
    assert bob.pushed.empty()
    assert not alice.pushed.empty()


async def test_tasks_and_the_servers_own_events_share_a_stream(server: MCPServer, gates: Gates, connect: Any) -> None:
    """A client opens one stream for all that it wants to hear; the SDK's events go on when the tasks are over."""

    @server.tool()
    async def announce(ctx: Context) -> None:
        await ctx.notify_tools_changed()

    async with connect(server) as peer:
        task_id = await peer.start("report")
        async with asyncio.timeout(60):
            listening = asyncio.create_task(peer.listen(taskIds=[task_id], toolsListChanged=True))
            acknowledged = await acknowledgement(peer)
            gates.report.set()
            gates.finish.set()
            while (await heard(peer.pushed))["status"] == "working":
                pass
            await peer.call("announce")
            changed = await heard(peer.messages)
            still_open = not listening.done()
            listening.cancel()

    assert acknowledged == {"taskIds": [task_id], "toolsListChanged": True}
    assert changed["method"] == "notifications/tools/list_changed"
    assert still_open


async def test_a_stream_without_tasks_is_the_sdks_alone(server: MCPServer, gates: Gates, connect: Any) -> None:
    """Clients that know nothing of tasks must not notice that we stand in between."""
    async with connect(server, declares=False) as peer:
        listening = asyncio.create_task(peer.listen(promptsListChanged=True))
        acknowledged = await acknowledgement(peer)
        listening.cancel()

    assert acknowledged == {"promptsListChanged": True}


async def test_a_client_that_does_not_declare_cannot_listen_to_tasks(
    server: MCPServer, gates: Gates, connect: Any, refused: Any
) -> None:
    """Capabilities count per request, and this is one."""
    async with connect(server, declares=False) as peer:
        with refused(-32021):
            await peer.listen(taskIds=["tsk_1"])


@pytest.mark.parametrize("task_ids", ["tsk_1", [1], None, ["tsk_1"] * 1001])
async def test_malformed_filters_are_refused(
    server: MCPServer, gates: Gates, connect: Any, refused: Any, task_ids: Any
) -> None:
    """As for any params."""
    async with connect(server) as peer:
        with refused(-32602, "taskIds"):
            await peer.listen(taskIds=task_ids)
