"""Durable tasks through the SDK's own client, in process: MCP 2025-11-25, "Tasks"."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

import anyio
import pytest
from mcp import types
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import McpError

from taskstore import AuthContext, StoreOptions, TaskStore
from taskstore.adapters.mcp_v1 import DurableTaskContext, DurableTasks, enable_durable_tasks
from taskstore.operations import Limits

RELATED_TASK = "io.modelcontextprotocol/related-task"
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
Asked = Callable[[Any, types.ElicitRequestParams], Awaitable[Any]]


def text_of(result: types.CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, types.TextContent)
    return block.text


def answer(said: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=said)], isError=is_error)


# --- becoming a task


async def test_a_call_becomes_a_task_that_is_polled_to_its_result(
    reports: Any, tasks: DurableTasks, connect: Any, local: AuthContext
) -> None:
    """The whole point: the call answers at once, the result comes later."""
    async with connect(reports.server) as peer:
        created = await peer.create("wait", ttl=60_000)
        task_id = created.task.taskId
        await reports.running.wait()
        working = await peer.get(task_id)
        reports.opened.set()
        result = await peer.result(task_id)
        completed = await peer.get(task_id)

    assert (created.task.status, created.task.ttl, created.task.pollInterval) == ("working", 60_000, 1_000)
    assert (working.status, completed.status) == ("working", "completed")
    assert text_of(result) == "through"
    assert result.meta == {RELATED_TASK: {"taskId": task_id}}
    assert working.meta is completed.meta is None


async def test_the_server_declares_what_it_serves(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-01, T25-06: clients ask for nothing else."""
    async with connect(reports.server) as peer:
        declared = peer.session.get_server_capabilities().tasks

    assert declared.model_dump(exclude_none=True) == {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}}


async def test_the_task_is_durable_before_the_client_hears_of_it(
    reports: Any, tasks: DurableTasks, connect: Any, local: AuthContext, database_url: str
) -> None:
    """A client may store the id and go away at once; another process must find the task, and its request."""
    async with connect(reports.server) as peer:
        task_id = await peer.start("wait", {"pages": 3})

        async with TaskStore.open(database_url) as elsewhere:
            task = await elsewhere.get_task(task_id, auth=local)

    assert (task.method, task.name, task.server) == ("tools/call", "wait", "reports")


