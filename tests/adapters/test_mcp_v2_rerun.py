"""Tools that are called again: after the questions that they returned were answered, and after a crash.

These tests go through every seam of the SDK that a later run depends on; a new SDK that moves one fails here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any

import pytest
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult
from pydantic import BaseModel

from taskstore import AuthContext, OwnerKind, StoreOptions, TaskStatus, TaskStore
from taskstore.adapters.mcp_v2 import TasksExtension

WaitFor = Callable[..., Awaitable[Any]]
AT_ONCE = timedelta(0)
KEY = bytes(range(32))


def ask(key: str, state: str | None = None) -> InputRequiredResult:
    """Ask for something by its name."""
    schema = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
    question = ElicitRequest(params=ElicitRequestFormParams(message=f"{key}?", requested_schema=schema))
    return InputRequiredResult(input_requests={key: question}, request_state=state)


def accept(value: str) -> dict[str, Any]:
    return {"action": "accept", "content": {"value": value}}


def answer_to(ctx: Context, key: str) -> str | None:
    answer = (ctx.input_responses or {}).get(key)
    return str((answer.content or {})["value"]) if isinstance(answer, ElicitResult) else None


class Steps:
    """A server with a tool that asks twice and keeps what it has learned in its state; and where the tool ran."""

    def __init__(self, database_url: str, **server_options: Any) -> None:
        self.tasks = TasksExtension(database_url, drain=AT_ONCE)
        self.server = MCPServer("steps", extensions=[self.tasks], lifespan=self.tasks.lifespan, **server_options)
        self.runs = 0

        @self.server.tool()
        @self.tasks.task()
        async def greet(greeting: str, ctx: Context) -> str | InputRequiredResult:
            self.runs += 1
            if ctx.request_state is None:
                return ask("name", "asked for the name")
            if ctx.request_state == "asked for the name":
                return ask("town", f"name: {answer_to(ctx, 'name')}")
            return f"{greeting}, {ctx.request_state}, town: {answer_to(ctx, 'town')}"


async def question_of(peer: Any, store: TaskStore, wait_for: WaitFor, task_id: str, owner: Any) -> str:
    """Wait for a task's one question and return its key."""
    await wait_for(store, task_id, owner, TaskStatus.INPUT_REQUIRED)
    (key,) = (await peer.get(task_id))["inputRequests"]
    return str(key)


# --- questions that the tool returns


