"""The lesson profile: what clients written after the course on SEP-1686 send and get, and who never sees it."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import anyio
import pytest
from fastmcp import FastMCP
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import SamplingMessage, TextContent

from taskstore import AuthContext
from taskstore.adapters.fastmcp import TasksExtension as FastMCPTasks
from taskstore.adapters.mcp_v2 import TasksExtension

REQUIRED: dict[str, Any] = {"_meta": {"task": {"required": True}}}
OPTIONAL: dict[str, Any] = {"_meta": {"task": {"optional": True}}}
STATUS, UPDATED = "notifications/tasks/status", "notifications/tasks/updated"


@pytest.fixture
def lesson(make_reports: Any) -> Any:
    """The server of reports, in the lesson's profile, with a tool that reports progress and then waits."""
    reports = make_reports(compat="lesson")

    @reports.server.tool()
    @reports.tasks.task()
    async def render(ctx: Context, total: float | None = 10) -> str:
        await ctx.report_progress(3, total, "rendering")
        reports.running.set()
        await reports.opened.wait()
        return "rendered"

    return reports


async def test_a_call_asks_for_a_task_in_its_meta(lesson: Any, connect_legacy: Any) -> None:
    """The answer has the task where the specification has it, and where the lesson has it (C-01, C-02)."""
    async with connect_legacy(lesson.server) as peer:
        created = await peer.call("wait", **REQUIRED)

    task = created["task"]
    assert created["_meta"] == {"task": {"id": task["taskId"], "state": "working", "ttl": task["ttl"]}}
    assert task["status"] == "working"
    assert task["ttl"] == 3_600_000
    assert task["taskId"].startswith("tsk_")


async def test_the_field_of_the_specification_comes_first(lesson: Any, connect_legacy: Any) -> None:
    """A client that says both speaks of one task, with the lifetime that only the field can ask for (C-01, C-02)."""
    async with connect_legacy(lesson.server) as peer:
        both = await peer.call("wait", task={"ttl": 60_000}, **REQUIRED)
        only = await peer.call("wait", task={"ttl": 60_000})

    assert both["task"]["ttl"] == only["task"]["ttl"] == 60_000
    assert only["_meta"]["task"] == {"id": only["task"]["taskId"], "state": "working", "ttl": 60_000}


async def test_where_a_task_is_optional_the_tool_decides(lesson: Any, connect_legacy: Any) -> None:
    """A tool that never runs as a task answers at once; every other one becomes a task (C-01)."""
    async with connect_legacy(lesson.server) as peer:
        inline = await peer.call("greet", {"name": "Ada"}, **OPTIONAL)
        answers = [await peer.call("wait", **OPTIONAL), await peer.call("add", {"a": 1, "b": 2}, **OPTIONAL)]

    assert inline["content"] == [{"type": "text", "text": "Hello, Ada!"}]
    assert "_meta" not in inline
    assert all(answer["task"]["status"] == "working" for answer in answers)


async def test_a_task_that_a_tool_does_not_make_is_refused(lesson: Any, connect_legacy: Any, refused: Any) -> None:
    """What is required is a task or an error, in either direction (C-01)."""
    async with connect_legacy(lesson.server) as peer:
        with refused(-32601, "does not run as a task"):
            await peer.call("greet", {"name": "Ada"}, **REQUIRED)
        for neither in ({}, {"_meta": {}}, {"_meta": {"task": {"required": False}}}, {"_meta": {"task": None}}):
            with refused(-32601, "only as a task"):
                await peer.call("add", {"a": 1, "b": 2}, **neither)


@pytest.mark.parametrize("malformed", [True, "required", [], {"required": 1}, {"required": True, "optional": "no"}])
async def test_a_malformed_wish_for_a_task_is_refused(
    lesson: Any, connect_legacy: Any, refused: Any, malformed: Any
) -> None:
    """A client that is not understood must not wait for a task that never comes (C-01)."""
    async with connect_legacy(lesson.server) as peer:
        with refused(-32602, "_meta.task"):
            await peer.call("wait", _meta={"task": malformed})