async def test_calls_without_the_field_task_run_as_before(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-02, T25-05: optional tools and tools without tasks are plain tools."""
    async with connect(reports.server) as peer:
        results = [await peer.session.call_tool(name, {}) for name in ("quick", "greet")]

    assert [text_of(result) for result in results] == ["inline", "inline"]


@pytest.mark.parametrize("tool", ["greet", "unheard_of"])
async def test_a_tool_that_takes_no_task_refuses_one(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any, tool: str
) -> None:
    """T25-04."""
    async with connect(reports.server) as peer:
        with refused(-32601):
            await peer.create(tool)


async def test_a_refusal_by_the_handler_itself_is_a_protocol_error_too(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any
) -> None:
    """Handlers are written with validate_task_mode(), whose exception the SDK's decorator swallows."""

    @reports.server.call_tool()
    async def call_tool(name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        reports.server.request_context.experimental.validate_task_mode(types.TASK_REQUIRED)
        raise AssertionError("must not come here")

    async with connect(reports.server) as peer:
        with refused(-32601):
            await peer.session.call_tool("quick", {})


async def test_a_call_that_ends_before_it_is_a_task_is_answered_with_one(
    reports: Any, tasks: DurableTasks, connect: Any
) -> None:
    """The client reads nothing but a CreateTaskResult: bad arguments must not look like a broken server (T25-16)."""
    async with connect(reports.server) as peer:
        task_id = await peer.start("quick", {"pages": "three"})
        result = await peer.result(task_id)
        polled = await peer.get(task_id)

    assert result.isError
    assert text_of(result).startswith("Input validation error")
    assert polled.status == "failed"
    assert polled.statusMessage == text_of(result)


async def test_handlers_may_be_registered_before_and_after(database_url: str, connect: Any) -> None:
    """Where the one call stands in a module must not matter."""

    async def list_tools() -> list[types.Tool]:
        execution = types.ToolExecution(taskSupport=types.TASK_REQUIRED)
        return [types.Tool(name="report", inputSchema={"type": "object"}, execution=execution)]

    async def work(task: ServerTaskContext) -> types.Result:
        return answer("done")

    results = []
    for before in (True, False):
        server: Server[Any, Any] = Server("reports")

        async def call_tool(name: str, arguments: dict[str, Any], server: Any = server) -> Any:
            return await server.request_context.experimental.run_task(work)

        def register(server: Any = server, call_tool: Any = call_tool) -> None:
            server.list_tools()(list_tools)
            server.call_tool()(call_tool)

        if before:
            register()
        tasks = enable_durable_tasks(server, database_url, drain=timedelta(0))
        if not before:
            register()
        async with tasks, connect(server) as peer:
            results.append(text_of(await peer.result(await peer.start("report"))))

    assert results == ["done", "done"]


async def test_the_work_sees_its_request(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """Tools decide by the request's context; that must not change because the call is a task."""

    async def who(task: ServerTaskContext) -> types.Result:
        context = reports.server.request_context
        return answer(f"{context.meta.progressToken} {context.experimental.is_task}")

    reports.works["who"] = who
    async with connect(reports.server) as peer:
        result = await peer.result(await peer.start("who", token="t-1"))

    assert text_of(result) == "t-1 True"


async def test_an_immediate_answer_for_the_model_is_passed_on(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """The specification lets a host show it at once."""

    @reports.server.call_tool()
    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        experimental = reports.server.request_context.experimental
        return await experimental.run_task(reports.works[name], model_immediate_response="On it.")

    async with connect(reports.server) as peer:
        created = await peer.create("quick")

    assert created.meta == {"io.modelcontextprotocol/model-immediate-response": "On it."}


async def test_ids_are_not_for_tools_to_choose(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-09, T25-44: a chosen id may be guessed."""

    @reports.server.call_tool()
    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        return await reports.server.request_context.experimental.run_task(reports.works[name], task_id="mine")

    async with connect(reports.server) as peer:
        result = await peer.result(await peer.start("quick"))

    assert result.isError
    assert "the store's own" in text_of(result)


async def test_what_cannot_be_stored_is_refused(reports: Any, database_url: str, connect: Any, refused: Any) -> None:
    """And a limit that waiting cures can be told from a fault of the server."""
    options = StoreOptions(limits=Limits(live_tasks=1, payload_bytes=100))
    tasks = enable_durable_tasks(reports.server, database_url, options=options, drain=timedelta(0))
    async with tasks, connect(reports.server) as peer:
        with refused(-32602, "$.request"):
            await peer.create("wait", {"text": "x" * 200})
        await peer.create("wait")
        with pytest.raises(McpError) as over:
            await peer.create("wait")

    assert over.value.error.code == -32603
    assert over.value.error.data == {"reason": "LIMIT_EXCEEDED"}


# --- what the work says


async def test_what_the_work_says_is_polled_and_told(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-32: a client that listens need not poll; one that polls misses nothing."""

    async def talk(task: ServerTaskContext) -> types.Result:
        await task.update_status("halfway")
        await reports.opened.wait()
        return answer("done")

    reports.works["talk"] = talk
    async with connect(reports.server) as peer:
        task_id = await peer.start("talk")
        await peer.until(lambda notified: said(notified, task_id) == [("working", "halfway")])
        polled = await peer.get(task_id)
        reports.opened.set()
        await peer.until(lambda notified: said(notified, task_id)[-1:] == [("completed", "halfway")])

    assert (polled.status, polled.statusMessage) == ("working", "halfway")


async def test_progress_is_shown_by_polls_and_only_ever_rises(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-33: one token for the whole life of the task, and a value that increases."""

    async def report(task: DurableTaskContext) -> types.Result:
        for page in (1, 3, 2, 4):
            await task.report_progress(page, 4, f"page {page}")
        await reports.opened.wait()
        return answer("done")

    reports.works["report"] = report
    async with connect(reports.server) as peer:
        task_id = await peer.start("report", token="token-7")
        polled = await peer.polled(task_id, lambda task: task.statusMessage == "page 4 (4/4)")
        reports.opened.set()
        await peer.result(task_id)
        await peer.until(lambda notified: len(progress(notified)) == 3)

    assert polled.status == "working"
    assert [(each.progressToken, each.progress) for each in progress(peer.notified)] == [
        ("token-7", 1),
        ("token-7", 3),
        ("token-7", 4),
    ]


async def test_the_work_may_finish_its_task_and_go_on(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """The SDK's context has complete() and fail(); what comes after them is the work's own affair."""

    async def early(task: ServerTaskContext) -> types.Result:
        await task.complete(answer("early"))
        assert task.task.status == "completed"
        await task.update_status("too late")
        return await reports.wait(task)  # type: ignore[no-any-return]

    async def fails(task: ServerTaskContext) -> types.Result:
        await task.fail("no paper")
        return answer("ignored")

    reports.works |= {"early": early, "fails": fails}
    async with connect(reports.server) as peer:
        result = await peer.result(early_id := await peer.start("early"))
        await reports.running.wait()
        assert not reports.stopped.is_set()
        reports.opened.set()
        await reports.stopped.wait()
        polled = await peer.get(early_id)
        failed_id = await peer.start("fails")
        with pytest.raises(McpError, match="no paper"):
            await peer.result(failed_id)

    assert text_of(result) == "early"
    assert (polled.status, polled.statusMessage) == ("completed", None)


async def test_an_unexpected_exception_keeps_its_text_to_itself(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any
) -> None:
    """It may hold a password; the log has it."""

    async def crash(task: ServerTaskContext) -> types.Result:
        raise RuntimeError("password=hunter2")

    reports.works["crash"] = crash
    async with connect(reports.server) as peer:
        task_id = await peer.start("crash")
        with refused(-32603, "Error executing tool crash"):
            await peer.result(task_id)
        polled = await peer.get(task_id)

    assert (polled.status, polled.statusMessage) == ("failed", "Error executing tool crash")


async def test_work_that_returns_no_result_fails(reports: Any, tasks: DurableTasks, connect: Any, refused: Any) -> None:
    """Nothing else could be sent to a client."""

    async def wrong(task: ServerTaskContext) -> Any:
        return "text"

    reports.works["wrong"] = wrong
    async with connect(reports.server) as peer:
        task_id = await peer.start("wrong")
        with refused(-32603, "invalid result"):
            await peer.result(task_id)


async def test_nulls_inside_a_result_survive(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """T25-17: exactly what the call would have returned."""
    structured = {"page": None, "rows": [None, {"a": None}]}

    async def nulls(task: ServerTaskContext) -> types.Result:
        return types.CallToolResult(content=[], structuredContent=structured)

    reports.works["nulls"] = nulls
    async with connect(reports.server) as peer:
        result = await peer.result(await peer.start("nulls"))

    assert result.structuredContent == structured


async def test_a_task_without_end_is_shown_as_one(
    reports: Any, database_url: str, connect: Any, local: AuthContext
) -> None:
    """Tasks made here have a ttl; others on the same database may have none, and null must reach the client."""
    options = StoreOptions(default_ttl=None, max_ttl=None)
    tasks = enable_durable_tasks(reports.server, database_url, options=options)
    async with tasks, connect(reports.server) as peer:
        endless = await tasks.store.create_task(auth=local)
        created = await peer.create("quick")
        polled = await peer.get(endless.task_id)
        listed = {task.taskId: task.ttl for task in (await peer.page()).tasks}
        cancelled = await peer.cancel(endless.task_id)

    assert polled.ttl is cancelled.ttl is None
    assert listed == {endless.task_id: None, created.task.taskId: 3_600_000}


# --- cancel


async def test_cancel_is_on_the_record_at_once_and_stops_the_work(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any
) -> None:
    """T25-37, T25-38: the answer says cancelled already; a finished task refuses."""
    async with connect(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()
        cancelled = await peer.cancel(task_id)
        await reports.stopped.wait()
        with refused(-32602, "already in terminal status 'cancelled'"):
            await peer.cancel(task_id)
        with refused(-32603, "cancelled"):
            await peer.result(task_id)
        await peer.until(lambda notified: said(notified, task_id)[-1:] == [("cancelled", cancelled.statusMessage)])

    assert cancelled.status == "cancelled"


async def test_a_cancellation_in_another_process_reaches_the_work(
    reports: Any, tasks: DurableTasks, connect: Any, local: AuthContext, database_url: str
) -> None:
    """Behind a load balancer the request may arrive anywhere."""
    async with connect(reports.server) as peer, TaskStore.open(database_url) as elsewhere:
        task_id = await peer.start("wait")
        await reports.running.wait()

        await elsewhere.cancel_task(task_id, auth=local)

        with anyio.fail_after(30):
            await reports.stopped.wait()


async def test_a_waiter_hears_of_a_finish_in_another_process(
    reports: Any, tasks: DurableTasks, connect: Any, local: AuthContext, database_url: str
) -> None:
    """T25-18: tasks/result waits, wherever the work runs."""
    async with connect(reports.server) as peer, TaskStore.open(database_url) as elsewhere:
        task = await elsewhere.create_task(auth=local)
        waiting = asyncio.create_task(peer.result(task.task_id))
        await anyio.wait_all_tasks_blocked()

        await elsewhere.handle(task).complete({"content": []})

        with anyio.fail_after(30):
            assert (await waiting).content == []


async def test_a_cancelled_creating_request_leaves_its_task_alone(
    reports: Any, tasks: DurableTasks, connect: Any
) -> None:
    """T25-34: a task is cancelled by tasks/cancel and by nothing else."""
    async with connect(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()
        for request_id in range(10):
            params = types.CancelledNotificationParams(requestId=request_id)
            notification = types.ClientNotification(types.CancelledNotification(params=params))
            await peer.session.send_notification(notification)
        reports.opened.set()

        assert text_of(await peer.result(task_id)) == "through"


async def test_unknown_ids_of_every_form_are_refused_alike(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any
) -> None:
    """T25-49; an id as the SDK makes them is no better than any other."""
    ids = ["nope", "tsk_" + "0" * 64, "a\x00b", "0" * 32 + ":00000000-0000-0000-0000-000000000000"]
    async with connect(reports.server) as peer:
        for task_id in ids:
            for request in (peer.get, peer.result, peer.cancel):
                with refused(-32602, "Failed to retrieve task: Task not found"):
                    await request(task_id)


# --- questions


async def confirm(task: ServerTaskContext) -> types.Result:
    asked = await task.elicit("Delete?", SCHEMA)
    return answer(f"{asked.action} {asked.content}")


async def accept(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"ok": True})


async def test_a_question_reaches_the_client_that_waits_and_its_answer_the_work(
    reports: Any, tasks: DurableTasks, connect: Any
) -> None:
    """T25-21..23: input_required while it is open; asked on the stream of tasks/result, with the mark of the task."""
    asked: list[Mapping[str, Any]] = []

    async def remember(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.append(params.model_dump(by_alias=True, exclude_none=True))
        return await accept(context, params)

    reports.works["confirm"] = confirm
    async with connect(reports.server, elicitation_callback=remember) as peer:
        task_id = await peer.start("confirm")
        polled = await peer.polled(task_id, lambda task: task.status == "input_required")
        assert not asked
        result = await peer.result(task_id)

    assert polled.status == "input_required"
    assert text_of(result) == "accept {'ok': True}"
    (params,) = asked
    assert params["message"] == "Delete?"
    assert params["_meta"] == {RELATED_TASK: {"taskId": task_id}}


async def test_a_question_waits_for_a_client_that_comes_back(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """The connection of the one who was asked first may be gone; the question is in the database."""
    reports.works["confirm"] = confirm
    put = asyncio.Event()

    async def never(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        put.set()
        await asyncio.Event().wait()
        raise AssertionError("never comes here")

    async with connect(reports.server, elicitation_callback=never) as peer:
        task_id = await peer.start("confirm")
        waiting = asyncio.create_task(peer.result(task_id))
        await put.wait()
        waiting.cancel()
    async with connect(reports.server) as mute, connect(reports.server, elicitation_callback=accept) as later:
        unable = asyncio.create_task(mute.result(task_id))
        await anyio.wait_all_tasks_blocked()
        results = [await later.result(task_id), await unable]

    assert [text_of(result) for result in results] == ["accept {'ok': True}"] * 2


async def test_a_clients_error_is_the_answer(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """The work decides what to make of it."""

    async def careful(task: ServerTaskContext) -> types.Result:
        try:
            await task.elicit_url("Pay here.", "https://pay.example", "pay-1")
        except McpError as error:
            return answer(f"{error.error.code} {error.error.message}")
        raise AssertionError("must not come here")

    async def refuse(context: Any, params: types.ElicitRequestParams) -> types.ErrorData:
        return types.ErrorData(code=-32000, message="no screen")

    reports.works["careful"] = careful
    async with connect(reports.server, elicitation_callback=refuse) as peer:
        result = await peer.result(await peer.start("careful"))

    assert text_of(result) == "-32000 no screen"


async def test_the_clients_model_is_asked_like_its_user(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """Sampling goes the same way."""

    async def ask_model(task: ServerTaskContext) -> types.Result:
        content = types.TextContent(type="text", text="2 + 2?")
        said = await task.create_message([types.SamplingMessage(role="user", content=content)], max_tokens=10)
        assert isinstance(said.content, types.TextContent)
        return answer(said.content.text)

    async def sample(context: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        content = types.TextContent(type="text", text="4")
        return types.CreateMessageResult(role="assistant", content=content, model="m")

    reports.works["ask_model"] = ask_model
    async with connect(reports.server, sampling_callback=sample) as peer:
        result = await peer.result(await peer.start("ask_model"))

    assert text_of(result) == "4"


@pytest.mark.parametrize("tool", ["confirm", "sample"])
async def test_a_client_that_declared_nothing_is_not_asked(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any, tool: str
) -> None:
    """The work would wait for an answer that cannot come."""

    async def sample(task: ServerTaskContext) -> types.Result:
        await task.create_message([], max_tokens=10)
        raise AssertionError("must not come here")

    reports.works |= {"confirm": confirm, "sample": sample}
    async with connect(reports.server) as peer:
        task_id = await peer.start(tool)
        with refused(-32600, "does not support"):
            await peer.result(task_id)


@pytest.mark.parametrize("ask", ["elicit_as_task", "create_message_as_task"])
async def test_tasks_that_the_client_hosts_are_refused(
    reports: Any, tasks: DurableTasks, connect: Any, refused: Any, ask: str
) -> None:
    """They would be lost with the connection, and nobody would know."""

    async def host(task: ServerTaskContext) -> types.Result:
        arguments: tuple[Any, ...] = ("ok?", SCHEMA) if ask == "elicit_as_task" else ([],)
        keywords = {} if ask == "elicit_as_task" else {"max_tokens": 10}
        with pytest.raises(NotImplementedError, match="not durable"):
            await getattr(task, ask)(*arguments, **keywords)
        return answer("refused")

    reports.works["host"] = host
    async with connect(reports.server, elicitation_callback=accept) as peer:
        assert text_of(await peer.result(await peer.start("host"))) == "refused"


async def test_an_answer_that_comes_too_late_harms_nobody(reports: Any, tasks: DurableTasks, connect: Any) -> None:
    """The user answers a question of a task that was cancelled meanwhile."""
    put, released = asyncio.Event(), asyncio.Event()

    async def hesitate(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        put.set()
        await released.wait()
        return await accept(context, params)

    reports.works["confirm"] = confirm
    async with connect(reports.server, elicitation_callback=hesitate) as asked, connect(reports.server) as other:
        task_id = await asked.start("confirm")
        waiting = asyncio.create_task(asked.result(task_id))
        await put.wait()
        await other.cancel(task_id)
        released.set()
        with anyio.fail_after(30), pytest.raises(McpError, match="cancelled"):
            await waiting
        await asked.session.send_ping()

    assert not [note for note in asked.notified if isinstance(note.root, types.LoggingMessageNotification)]


# --- opening and closing


async def test_work_that_a_closing_server_interrupts_says_so(
    reports: Any, database_url: str, connect: Any, refused: Any
) -> None:
    """Not a crash, and not working for ever either; and the same server can be opened again."""
    tasks = enable_durable_tasks(reports.server, database_url, drain=timedelta(0))
    async with tasks, connect(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()

    async with tasks, connect(reports.server) as peer:
        with refused(-32603, "SERVER_STOPPED"):
            await peer.result(task_id)


async def test_running_work_gets_the_drain_time(reports: Any, database_url: str, connect: Any) -> None:
    """A restart of the server need not cost what is nearly done."""
    tasks = enable_durable_tasks(reports.server, database_url, drain=timedelta(minutes=1))
    async with tasks:
        async with connect(reports.server) as peer:
            task_id = await peer.start("wait")
            await reports.running.wait()
        asyncio.get_running_loop().call_soon(reports.opened.set)

    async with tasks, connect(reports.server) as peer:
        assert text_of(await peer.result(task_id)) == "through"


async def test_what_comes_while_the_tasks_close_is_refused(
    reports: Any, database_url: str, connect: Any, refused: Any
) -> None:
    """Connections last longer than the tasks then; a code 0, or a tool's error, would say nothing to a client."""
    tasks = enable_durable_tasks(reports.server, database_url, drain=timedelta(minutes=1))
    await tasks.__aenter__()
    async with connect(reports.server) as peer:
        task_id = await peer.start("wait")
        await reports.running.wait()
        closing = asyncio.create_task(tasks.__aexit__(None, None, None))
        await anyio.wait_all_tasks_blocked()
        with refused(-32603):
            await peer.create("quick")
        draining = await peer.get(task_id)
        reports.opened.set()
        await closing
        with refused(-32603, "not open"):
            await peer.get(task_id)
        with refused(-32603, "not open"):
            await peer.create("quick")

    assert draining.status == "working"


async def test_a_database_that_cannot_be_opened_stops_the_start(reports: Any, tmp_path: Any) -> None:
    """Better than a server whose every call fails."""
    tasks = enable_durable_tasks(reports.server, f"sqlite:///{tmp_path}/missing/tasks.db")

    with pytest.raises(Exception, match="missing"):
        async with tasks:
            raise AssertionError("must not open")


async def test_an_open_store_is_used_and_left_open(
    reports: Any, database_url: str, connect: Any, local: AuthContext
) -> None:
    """An application may share one store between its server and its own pages."""
    async with TaskStore.open(database_url) as store:
        async with enable_durable_tasks(reports.server, store), connect(reports.server) as peer:
            task_id = await peer.start("quick")
            await peer.result(task_id)

        assert (await store.get_task(task_id, auth=local)).is_finished


async def test_what_makes_no_sense_is_refused_at_once(reports: Any, database_url: str) -> None:
    """Otherwise the first call would fail, long after the server was started."""
    async with TaskStore.open(database_url) as store:
        with pytest.raises(ValueError, match="options"):
            enable_durable_tasks(reports.server, store, options=StoreOptions())
    for keyword in ("default_ttl", "default_poll_interval"):
        durations: dict[str, Any] = {keyword: timedelta(0)}
        with pytest.raises(ValueError, match=f"{keyword} must be longer"):
            enable_durable_tasks(reports.server, database_url, **durations)
    tasks = enable_durable_tasks(reports.server, database_url)
    with pytest.raises(RuntimeError, match="already"):
        enable_durable_tasks(reports.server, database_url)
    with pytest.raises(McpError, match="not open"):
        _ = tasks.store


def said(notified: list[types.ServerNotification], task_id: str) -> list[tuple[str, str | None]]:
    """List the statuses and messages that a client was told of a task."""
    told = [note.root for note in notified if isinstance(note.root, types.TaskStatusNotification)]
    return [(each.params.status, each.params.statusMessage) for each in told if each.params.taskId == task_id]


def progress(notified: list[types.ServerNotification]) -> list[types.ProgressNotificationParams]:
    return [note.root.params for note in notified if isinstance(note.root, types.ProgressNotification)]
