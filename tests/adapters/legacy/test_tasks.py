"""The requests about tasks of 2025-11-25, and tasks that clients of both generations share."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from taskstore import AuthContext, TaskNotFoundError, TaskStatus
from tests.unit.outside import query

RELATED_TASK = "io.modelcontextprotocol/related-task"


async def test_a_task_is_polled_to_its_result(reports: Any, connect_legacy: Any) -> None:
    """The result is what the call would have returned, with the mark of its task (T25-17, T25-19)."""
    async with connect_legacy(reports.server) as peer:
        inline = await peer.request("tools/call", {"name": "greet", "arguments": {"name": "Ada"}})
        task_id = await peer.start("wait")
        working = await peer.get(task_id)
        waiting = asyncio.create_task(peer.result(task_id))
        reports.opened.set()
        result = await waiting
        completed = await peer.get(task_id)

    assert (working["status"], completed["status"]) == ("working", "completed")
    assert result["content"] == [{"type": "text", "text": "through"}]
    assert result.keys() == inline.keys() | {"_meta"}
    assert result["_meta"] == {RELATED_TASK: {"taskId": task_id}}
    assert not {"_meta", "resultType"} & completed.keys()


async def test_a_json_rpc_error_of_the_call_is_replayed(reports: Any, connect_legacy: Any) -> None:
    """Code, message and data are those of the call itself, however often they are asked for (T25-14, T25-17)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def refuse() -> str:
        raise MCPError(-31999, "Quota exceeded", {"limit": 3})

    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("refuse")
        replayed = []
        for _ in range(2):
            with pytest.raises(MCPError) as caught:
                await peer.result(task_id)
            replayed.append(caught.value.error)
        polled = await peer.get(task_id)

    assert [(error.code, error.message, error.data) for error in replayed] == [
        (-31999, "Quota exceeded", {"limit": 3})
    ] * 2
    assert (polled["status"], polled["statusMessage"]) == ("failed", "Quota exceeded")


async def test_a_tool_error_is_a_failed_task_with_its_result(reports: Any, connect_legacy: Any) -> None:
    """The result is there all the same: it is what the call returned (T25-14)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def break_down() -> str:
        raise RuntimeError("this text is the tool's own")

    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("break_down")
        result = await peer.result(task_id)
        polled = await peer.get(task_id)

    assert result["isError"] is True
    assert (polled["status"], polled["statusMessage"]) == ("failed", result["content"][0]["text"])


async def test_cancel_stops_the_work_and_answers_the_cancelled_task(
    reports: Any, connect_legacy: Any, refused: Any
) -> None:
    """The status is final before the answer goes out, and whatever the work still does is in vain (T25-38, T25-39)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()

        cancelled = await peer.cancel(task_id)

        await reports.cancelled.wait()
        with refused(-32603, "cancelled"):
            await peer.result(task_id)
        with refused(-32602, "already in terminal status 'cancelled'"):
            await peer.cancel(task_id)
        assert (await peer.get(task_id))["status"] == "cancelled"

    assert (cancelled["taskId"], cancelled["status"]) == (task_id, "cancelled")


async def test_the_end_of_the_creating_request_does_not_touch_the_task(reports: Any, connect_legacy: Any) -> None:
    """Once the task is there, only tasks/cancel cancels it (T25-34)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()
        for request_id in range(10):
            await peer.notify("notifications/cancelled", {"requestId": request_id})
        reports.opened.set()

        result = await peer.result(task_id)

    assert result["content"] == [{"type": "text", "text": "through"}]


async def test_a_waiter_that_goes_away_disturbs_nobody(reports: Any, connect_legacy: Any) -> None:
    """Several may wait, and each may give up for itself (T25-18)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        waiters = [asyncio.create_task(peer.result(task_id)) for _ in range(3)]
        await peer.get(task_id)
        waiters.pop().cancel()
        reports.opened.set()

        results = await asyncio.gather(*waiters)

    assert [result["content"][0]["text"] for result in results] == ["through", "through"]


async def test_the_list_leads_through_a_requestor_s_tasks(
    reports: Any, connect_legacy: Any, refused: Any, local: AuthContext
) -> None:
    """What can be got can be listed, page by page, and a cursor that is none is no end of the list (T25-35, T25-36)."""
    async with connect_legacy(reports.server) as peer:
        created = [(await reports.tasks.store.create_task(auth=local)).task_id for _ in range(101)]
        await reports.tasks.store.create_task(auth=AuthContext(subject="bob"))

        first = await peer.request("tasks/list")
        second = await peer.request("tasks/list", {"cursor": first["nextCursor"]})
        with refused(-32602, "cursor"):
            await peer.request("tasks/list", {"cursor": "nonsense"})

    assert "nextCursor" not in second
    assert sorted(task["taskId"] for task in first["tasks"] + second["tasks"]) == sorted(created)
    assert "_meta" not in first