async def test_a_tool_that_returns_its_questions_is_called_again_with_the_answers(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """It finds the answers under its own keys, and its state as it left it, as if the client had called again."""
    steps = Steps(database_url)

    async with connect(steps.server, **can_be_asked) as peer:
        store = steps.tasks.store
        task_id = await peer.start("greet", greeting="Hello")
        owners = []
        for value in ("Ada", "London"):
            key = await question_of(peer, store, wait_for, task_id, local)
            owners.append((await store.get_task(task_id, auth=local)).owner_kind)
            await peer.update(task_id, {key: accept(value)})
            # The same key is not asked again, and a second answer to it counts for nothing.
            await peer.update(task_id, {key: accept("nobody")})
        await wait_for(store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "Hello, name: Ada, town: London"}
    assert owners == [OwnerKind.PARKED, OwnerKind.PARKED]
    assert steps.runs == 3
    assert "requestState" not in str(completed)


async def test_a_parked_task_outlives_its_server_and_is_entered_again_in_another(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """It has no process to lose: a deployment between question and answer changes nothing."""
    first, second = Steps(database_url), Steps(database_url)

    async with connect(first.server, **can_be_asked) as peer:
        task_id = await peer.start("greet", greeting="Hello")
        key = await question_of(peer, first.tasks.store, wait_for, task_id, local)
    async with connect(second.server, **can_be_asked) as peer:
        assert list((await peer.get(task_id))["inputRequests"]) == [key]
        await peer.update(task_id, {key: accept("Ada")})
        key = await question_of(peer, second.tasks.store, wait_for, task_id, local)
        await peer.update(task_id, {key: accept("London")})
        await wait_for(second.tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "Hello, name: Ada, town: London"}
    assert (first.runs, second.runs) == (1, 2)


async def test_the_last_of_several_answers_brings_the_tool_back(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """Two people may answer; until both have, the rest is asked for."""

    @server.tool()
    @tasks.task()
    async def both(ctx: Context) -> str | InputRequiredResult:
        if ctx.input_responses is None:
            requests = {**(ask("a").input_requests or {}), **(ask("b").input_requests or {})}
            return InputRequiredResult(input_requests=requests)
        return f"{answer_to(ctx, 'a')} and {answer_to(ctx, 'b')}"

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("both")
        await wait_for(tasks.store, task_id, local, TaskStatus.INPUT_REQUIRED)
        keys = {each["params"]["message"]: key for key, each in (await peer.get(task_id))["inputRequests"].items()}
        await peer.update(task_id, {keys["b?"]: accept("B")})
        left = await peer.get(task_id)
        await peer.update(task_id, {keys["a?"]: accept("A")})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert (left["status"], list(left["inputRequests"])) == ("input_required", [keys["a?"]])
    assert completed["result"]["structuredContent"] == {"result": "A and B"}


async def test_dependencies_that_ask_work_inside_a_task(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The SDK's own way to ask keeps its answers in the state, which it wants back as it was."""

    class Login(BaseModel):
        value: str

    async def login() -> Elicit[Login]:
        return Elicit("Who are you?", Login)

    @server.tool()
    @tasks.task()
    async def whoami(login: Annotated[Login, Resolve(login)]) -> str:
        return login.value

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("whoami")
        key = await question_of(peer, tasks.store, wait_for, task_id, local)
        await peer.update(task_id, {key: accept("Ada")})
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "Ada"}


async def test_a_tool_that_returns_state_without_a_question_is_called_again_with_it(
    server: MCPServer, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """There is nobody to wait for, so the task goes on working."""

    @server.tool()
    @tasks.task()
    async def count(ctx: Context) -> str | InputRequiredResult:
        done = len(ctx.request_state or "")
        return InputRequiredResult(request_state="x" * (done + 1)) if done < 3 else f"{done} times"

    async with connect(server) as peer:
        task_id = await peer.start("count")
        await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "3 times"}


async def test_a_returned_question_that_the_client_did_not_declare_fails_the_task(
    server: MCPServer, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """It would wait for an answer that cannot come."""

    @server.tool()
    @tasks.task()
    async def work() -> str | InputRequiredResult:
        return ask("name")

    async with connect(server) as peer:
        task_id = await peer.start("work")
        await wait_for(tasks.store, task_id, local, TaskStatus.FAILED)
        polled = await peer.get(task_id)

    assert polled["error"]["code"] == -32021
    assert polled["error"]["data"] == {"requiredCapabilities": {"elicitation": {"form": {}}}}


async def test_an_answer_of_the_wrong_shape_fails_the_task_and_says_which(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """Answers are taken unread; the SDK reads them when the tool is called."""
    steps = Steps(database_url)

    async with connect(steps.server, **can_be_asked) as peer:
        task_id = await peer.start("greet", greeting="Hello")
        key = await question_of(peer, steps.tasks.store, wait_for, task_id, local)
        await peer.update(task_id, {key: {"ignored": True}})
        await wait_for(steps.tasks.store, task_id, local, TaskStatus.FAILED)
        polled = await peer.get(task_id)

    assert polled["error"]["code"] == -32602
    assert "inputResponses.name" in polled["error"]["message"]


# --- questions before there is a task


async def test_input_first_gathers_the_answers_before_there_is_a_task(
    server: MCPServer, tasks: TasksExtension, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The specification prefers it: what is known at once need not be asked through a task."""

    @server.tool()
    @tasks.task(mode="required", input_first=True)
    async def greet(ctx: Context) -> str | InputRequiredResult:
        if ctx.request_state is None:
            return ask("name", "asked")
        return f"Hello {answer_to(ctx, 'name')}, {ctx.request_state}"

    async with connect(server, **can_be_asked) as peer, connect(server, declares=False) as other:
        asked = await peer.call("greet")
        before = await tasks.store.list_tasks(auth=local)
        retry = {"name": "greet", "inputResponses": {"name": accept("Ada")}, "requestState": asked["requestState"]}
        created = await peer.request("tools/call", retry)
        await wait_for(tasks.store, created["taskId"], local, TaskStatus.COMPLETED)
        completed = await peer.get(created["taskId"])
        with pytest.raises(Exception, match="required extension"):
            await other.call("greet")

    assert (asked["resultType"], list(asked["inputRequests"])) == ("input_required", ["name"])
    assert before.tasks == ()
    assert completed["result"]["structuredContent"] == {"result": "Hello Ada, asked"}


# --- what a later run knows


async def test_a_later_run_finds_its_caller_its_arguments_and_its_lifespan(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """A tool must not have to tell its runs apart."""

    @asynccontextmanager
    async def my_own(server: MCPServer[dict[str, str]]) -> AsyncIterator[dict[str, str]]:
        yield {"pool": "connections"}

    tasks = TasksExtension(database_url, drain=AT_ONCE)
    server = MCPServer("facts", extensions=[tasks], lifespan=tasks.lifespan(my_own))
    seen: list[dict[str, Any]] = []

    @server.tool()
    @tasks.task()
    async def look(depth: int, ctx: Context[dict[str, str]]) -> str | InputRequiredResult:
        client, request = ctx.session.client_params, ctx.request_context
        assert client is not None
        await ctx.report_progress(len(seen), 2, "looking")
        seen.append(
            {
                "depth": depth,
                "version": ctx.protocol_version,
                "client": client.client_info.name,
                "capabilities": client.capabilities,
                "lifespan": request.lifespan_context,
                "mark": (request.meta or {}).get("example.org/mark"),
                "method": request.method,
            }
        )
        return ask("name") if ctx.input_responses is None else "done"

    async with connect(server, **can_be_asked) as peer:
        call = {"name": "look", "arguments": {"depth": 7}, "_meta": {"example.org/mark": {"of": 1}}}
        task_id = (await peer.request("tools/call", call))["taskId"]
        key = await question_of(peer, tasks.store, wait_for, task_id, local)
        await peer.update(task_id, {key: accept("Ada")})
        finished = await wait_for(tasks.store, task_id, local, TaskStatus.COMPLETED)

    first, second = seen
    assert first == second
    assert first["depth"] == 7
    assert first["lifespan"] == {"pool": "connections"}
    assert first["mark"] == {"of": 1}
    assert finished.progress == 1


async def test_a_later_run_has_no_token_unless_the_tool_needs_it(
    database_url: str, connect: Any, serve: Any, can_be_asked: Any, wait_for: WaitFor, authorization: dict[str, Any]
) -> None:
    """Nobody is asking then: neither whoever answered last nor an earlier caller may lend his name."""
    tasks = TasksExtension(database_url, options=StoreOptions(keys=[KEY]), drain=AT_ONCE)
    server = MCPServer("tokens", extensions=[tasks], lifespan=tasks.lifespan, **authorization)
    seen: dict[str, list[str | None]] = {"plain": [], "trusted": []}

    def look(tool: str, ctx: Context) -> str | InputRequiredResult:
        token = get_access_token()
        seen[tool].append(None if token is None else token.subject)
        return ask("name") if ctx.input_responses is None else "done"

    @server.tool()
    @tasks.task()
    async def plain(ctx: Context) -> str | InputRequiredResult:
        return look("plain", ctx)

    @server.tool()
    @tasks.task(needs_token=True)
    async def trusted(ctx: Context) -> str | InputRequiredResult:
        return look("trusted", ctx)

    alice = AuthContext(client_id="app", issuer="https://issuer.example", subject="alice")
    async with serve(server) as url, connect(url, token="alice", **can_be_asked) as peer:
        for tool in ("trusted", "plain"):
            task_id = await peer.start(tool)
            key = await question_of(peer, tasks.store, wait_for, task_id, alice)
            await peer.update(task_id, {key: accept("Ada")})
            await wait_for(tasks.store, task_id, alice, TaskStatus.COMPLETED)

    assert seen == {"plain": ["alice", None], "trusted": ["alice", "alice"]}


async def test_a_tool_that_needs_a_token_is_refused_where_it_could_not_be_kept(
    database_url: str, connect: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """A bearer token in plain bytes opens more than this database; and without one the tool must not run at all."""
    unsealed = TasksExtension(database_url, drain=AT_ONCE)
    server = MCPServer("tokens", extensions=[unsealed], lifespan=unsealed.lifespan, **authorization)
    local_tasks = TasksExtension(database_url, options=StoreOptions(keys=[KEY]), drain=AT_ONCE)
    local_server = MCPServer("tokens", extensions=[local_tasks], lifespan=local_tasks.lifespan)

    async def work() -> str:
        raise AssertionError("must not run")

    server.add_tool(unsealed.task(needs_token=True)(work))
    local_server.add_tool(local_tasks.task(needs_token=True)(work))

    async with serve(server) as url, connect(url, token="alice") as peer:
        with refused(-32603, "StoreOptions(keys="):
            await peer.call("work")
    async with connect(local_server) as peer:
        with refused(-32600, "needs an access token"):
            await peer.call("work")


async def test_a_run_that_lacks_its_token_fails_rather_than_run_without(
    database_url: str, connect: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The tool began to need one while its task waited; it must not act for nobody."""
    runs: list[str] = []
    running = asyncio.Event()

    def make(*, needs_token: bool) -> tuple[MCPServer, TasksExtension]:
        tasks = TasksExtension(database_url, options=StoreOptions(keys=[KEY]), drain=AT_ONCE)
        server = MCPServer("tokens", extensions=[tasks], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task(on_crash="retry", needs_token=needs_token)
        async def work() -> None:
            runs.append("run")
            running.set()
            await asyncio.Event().wait()

        return server, tasks

    before, _ = make(needs_token=False)
    async with connect(before) as peer:
        task_id = await peer.start("work")
        await running.wait()
    after, after_tasks = make(needs_token=True)
    async with connect(after):
        failed = await wait_for(after_tasks.store, task_id, local, TaskStatus.FAILED)

    assert "access token" in failed.status_message
    assert runs == ["run"]


# --- after a crash, or a stop


async def test_a_tool_that_may_be_retried_runs_again_after_its_server_stopped(
    database_url: str, connect: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """A deployment in the middle of its work is no reason to fail it, and no crash either."""
    gates = [asyncio.Event(), asyncio.Event()]
    running = [asyncio.Event(), asyncio.Event()]

    def make(run: int) -> tuple[MCPServer, TasksExtension]:
        tasks = TasksExtension(database_url, drain=AT_ONCE)
        server = MCPServer("retries", extensions=[tasks], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task(on_crash="retry")
        async def work(topic: str) -> str:
            running[run].set()
            await gates[run].wait()
            return f"{topic} in run {run}"

        return server, tasks

    first, _ = make(0)
    async with connect(first) as peer:
        task_id = await peer.start("work", topic="tides")
        await running[0].wait()
    second, second_tasks = make(1)
    gates[1].set()
    async with connect(second) as peer:
        finished = await wait_for(second_tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "tides in run 1"}
    assert finished.crashes == 0


async def test_the_client_is_asked_whether_to_run_the_tool_again(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """The tool cannot know whether what it had done may be done twice; the client can."""
    running = asyncio.Event()

    def make(result: str | None) -> tuple[MCPServer, TasksExtension]:
        tasks = TasksExtension(database_url, drain=AT_ONCE)
        server = MCPServer("careful", extensions=[tasks], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task(on_crash="ask")
        async def pay(amount: int, ctx: Context) -> str:
            if result is None:
                running.set()
                await asyncio.Event().wait()
            # The answer to that question is not for the tool.
            return f"{result} {amount}, told {ctx.input_responses}"

        return server, tasks

    first, _ = make(None)
    async with connect(first, **can_be_asked) as peer, connect(first) as mute:
        task_id = await peer.start("pay", amount=3)
        unasked_id = await mute.start("pay", amount=4)
        await running.wait()
    second, second_tasks = make("paid")
    async with connect(second, **can_be_asked) as peer:
        (question,) = (await peer.get(task_id))["inputRequests"].items()
        key, request = question
        unasked = await peer.get(unasked_id)
        content = dict.fromkeys(request["params"]["requestedSchema"]["properties"], True)
        await peer.update(task_id, {key: {"action": "accept", "content": content}})
        await wait_for(second_tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert request["method"] == "elicitation/create"
    assert unasked["status"] == "failed"
    assert completed["result"]["structuredContent"] == {"result": "paid 3, told None"}


async def test_a_tool_that_awaited_an_answer_asks_again_when_it_is_retried(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """What the interrupted run asked is closed: an answer to it would be for nobody."""
    runs = 0

    class Name(BaseModel):
        value: str

    def make() -> tuple[MCPServer, TasksExtension]:
        tasks = TasksExtension(database_url, drain=AT_ONCE)
        server = MCPServer("asking", extensions=[tasks], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task(on_crash="retry")
        async def greet(ctx: Context) -> str:
            nonlocal runs
            runs += 1
            answer = await ctx.elicit("Your name?", Name)
            return answer.data.value if answer.action == "accept" else answer.action

        return server, tasks

    first, first_tasks = make()
    async with connect(first, **can_be_asked) as peer:
        task_id = await peer.start("greet")
        old = await question_of(peer, first_tasks.store, wait_for, task_id, local)
    second, second_tasks = make()
    async with connect(second, **can_be_asked) as peer:
        new = await question_of(peer, second_tasks.store, wait_for, task_id, local)
        await peer.update(task_id, {old: accept("nobody")})
        await peer.update(task_id, {new: accept("Ada")})
        await wait_for(second_tasks.store, task_id, local, TaskStatus.COMPLETED)
        completed = await peer.get(task_id)

    assert old != new
    assert runs == 2
    assert completed["result"]["structuredContent"] == {"result": "Ada"}


async def test_a_parked_task_can_be_cancelled(
    database_url: str, connect: Any, can_be_asked: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """No process holds it, so there is none to tell; the tool is not called again."""
    steps = Steps(database_url)

    async with connect(steps.server, **can_be_asked) as peer:
        task_id = await peer.start("greet", greeting="Hello")
        key = await question_of(peer, steps.tasks.store, wait_for, task_id, local)
        await peer.cancel(task_id)
        await peer.update(task_id, {key: accept("too late")})
        polled = await peer.get(task_id)

    assert polled["status"] == "cancelled"
    assert "inputRequests" not in polled
    assert steps.runs == 1
