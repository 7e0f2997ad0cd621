"""Both generations on one server: neither shows through where the other one is spoken."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import httpx2
import pytest
from mcp.server.mcpserver import Context
from mcp_types import CancelledNotification, CancelledNotificationParams

from taskstore import AuthContext, TaskStatus

EXTENSION = "io.modelcontextprotocol/tasks"
LEGACY_CAPABILITY: dict[str, Any] = {"tasks": {"list": {}, "cancel": {}, "requests": {"elicitation": {"create": {}}}}}


async def test_the_older_capability_is_not_declared_under_2026(reports: Any, connect: Any) -> None:
    """A client that saw both would not know which one it is spoken to in (X26-31)."""
    async with connect(reports.server) as peer:
        discovered = await peer.request("server/discover", {}, routed=False)
        listed = await peer.request("tools/list", {}, routed=False)

    assert discovered["capabilities"]["extensions"][EXTENSION] == {}
    assert "tasks" not in discovered["capabilities"]
    assert not any("execution" in tool for tool in listed["tools"])


async def test_the_extension_enables_nothing_under_2025(reports: Any, connect_legacy: Any) -> None:
    """There a call becomes a task when it asks for one itself, and in no other way (X26-36)."""
    reports.opened.set()

    async with connect_legacy(reports.server, capabilities={"extensions": {EXTENSION: {}}}) as peer:
        inline = await peer.call("wait")
        created = await peer.call("wait", task={})

    assert inline["content"] == [{"type": "text", "text": "through"}]
    assert created.keys() == {"task"}


async def test_the_older_capability_declares_nothing_under_2026(reports: Any, serve: Any) -> None:
    """Such a client has not learnt what an answer to it would mean; it is refused like any other (X26-28, X26-37)."""
    reports.opened.set()

    async with serve(reports.server) as url, httpx2.AsyncClient() as http:

        async def send(method: str, routed_to: str, **params: Any) -> Any:
            meta = {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": LEGACY_CAPABILITY,
                "io.modelcontextprotocol/clientInfo": {"name": "legacy", "version": "1"},
            }
            headers = {
                "Accept": "application/json, text/event-stream",
                "MCP-Protocol-Version": "2026-07-28",
                "Mcp-Method": method,
                "Mcp-Name": routed_to,
            }
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
            return (await http.post(url, headers=headers, json=body)).json()

        inline = await send("tools/call", "wait", name="wait", arguments={})
        refused = [
            await send("tools/call", "add", name="add", arguments={"a": 1, "b": 2}, task={}),
            await send("tasks/get", "tsk_1", taskId="tsk_1"),
            await send("tasks/cancel", "tsk_1", taskId="tsk_1"),
        ]

    assert inline["result"]["content"] == [{"type": "text", "text": "through"}]
    assert [answer["error"]["code"] for answer in refused] == [-32021] * 3
    assert refused[0]["error"]["data"] == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}


@pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
async def test_progress_and_log_messages_of_a_task_are_not_pushed_under_2026(reports: Any, connect: Any) -> None:
    """There progress is in the status message, and nothing of a task is sent beside the task (X26-25)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def talk(ctx: Context) -> None:
        await reports.opened.wait()
        await ctx.report_progress(1, 2, "half-way")
        await ctx.info("half-way")

    async with connect(reports.server) as peer:
        created = await peer.request("tools/call", {"name": "talk", "arguments": {}, "_meta": {"progressToken": 7}})
        listening = asyncio.create_task(peer.listen(taskIds=[created["taskId"]]))
        acknowledged = await asyncio.wait_for(peer.messages.get(), 60)
        reports.opened.set()
        await asyncio.wait_for(listening, 60)

    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    assert peer.messages.empty()
    assert peer.pushed.qsize() >= 1


async def test_the_end_of_the_creating_request_does_not_touch_a_task_of_2026(
    reports: Any, connect: Any, local: AuthContext
) -> None:
    """Once the task is there, only tasks/cancel cancels it (X26-22)."""
    async with connect(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()
        for request_id in range(10):
            params = CancelledNotificationParams(request_id=request_id)
            await peer.client.session.send_notification(CancelledNotification(params=params))
        reports.opened.set()
        task = await reports.tasks.store.wait_for_task(task_id, auth=local)

    assert task.status is TaskStatus.COMPLETED


async def test_a_poll_changes_nothing(reports: Any, connect: Any, connect_legacy: Any) -> None:
    """A read may be repeated, cached, or answered by any replica (X26-11)."""
    async with connect(reports.server) as modern, connect_legacy(reports.server) as legacy:
        task_id = await modern.start("wait")
        await reports.running.wait()
        operator = reports.tasks.store.operator
        before = await operator.get_task(task_id), await operator.list_events(task_id)

        polled = [await modern.get(task_id) for _ in range(3)]
        polled_as_legacy = [await legacy.get(task_id) for _ in range(3)]

        after = await operator.get_task(task_id), await operator.list_events(task_id)

    assert after == before
    assert polled[0] == polled[1] == polled[2]
    assert polled_as_legacy[0] == polled_as_legacy[1] == polled_as_legacy[2]


async def test_every_answer_about_a_task_says_when_it_began_and_changed(
    reports: Any, connect: Any, connect_legacy: Any
) -> None:
    """In ISO 8601 and UTC, so that a client can show its age and compare polls as text (T25-24, T25-25)."""
    async with connect(reports.server) as modern, connect_legacy(reports.server) as legacy:
        created = (await legacy.call("wait", task={}))["task"]
        task_id = created["taskId"]
        polled = [await legacy.get(task_id), await modern.get(task_id)]
        [listed] = (await legacy.request("tasks/list"))["tasks"]
        cancelled = await legacy.cancel(task_id)
        await legacy.until_notified(lambda notified: "notifications/tasks/status" in dict(notified))
        told = dict(legacy.notified)["notifications/tasks/status"]

    for answer in (created, *polled, listed, cancelled, told):
        began, changed = (datetime.fromisoformat(answer[name]) for name in ("createdAt", "lastUpdatedAt"))
        assert answer["createdAt"] == created["createdAt"]
        assert answer["createdAt"].endswith("Z")
        assert began.utcoffset() == changed.utcoffset() == timedelta(0)
        assert began <= changed


async def test_no_client_sees_of_what_a_task_is_a_part(
    reports: Any, connect: Any, connect_legacy: Any, local: AuthContext
) -> None:
    """Neither generation has a word for it, and an invented one could come to mean something else (C-21)."""
    async with connect(reports.server) as modern, connect_legacy(reports.server) as legacy:
        store = reports.tasks.store
        whole = await store.create_task(auth=local)
        part = await store.create_task(auth=local, parent_task_id=whole.task_id)

        answers = [
            await modern.get(part.task_id),
            await legacy.get(part.task_id),
            *[task for task in (await legacy.request("tasks/list"))["tasks"] if task["taskId"] == part.task_id],
            await legacy.cancel(part.task_id),
        ]

    assert len(answers) == 4
    assert whole.task_id not in str(answers)