@pytest.mark.parametrize("task_id", ["tsk_unknown", "\x00", "", None, 7])
async def test_an_id_that_is_none_is_refused(reports: Any, connect_legacy: Any, refused: Any, task_id: Any) -> None:
    """Ids come from strangers; each such answer has the code that the specification names (T25-49)."""
    async with connect_legacy(reports.server) as peer:
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            with refused(-32602):
                await peer.request(method, {"taskId": task_id})


async def test_the_mark_of_a_task_in_a_request_is_ignored(reports: Any, connect_legacy: Any) -> None:
    """The parameter taskId rules (T25-31)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        meta = {RELATED_TASK: {"taskId": "tsk_other"}}

        polled = await peer.request("tasks/get", {"taskId": task_id, "_meta": meta})

    assert polled["taskId"] == task_id


async def test_a_fault_of_the_store_is_an_internal_error(
    reports: Any, connect_legacy: Any, refused: Any, database_url: str
) -> None:
    """The SDK would answer with code 0, and what the fault says is for the log (T25-49)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        query(database_url, "ALTER TABLE taskstore_tasks RENAME TO taskstore_hidden")
        try:
            for method in ("tasks/get", "tasks/result", "tasks/list", "tasks/cancel"):
                with refused(-32603, "Internal server error"):
                    await peer.request(method, {"taskId": task_id})
            with refused(-32603, "Internal server error"):
                await peer.start("wait")
        finally:
            query(database_url, "ALTER TABLE taskstore_hidden RENAME TO taskstore_tasks")


# --- over HTTP, and whose task it is


