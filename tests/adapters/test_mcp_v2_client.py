"""TasksClient: tools that answer with a task, called from Python."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.context import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    InputRequiredResult,
)
from pydantic import BaseModel

from taskstore import AuthContext, TaskStatus
from taskstore.adapters.mcp_v2 import PolledTask, RemoteTask, TaskCancelledError, TasksClient, TasksExtension

OFTEN = timedelta(milliseconds=20)

Connected = Callable[..., AbstractAsyncContextManager[Client]]


class Name(BaseModel):
    """What the tools below ask for."""

    name: str


class Fixture:
    """A server with a tool for each way in which a call can go."""

    def __init__(self, database_url: str, **options: Any) -> None:
        self.tasks = TasksExtension(database_url, default_poll_interval=OFTEN, drain=timedelta(0))
        self.server = MCPServer("client", extensions=[self.tasks], lifespan=self.tasks.lifespan, **options)
        self.running, self.opened = asyncio.Event(), asyncio.Event()
        server, tasks = self.server, self.tasks

        @server.tool()
        @tasks.task(mode="required")
        async def wait(ctx: Context) -> str:
            self.running.set()
            await ctx.report_progress(1, 2, "waiting")
            await self.opened.wait()
            return "through"

        @server.tool()
        @tasks.task()
        async def break_down() -> str:
            raise MCPError(-32000, "Quota exceeded", {"limit": 3})

        @server.tool()
        @tasks.task()
        async def raise_an_exception() -> str:
            raise RuntimeError

        @server.tool()
        @tasks.task()
        async def await_a_name(ctx: Context) -> str:
            answer = await ctx.elicit("Your name?", Name)
            return answer.data.name if answer.action == "accept" else answer.action

        @server.tool()
        @tasks.task()
        async def return_questions(ctx: Context) -> str | InputRequiredResult:
            if ctx.input_responses is None:
                return InputRequiredResult(input_requests={"a": question("a"), "b": question("b")})
            return " and ".join(answer_of(ctx, key) for key in ("a", "b"))

        @server.tool()
        @tasks.task(input_first=True)
        async def ask_first(ctx: Context) -> str | InputRequiredResult:
            if ctx.input_responses is None:
                return InputRequiredResult(input_requests={"a": question("a")})
            return f"Hello {answer_of(ctx, 'a')}"

        @server.tool()
        async def greet() -> str:
            return "Hello"


def question(message: str) -> ElicitRequest:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def answer_of(ctx: Context, key: str) -> str:
    answer = (ctx.input_responses or {})[key]
    assert isinstance(answer, ElicitResult)
    return str((answer.content or {})["name"])


async def answer_with_the_question(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    return ElicitResult(action="accept", content={"name": f"<{params.message}>"})


@pytest.fixture
def fixture(database_url: str) -> Fixture:
    return Fixture(database_url)


@asynccontextmanager
async def _connected(
    target: Any, tasks: TasksClient, token: str | None = None, **options: Any
) -> AsyncIterator[Client]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers) as http:
        where = streamable_http_client(target, http_client=http) if isinstance(target, str) else target
        async with Client(where, mode="2026-07-28", extensions=[tasks], **options) as client:
            yield client


def text_of(result: object) -> str:
    assert isinstance(result, CallToolResult)
    return str((result.structured_content or {})["result"])


async def test_a_call_returns_the_result_as_if_there_were_no_task(fixture: Fixture) -> None:
    """Code that calls tools need not change; it may show how far the task is."""
    polled: list[str | None] = []

    async def on_poll(task: PolledTask) -> None:
        polled.append(task.status_message)
        if task.status_message == "waiting (1/2)":
            fixture.opened.set()

    async with _connected(fixture.server, TasksClient(on_poll=on_poll)) as client:
        result = await client.call_tool("wait")
        direct = await client.call_tool("greet")

    assert text_of(result) == "through"
    assert "waiting (1/2)" in polled
    assert text_of(direct) == "Hello"


async def test_an_error_of_the_call_is_raised_and_a_failure_of_the_tool_is_returned(fixture: Fixture) -> None:
    """As without a task: one is the protocol's, the other is for the model to read."""
    async with _connected(fixture.server, TasksClient()) as client:
        with pytest.raises(MCPError, match="Quota exceeded") as caught:
            await client.call_tool("break_down")
        failed = await client.call_tool("raise_an_exception")

    assert (caught.value.code, caught.value.data) == (-32000, {"limit": 3})
    assert failed.is_error


