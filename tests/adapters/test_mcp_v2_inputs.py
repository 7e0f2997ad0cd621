"""Questions of a tool inside a task: they go to the client as input requests, and the answers come back to the tool."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    CreateMessageResultWithTools,
    SamplingMessage,
    TextContent,
    Tool,
)
from pydantic import BaseModel

from taskstore import AuthContext, TaskStatus
from taskstore.adapters.mcp_v2 import TasksExtension

WaitFor = Callable[..., Awaitable[Any]]


class Confirmation(BaseModel):
    """What the tools below ask for."""

    confirm: bool


ACCEPTED = {"action": "accept", "content": {"confirm": True}}


async def questions_of(peer: Any, tasks: TasksExtension, wait_for: WaitFor, task_id: str, owner: Any) -> dict[str, Any]:
    """Wait for a task's questions and return them by their keys."""
    await wait_for(tasks.store, task_id, owner, TaskStatus.INPUT_REQUIRED)
    polled = await peer.get(task_id)
    assert polled["status"] == "input_required"
    asked: dict[str, Any] = polled["inputRequests"]
    return asked


# --- questions that the tool awaits


async def test_an_awaited_elicitation_becomes_an_input_request_and_the_answer_resumes_the_tool(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """Under this protocol version servers cannot send requests; a tool that calls ctx.elicit() works all the same."""

    @server.tool()
    @tasks.task()
    async def delete(filename: str, ctx: Context) -> str:
        answer = await ctx.elicit(f"Delete {filename}?", Confirmation)
        assert answer.action == "accept"
        return f"deleted: {answer.data.confirm}"

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("delete", filename="a.txt")
        ((key, question),) = (await questions_of(peer, tasks, wait_for, task_id, local)).items()
        acknowledged = await peer.update(task_id, {key: ACCEPTED})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert question["method"] == "elicitation/create"
    assert question["params"]["message"] == "Delete a.txt?"
    assert question["params"]["requestedSchema"]["required"] == ["confirm"]
    assert acknowledged.keys() <= {"resultType", "_meta"}
    assert completed["result"]["content"] == [{"type": "text", "text": "deleted: True"}]


async def test_the_answer_may_come_through_another_process(
    server: MCPServer,
    tasks: TasksExtension,
    connect: Any,
    can_be_asked: Any,
    wait_for: WaitFor,
    local: AuthContext,
    database_url: str,
) -> None:
    """With several replicas behind one address the answer rarely arrives where the tool waits."""

    @server.tool()
    @tasks.task()
    async def delete(ctx: Context) -> str:
        return (await ctx.elicit("Delete?", Confirmation)).action

    other_tasks = TasksExtension(database_url)
    other = MCPServer("reports", extensions=[other_tasks], lifespan=other_tasks.lifespan)

    async with connect(server, **can_be_asked) as peer, connect(other, **can_be_asked) as elsewhere:
        task_id = await peer.start("delete")
        (key,) = await questions_of(elsewhere, other_tasks, wait_for, task_id, local)
        await elsewhere.update(task_id, {key: {"action": "decline"}})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "decline"}


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_sampling_roots_and_url_elicitation_work_too(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The SDK sends some of these on the connection, not on the request; neither may get lost."""

    @server.tool()
    @tasks.task()
    async def ask_all(ctx: Context) -> list[str]:
        hello = SamplingMessage(role="user", content=TextContent(text="Hello"))
        sampled = await ctx.session.create_message([hello], max_tokens=10)
        assert isinstance(sampled.content, TextContent)
        roots = await ctx.session.list_roots()
        visited = await ctx.elicit_url("Sign in", "https://example.com/", "e1")
        return [sampled.content.text, str(roots.roots[0].uri), visited.action]

    answers = {
        "sampling/createMessage": {"role": "assistant", "content": {"type": "text", "text": "Hi"}, "model": "m"},
        "roots/list": {"roots": [{"uri": "file:///home"}]},
        "elicitation/create": {"action": "accept"},
    }
    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("ask_all")
        for method, answer in answers.items():
            ((key, question),) = (await questions_of(peer, tasks, wait_for, task_id, local)).items()
            assert question["method"] == method
            await peer.update(task_id, {key: answer})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": ["Hi", "file:///home", "accept"]}


async def test_a_tool_may_ask_several_questions_at_once(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """Each answer goes to the question it is for, and each waiting part of the tool goes on by itself."""

    @server.tool()
    @tasks.task()
    async def ask_both(ctx: Context) -> list[bool]:
        answers = await asyncio.gather(ctx.elicit("yes?", Confirmation), ctx.elicit("no?", Confirmation))
        return [answer.action == "accept" and answer.data.confirm for answer in answers]

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("ask_both")
        task = await tasks.store.get_task(task_id, auth=local)
        async with asyncio.timeout(60):
            while len((questions := await peer.get(task_id)).get("inputRequests", {})) < 2:
                task = await tasks.store.wait_for_task(task_id, auth=local, since_version=task.version)
        for key, question in questions["inputRequests"].items():
            confirmed = question["params"]["message"] == "yes?"
            await peer.update(task_id, {key: {"action": "accept", "content": {"confirm": confirmed}}})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": [True, False]}


async def test_a_client_is_not_asked_for_what_it_did_not_declare(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The specification forbids it, and such a question would never be answered; the error says what is missing."""

    @server.tool()
    @tasks.task()
    async def elicit(ctx: Context) -> str:
        return (await ctx.elicit("Sure?", Confirmation)).action

    @server.tool()
    @tasks.task()
    async def sample_with_tools(ctx: Context) -> str:
        lookup = Tool(name="lookup", input_schema={"type": "object"})
        hello = SamplingMessage(role="user", content=TextContent(text="Hello"))
        request = CreateMessageRequest(
            params=CreateMessageRequestParams(messages=[hello], max_tokens=10, tools=[lookup])
        )
        return (await ctx.session.send_request(request, CreateMessageResultWithTools)).model

    async with connect(server) as peer, connect(server, **can_be_asked) as interactive:
        polled = []
        for caller, tool in ((peer, "elicit"), (interactive, "sample_with_tools")):
            task_id = await caller.start(tool)
            await wait_for(tasks.store, task_id, local, TaskStatus.FAILED)
            polled.append(await caller.get(task_id))

    assert [each["error"]["code"] for each in polled] == [-32021, -32021]
    assert [each["error"]["data"]["requiredCapabilities"] for each in polled] == [
        {"elicitation": {"form": {}}},
        {"sampling": {"tools": {}}},
    ]


async def test_a_request_that_is_no_question_has_nowhere_to_go(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """A ping in the database would wait for an answer for ever."""

    @server.tool()
    @tasks.task()
    async def ping(ctx: Context) -> None:
        await ctx.session.send_ping()

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("ping")
        await wait_for(tasks.store, task_id, local, TaskStatus.FAILED)
        polled = await peer.get(task_id)

    assert polled["error"]["code"] == -32600


async def test_an_answer_of_the_wrong_shape_fails_the_tool_not_the_server(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """Answers are taken unread, as the specification wants; what they are is found out where they are used."""

    @server.tool()
    @tasks.task()
    async def elicit(ctx: Context) -> str:
        return (await ctx.elicit("Sure?", Confirmation)).action

    async with connect(server, **can_be_asked) as peer:
        for answer in ("yes", {"action": "perhaps"}, None, {"action": "accept", "content": {"confirm": "who knows"}}):
            task_id = await peer.start("elicit")
            (key,) = await questions_of(peer, tasks, wait_for, task_id, local)
            await peer.update(task_id, {key: answer})
            await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)

            assert (await peer.get(task_id))["result"]["isError"] is True


async def test_a_question_that_nobody_answers_in_time_is_withdrawn(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The tool set the time itself; its task goes on, and the late answer is for nobody."""
    timed_out, go_on = asyncio.Event(), asyncio.Event()

    @server.tool()
    @tasks.task()
    async def sample(ctx: Context) -> str:
        hello = SamplingMessage(role="user", content=TextContent(text="Hello"))
        request = CreateMessageRequest(params=CreateMessageRequestParams(messages=[hello], max_tokens=10))
        try:
            await ctx.session.send_request(request, CreateMessageResult, request_read_timeout_seconds=0.01)
        except MCPError as error:
            timed_out.set()
            await go_on.wait()
            return str(error.code)
        raise AssertionError("nobody answered")

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("sample")
        await asyncio.wait_for(timed_out.wait(), 30)
        polled = await peer.get(task_id)
        go_on.set()
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert polled["status"] == "working"
    assert completed["result"]["structuredContent"] == {"result": "-32001"}


async def test_cancelling_a_task_that_waits_for_input_stops_its_tool_in_silence(
    server: MCPServer,
    tasks: TasksExtension,
    connect: Any,
    can_be_asked: Any,
    wait_for: WaitFor,
    local: AuthContext,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody will answer any more; and a cancelled task is no fault that the log should report."""
    ended = asyncio.Event()

    @server.tool()
    @tasks.task()
    async def elicit(ctx: Context) -> str:
        try:
            return (await ctx.elicit("Sure?", Confirmation)).action
        finally:
            ended.set()

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("elicit")
        await questions_of(peer, tasks, wait_for, task_id, local)
        await peer.cancel(task_id)
        await asyncio.wait_for(ended.wait(), 30)
        polled = await peer.get(task_id)

    assert polled["status"] == "cancelled"
    assert "inputRequests" not in polled
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