async def test_status_tells_state_and_progress_under_both_names(lesson: Any, connect_legacy: Any) -> None:
    """The lesson's client polls it until the state is final; the hint is a part of one (C-04, C-05, C-06)."""
    async with connect_legacy(lesson.server) as peer:
        task_id = await peer.start("render")
        await lesson.running.wait()
        working = await peer.request("tasks/status", {"taskId": task_id})
        polled = await peer.get(task_id)
        lesson.opened.set()
        await peer.result(task_id)
        completed = await peer.request("tasks/status", {"taskId": task_id})

    assert (working["id"], working["state"], working["progress"]) == (task_id, "working", 0.3)
    assert (working["taskId"], working["status"], working["statusMessage"]) == (task_id, "working", "rendering (3/10)")
    assert completed["state"] == completed["status"] == "completed"
    assert polled["_meta"] == {"taskstore/progress": {"progress": 3, "total": 10}}
    assert not {"id", "state", "progress"} & polled.keys()


async def test_progress_without_a_total_is_told_as_it_is(lesson: Any, connect_legacy: Any) -> None:
    """Nothing says of how much it is a part; and before a report there is no hint (C-06)."""
    async with connect_legacy(lesson.server) as peer:
        silent = await peer.request("tasks/status", {"taskId": await peer.start("add", {"a": 1, "b": 2})})
        task_id = await peer.start("render", {"total": None})
        await lesson.running.wait()
        working = await peer.request("tasks/status", {"taskId": task_id})

    assert "progress" not in silent
    assert working["progress"] == 3


async def test_a_failed_tool_has_failed_in_every_word(lesson: Any, connect_legacy: Any) -> None:
    """State and status are one fact (C-04)."""

    @lesson.server.tool()
    @lesson.tasks.task()
    async def break_down() -> str:
        raise RuntimeError("no")

    async with connect_legacy(lesson.server) as peer:
        task_id = await peer.start("break_down")
        result = await peer.result(task_id)
        failed = await peer.request("tasks/status", {"taskId": task_id})

    assert failed["state"] == failed["status"] == "failed"
    assert failed["statusMessage"] == result["content"][0]["text"]


async def test_a_finished_task_may_be_cancelled_and_stays_as_it_is(
    lesson: Any, connect_legacy: Any, refused: Any
) -> None:
    """Cancel can be repeated without harm, and says how the task stands; an unknown one is an error (C-08)."""
    async with connect_legacy(lesson.server) as peer:
        cancelled = await peer.start("wait")
        answers = [await peer.cancel(cancelled) for _ in range(2)]
        finished = await peer.start("add", {"a": 1, "b": 2})
        await peer.result(finished)
        answers.append(await peer.cancel(finished))
        result = await peer.result(finished)
        with refused(-32602, "Task not found"):
            await peer.cancel("tsk_unknown")

    assert [answer["status"] for answer in answers] == ["cancelled", "cancelled", "completed"]
    assert result["structuredContent"] == {"result": 3}


async def test_each_change_of_state_and_progress_is_sent(lesson: Any, connect_legacy: Any) -> None:
    """A client that listens need not poll; what nothing has changed in is not sent again (C-10)."""
    said = asyncio.Event()

    @lesson.server.tool()
    @lesson.tasks.task()
    async def talk(ctx: Context) -> None:
        await ctx.report_progress(3, 10, "rendering")
        await said.wait()
        await ctx.report_progress(3, 10, "still rendering")
        await lesson.opened.wait()

    async with connect_legacy(lesson.server) as peer:
        task_id = await peer.start("talk")
        working = {"taskId": task_id, "state": "working", "progress": 0.3}
        await peer.until_notified(lambda notified: (UPDATED, working) in notified)
        said.set()
        with anyio.fail_after(30):
            while (await peer.get(task_id))["statusMessage"] != "still rendering (3/10)":
                await anyio.lowlevel.checkpoint()
        lesson.opened.set()
        await peer.until_notified(lambda notified: any(params.get("state") == "completed" for _, params in notified))

    sent = [params for method, params in peer.notified if method == UPDATED]
    assert sent == [working, {"taskId": task_id, "state": "completed", "progress": 0.3}]
    assert STATUS in [method for method, _ in peer.notified]