@pytest.mark.parametrize(
    ("tool", "expected"),
    [("await_a_name", "<Your name?>"), ("return_questions", "<a> and <b>"), ("ask_first", "Hello <a>")],
)
async def test_questions_go_to_the_clients_callbacks(fixture: Fixture, tool: str, expected: str) -> None:
    """Whether the tool awaits its questions, returns them, or asks before there is a task: who answers can't tell."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks, elicitation_callback=answer_with_the_question) as client:
        result = await client.call_tool(tool)

    assert text_of(result) == expected


async def test_a_question_is_asked_once_though_the_server_is_slow_to_notice_the_answer(database_url: str) -> None:
    """Acknowledged answers may show later: the specification calls a server eventually consistent."""
    asked: list[str] = []
    shown: dict[str, Any] = {}

    async def answer(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        asked.append(params.message)
        return await answer_with_the_question(context, params)

    async def show_it_twice(ctx: Any, call_next: Any) -> Any:
        """Answer one poll with what the poll before showed, if that was questions."""
        if ctx.method != "tasks/get" or (stale := shown.pop("questions", None)) is None:
            result = await call_next(ctx)
            if ctx.method == "tasks/get" and result["status"] == "input_required":
                shown["questions"] = result
            return result
        return stale

    fixture = Fixture(database_url, middleware=[show_it_twice])
    async with _connected(fixture.server, TasksClient(), elicitation_callback=answer) as client:
        result = await client.call_tool("return_questions")

    assert text_of(result) == "<a> and <b>"
    assert sorted(asked) == ["a", "b"]


async def test_a_callback_that_refuses_ends_the_call_not_the_task(fixture: Fixture) -> None:
    """Somebody else may still answer."""

    async def refuse(context: ClientRequestContext, params: ElicitRequestParams) -> ErrorData:
        return ErrorData(code=-32000, message="Nobody is here.")

    tasks = TasksClient()
    async with _connected(fixture.server, tasks, elicitation_callback=refuse) as client:
        started = await tasks.start(client, "return_questions")
        assert isinstance(started, RemoteTask)
        with pytest.raises(MCPError, match="Nobody is here"):
            await started.result()
        left = await started.get()

    assert left.status == "input_required"


async def test_a_task_can_be_taken_up_by_its_id_in_another_process(
    database_url: str, serve: Any, authorization: dict[str, Any]
) -> None:
    """The id is all that must be kept; over HTTP each request names it in its routing header."""
    fixture = Fixture(database_url, **authorization)
    tasks, later = TasksClient(), TasksClient()

    async with serve(fixture.server) as url:
        async with _connected(url, tasks, token="alice") as client:
            started = await tasks.start(client, "wait")
            assert isinstance(started, RemoteTask)
            kept = started.task_id
        fixture.opened.set()
        async with _connected(url, later, token="alice") as client:
            result = await later.resume(client, kept).result()
        async with _connected(url, later, token="bob") as client:
            with pytest.raises(MCPError, match="not found"):
                await later.resume(client, kept).get()

    assert text_of(result) == "through"


async def test_a_start_that_is_answered_at_once_returns_the_result(fixture: Fixture) -> None:
    """Whether there is a task is the server's decision alone."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks) as client:
        assert text_of(await tasks.start(client, "greet")) == "Hello"


async def test_what_is_asked_before_there_is_a_task_is_answered_by_start(fixture: Fixture) -> None:
    """The call that brings the answers is the one that starts the task."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks, elicitation_callback=answer_with_the_question) as client:
        started = await tasks.start(client, "ask_first")
        assert isinstance(started, RemoteTask)
        result = await started.result()

    assert text_of(result) == "Hello <a>"


async def test_a_cancelled_task_has_no_result(fixture: Fixture) -> None:
    """Neither a result nor an error would be true."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks) as client:
        started = await tasks.start(client, "wait")
        assert isinstance(started, RemoteTask)
        await started.cancel()
        await started.cancel()  # as often as one likes
        with pytest.raises(TaskCancelledError) as caught:
            await started.result()

    assert caught.value.task_id == started.task_id


async def test_answers_can_be_given_by_hand(fixture: Fixture, wait_for: Any, local: AuthContext) -> None:
    """An application may show the questions in a window of its own, and have them answered one by one."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks, elicitation_callback=answer_with_the_question) as client:
        started = await tasks.start(client, "return_questions")
        assert isinstance(started, RemoteTask)
        await wait_for(fixture.tasks.store, started.task_id, local, TaskStatus.INPUT_REQUIRED)
        for key in (await started.get()).input_requests or {}:
            await started.update({key: {"action": "accept", "content": {"name": "me"}}})
        result = await started.result()

    assert text_of(result) == "me and me"


async def test_a_caller_that_gives_up_leaves_the_task_running(
    fixture: Fixture, wait_for: Any, local: AuthContext
) -> None:
    """The work was asked for, and its result will be there for whoever resumes it."""
    tasks = TasksClient()

    async with _connected(fixture.server, tasks) as client:
        calling = asyncio.create_task(client.call_tool("wait"))
        await asyncio.wait_for(fixture.running.wait(), 60)
        calling.cancel()
        fixture.opened.set()
        (task,) = (await fixture.tasks.store.list_tasks(auth=local)).tasks
        await wait_for(fixture.tasks.store, task.task_id, local, TaskStatus.COMPLETED)
        result = await tasks.resume(client, task.task_id).result()

    assert text_of(result) == "through"