async def test_two_principals_of_one_client_are_isolated(
    make_reports: Any, connect_legacy: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """Alice and Bob use the same application; neither sees, waits for or cancels the other's (T25-41..43)."""
    reports = make_reports(**authorization)

    async with (
        serve(reports.server) as url,
        connect_legacy(url, token="alice") as alice,
        connect_legacy(url, token="bob") as bob,
    ):
        task_id = await alice.start("wait")
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            with refused(-32602, "Task not found"):
                await bob.request(method, {"taskId": task_id})
        listed_by_bob = await bob.request("tasks/list")
        async with connect_legacy(url, token="alice") as reconnected:
            listed = await reconnected.request("tasks/list")
            reports.opened.set()
            result = await reconnected.result(task_id)

    assert alice.initialized["capabilities"]["tasks"]["list"] == {}
    assert listed_by_bob == {"tasks": []}
    assert [task["taskId"] for task in listed["tasks"]] == [task_id]
    assert result["content"] == [{"type": "text", "text": "through"}]


async def test_without_authorization_there_is_no_list(
    reports: Any, connect_legacy: Any, serve: Any, refused: Any, local: AuthContext
) -> None:
    """Requestors that cannot be told apart would see each other's ids, which are all that protects them (T25-45)."""
    async with serve(reports.server) as url, connect_legacy(url) as peer, connect_legacy(url) as other:
        task_id = await peer.start("wait")
        with refused(-32601):
            await peer.request("tasks/list")
        polled = await other.get(task_id)
        with pytest.raises(TaskNotFoundError):
            await reports.tasks.store.get_task(task_id, auth=local)

    assert peer.initialized["capabilities"]["tasks"].keys() == {"cancel", "requests"}
    assert polled["status"] == "working"


async def test_a_server_with_authorization_takes_no_request_without_token(
    make_reports: Any, connect_legacy: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """Mounted behind something that forgets to check tokens, tasks must not turn into anybody's."""
    reports = make_reports(**authorization)

    async with serve(reports.server._lowlevel_server) as url, connect_legacy(url) as peer:
        with refused(-32600, "access token"):
            await peer.call("wait", task={})
        for method in ("tasks/get", "tasks/result", "tasks/list", "tasks/cancel"):
            with refused(-32600, "access token"):
                await peer.request(method, {"taskId": "tsk_1"})

    assert "list" not in peer.initialized["capabilities"]["tasks"]
    assert not reports.running.is_set()


async def test_the_work_survives_the_end_of_the_session(reports: Any, connect_legacy: Any, serve: Any) -> None:
    """The client that asked is gone; a later session of anyone who knows the id finds the result."""
    async with serve(reports.server) as url:
        async with connect_legacy(url) as peer:
            task_id = await peer.start("wait")
            await reports.running.wait()
        reports.opened.set()
        async with connect_legacy(url) as later:
            result = await later.result(task_id)

    assert result["content"] == [{"type": "text", "text": "through"}]


async def test_an_operator_finds_the_tasks_of_a_session(reports: Any, connect_legacy: Any, serve: Any) -> None:
    """A session narrows what an operator looks at; it never decides whose a task is."""
    async with serve(reports.server) as url, connect_legacy(url) as one, connect_legacy(url) as other:
        task_id = await one.start("wait")
        await other.start("wait")
        sessions = reports.server.session_manager._server_instances

        found = [
            [task.task_id for task in (await reports.tasks.store.operator.list_tasks(session_id=session)).tasks]
            for session in sessions
        ]
        seen = await other.get(task_id)

    assert len(found) == 2
    assert [task_id] in found
    assert seen["taskId"] == task_id


# --- both generations on one row


async def test_a_legacy_task_is_polled_and_cancelled_by_a_client_of_2026(
    reports: Any, connect_legacy: Any, connect: Any
) -> None:
    """A user upgrades one application of two; the tasks are the same."""
    async with connect_legacy(reports.server) as legacy, connect(reports.server) as modern:
        finished, cancelled = await legacy.start("add", {"a": 1, "b": 2}), await legacy.start("wait")
        await legacy.result(finished)

        polled = await modern.get(finished)
        await modern.cancel(cancelled)
        seen = await legacy.get(cancelled)

    assert polled["result"]["structuredContent"] == {"result": 3}
    assert RELATED_TASK not in polled["result"].get("_meta", {})
    assert seen["status"] == "cancelled"


async def test_a_task_of_2026_is_polled_and_cancelled_by_a_legacy_client(
    reports: Any, connect_legacy: Any, connect: Any
) -> None:
    """And the other way round: the result carries the mark only where that generation wants it."""
    async with connect_legacy(reports.server) as legacy, connect(reports.server) as modern:
        finished, cancelled = await modern.start("add", a=1, b=2), await modern.start("wait")

        result = await legacy.result(finished)
        listed = await legacy.request("tasks/list")
        answer = await legacy.cancel(cancelled)
        seen = await modern.get(cancelled)

    assert result["structuredContent"] == {"result": 3}
    assert result["_meta"] == {RELATED_TASK: {"taskId": finished}}
    assert {task["taskId"] for task in listed["tasks"]} == {finished, cancelled}
    assert (answer["status"], seen["status"]) == ("cancelled", "cancelled")


async def test_a_failed_tool_is_failed_for_one_generation_and_completed_for_the_other(
    reports: Any, connect_legacy: Any, connect: Any
) -> None:
    """One fact in the row, two words for it (T25-14, X26-12)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def break_down() -> str:
        raise RuntimeError("no")

    async with connect_legacy(reports.server) as legacy, connect(reports.server) as modern:
        task_id = await legacy.start("break_down")
        result = await legacy.result(task_id)
        statuses = (await legacy.get(task_id))["status"], (await modern.get(task_id))["status"]
        inlined = (await modern.get(task_id))["result"]

    assert statuses == ("failed", "completed")
    assert inlined["content"] == result["content"]


async def test_a_task_of_2025_outlives_a_restart_as_a_failed_one(
    make_reports: Any, connect_legacy: Any, local: AuthContext
) -> None:
    """The same words reach its client in the poll and in the replayed error."""
    first = make_reports()
    async with connect_legacy(first.server) as peer:
        task_id = await peer.start("wait")
        await first.running.wait()

    second = make_reports()
    async with connect_legacy(second.server) as peer:
        polled = await peer.get(task_id)
        with pytest.raises(MCPError) as replayed:
            await peer.result(task_id)
        task = await second.tasks.store.get_task(task_id, auth=local)

    assert polled["status"] == "failed"
    assert polled["statusMessage"].startswith("SERVER_STOPPED")
    assert replayed.value.error.message == polled["statusMessage"]
    assert replayed.value.error.data["reason"] == "SERVER_STOPPED"
    assert task.status is TaskStatus.FAILED


async def test_what_a_tool_declares_holds_for_both_generations(reports: Any, connect_legacy: Any, connect: Any) -> None:
    """The lifetime that a legacy client asks for comes first, the tool's own second."""

    @reports.server.tool()
    @reports.tasks.task(ttl=timedelta(minutes=9), poll_interval=timedelta(seconds=7))
    async def own() -> None: ...

    async with connect_legacy(reports.server) as legacy, connect(reports.server) as modern:
        unasked, asked = await legacy.call("own", task={}), await legacy.call("own", task={"ttl": 60_000})
        created = await modern.call("own")

    assert (unasked["task"]["ttl"], asked["task"]["ttl"], created["ttlMs"]) == (540_000, 60_000, 540_000)
    assert (unasked["task"]["pollInterval"], created["pollIntervalMs"]) == (7_000, 7_000)