@pytest.mark.filterwarnings("ignore:The sampling capability is deprecated")
async def test_a_task_whose_tool_asks_the_clients_model_waits_for_input(lesson: Any, connect_legacy: Any) -> None:
    """The lesson would show it as working; the specification says what it waits for, and comes first (C-17)."""
    peers: list[Any] = []
    seen = []

    @lesson.server.tool()
    @lesson.tasks.task()
    async def summarize(ctx: Context) -> str:
        messages = [SamplingMessage(role="user", content=TextContent(type="text", text="Summarize."))]
        return (await ctx.session.create_message(messages, max_tokens=10)).model

    async def sample(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        [peer] = peers
        task_id = params["_meta"]["io.modelcontextprotocol/related-task"]["taskId"]
        seen.append(await peer.request("tasks/status", {"taskId": task_id}))
        return {"role": "assistant", "model": "small", "content": {"type": "text", "text": "Short."}}

    async with connect_legacy(lesson.server, capabilities={"sampling": {}}, respond=sample) as peer:
        peers.append(peer)
        result = await peer.result(await peer.start("summarize"))

    assert [status["state"] for status in seen] == ["input_required"]
    assert result["content"] == [{"type": "text", "text": "small"}]


async def test_the_result_of_a_live_task_is_waited_for(lesson: Any, connect_legacy: Any) -> None:
    """The lesson allows it, and the specification demands it (C-07)."""
    async with connect_legacy(lesson.server) as peer:
        waiting = asyncio.create_task(peer.result(await peer.start("wait")))
        await lesson.running.wait()
        lesson.opened.set()
        result = await waiting

    assert result["content"] == [{"type": "text", "text": "through"}]


async def test_fail_fast_answers_at_once_that_the_task_is_not_finished(
    make_reports: Any, connect_legacy: Any, refused: Any, local: AuthContext
) -> None:
    """A client that cannot wait hears the lesson's 404, and the result once it is there (C-07)."""
    reports = make_reports(compat="lesson", result_mode="fail-fast")

    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        with pytest.raises(MCPError) as early:
            await peer.result(task_id)
        with refused(-32602, "Task not found"):
            await peer.result("tsk_unknown")
        await peer.cancel(task_id)
        with refused(-32603, "cancelled"):
            await peer.result(task_id)
        finished = await peer.start("add", {"a": 1, "b": 2})
        await reports.tasks.store.wait_for_task(finished, auth=local)
        result = await peer.result(finished)

    assert (early.value.error.code, early.value.error.data) == (404, {"httpStatus": 404, "status": "working"})
    assert result["structuredContent"] == {"result": 3}


async def test_without_the_profile_nothing_of_it_is_there(reports: Any, connect_legacy: Any, refused: Any) -> None:
    """The words of the specification are the default, and the only ones."""
    async with connect_legacy(reports.server) as peer:
        reports.opened.set()
        inline = await peer.call("wait", **REQUIRED)
        created = await peer.call("wait", task={}, **REQUIRED)
        task_id = created["task"]["taskId"]
        await peer.result(task_id)
        await peer.until_notified(lambda notified: STATUS in dict(notified))
        with refused(-32601):
            await peer.request("tasks/status", {"taskId": task_id})
        with refused(-32602, "already in terminal status"):
            await peer.cancel(task_id)

    assert inline["content"] == [{"type": "text", "text": "through"}]
    assert created.keys() == {"task"}
    assert {method for method, _ in peer.notified} == {STATUS}


async def test_a_client_of_2026_never_sees_the_profile(lesson: Any, connect: Any, refused: Any) -> None:
    """There the names below tasks/ belong to the extension, and to it alone (X26-30, X26-32)."""
    meta = {"task": {"required": True}}

    async with connect(lesson.server, declares=False) as undeclared:
        inline = await undeclared.request("tools/call", {"name": "greet", "arguments": {"name": "Ada"}, "_meta": meta})
    async with connect(lesson.server) as peer:
        greeted = await peer.request("tools/call", {"name": "greet", "arguments": {"name": "Ada"}, "_meta": meta})
        created = await peer.call("render")
        task_id = created["taskId"]
        await lesson.running.wait()
        polled = await peer.get(task_id)
        with refused(-32601):
            await peer.request("tasks/status", {"taskId": task_id})
        acknowledged = [await peer.cancel(task_id) for _ in range(2)]

    assert inline["content"] == greeted["content"] == [{"type": "text", "text": "Hello, Ada!"}]
    for answer in (created, polled):
        assert not {"_meta", "task", "id", "state", "progress"} & answer.keys()
    assert acknowledged == [{"resultType": "complete"}] * 2


@pytest.mark.parametrize("version", ["2025-06-18"])
async def test_older_generations_never_see_it_either(
    lesson: Any, connect_legacy: Any, refused: Any, version: str
) -> None:
    """The profile stands beside the tasks of 2025-11-25, and where there are none, there is nothing."""
    lesson.opened.set()

    async with connect_legacy(lesson.server, version=version) as peer:
        inline = await peer.call("wait", **REQUIRED)
        with refused(-32601):
            await peer.request("tasks/status", {"taskId": "tsk_1"})

    assert inline["content"] == [{"type": "text", "text": "through"}]


async def test_tasks_of_other_requestors_are_unknown_to_it(
    make_reports: Any, connect_legacy: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """Another name for a request is no way around whose task it is."""
    reports = make_reports(compat="lesson", result_mode="fail-fast", **authorization)

    async with (
        serve(reports.server) as url,
        connect_legacy(url, token="alice") as alice,
        connect_legacy(url, token="bob") as bob,
    ):
        task_id = await alice.start("wait")
        for method in ("tasks/get", "tasks/status", "tasks/result", "tasks/cancel"):
            with refused(-32602, "Task not found"):
                await bob.request(method, {"taskId": task_id})


@pytest.mark.parametrize("mode", ["block", "fail-fast"])
async def test_a_server_on_fastmcp_speaks_it_too(
    database_url: str, connect: Any, connect_legacy: Any, serve: Any, refused: Any, mode: Any
) -> None:
    """Which library a server is written with is nothing that a client knows."""
    opened = asyncio.Event()
    tasks = FastMCPTasks(url=database_url, compat="lesson", result_mode=mode, drain=timedelta(0))
    server: FastMCP[Any] = FastMCP("reports")
    server.add_extension(tasks)

    @server.tool(task=True)
    async def wait() -> str:
        await opened.wait()
        return "through"

    async with serve(server) as url, connect_legacy(url) as peer, connect(url) as modern:
        created = await peer.call("wait", **REQUIRED)
        task_id = created["_meta"]["task"]["id"]
        status = await peer.request("tasks/status", {"taskId": task_id})
        with refused(-32601):
            await modern.request("tasks/status", {"taskId": task_id})
        if mode == "fail-fast":
            with refused(404):
                await peer.result(task_id)
        opened.set()
        await tasks.store.wait_for_task(task_id, auth=None)
        result = await peer.result(task_id)
        cancelled = await peer.cancel(task_id)

    assert created["task"]["taskId"] == task_id
    assert status["state"] == "working"
    assert result["content"] == [{"type": "text", "text": "through"}]
    assert cancelled["status"] == "completed"


@pytest.mark.parametrize("options", [{"compat": "course"}, {"result_mode": "404"}, {"result_mode": "fail-fast"}])
@pytest.mark.parametrize("extension", [TasksExtension, FastMCPTasks], ids=["sdk", "fastmcp"])
def test_a_profile_that_makes_no_sense_is_refused(extension: Any, options: dict[str, Any]) -> None:
    """A misspelled option would leave every client with the default."""
    with pytest.raises(ValueError, match=r"compat|result_mode"):
        extension("sqlite://", **options)
