"""TasksExtension through the official SDK's client, in process."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel

from taskstore import AuthContext, OnCrash, StoreOptions, TaskStore
from taskstore.adapters.mcp_v2 import TasksExtension

EXTENSION = "io.modelcontextprotocol/tasks"
AT_ONCE = timedelta(0)


class Gate:
    """Lets a test hold a tool while it runs."""

    def __init__(self) -> None:
        self.running, self.opened, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.running.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def gate(server: MCPServer, tasks: TasksExtension) -> Gate:
    """Give the server a tool ``wait`` that runs until the test opens the gate."""
    gate = Gate()

    @server.tool()
    @tasks.task()
    async def wait() -> str:
        await gate.wait()
        return "through"

    return gate


async def result_of(tasks: TasksExtension, peer: Any, task_id: str, owner: AuthContext | None) -> dict[str, Any]:
    """Poll a task once it is finished."""
    await tasks.store.wait_for_task(task_id, auth=owner)
    polled: dict[str, Any] = await peer.get(task_id)
    return polled


# --- becoming a task


async def test_a_decorated_tool_becomes_a_task_that_is_polled_to_its_result(
    server: MCPServer, tasks: TasksExtension, gate: Gate, connect: Any, local: AuthContext
) -> None:
    """The whole point: the call answers at once, the result comes later."""
    async with connect(server) as peer:
        created = await peer.call("wait")
        task_id = created["taskId"]
        working = await peer.get(task_id)
        gate.opened.set()
        completed = await result_of(tasks, peer, task_id, local)

    assert (created["resultType"], created["status"]) == ("task", "working")
    assert (working["resultType"], working["status"]) == ("complete", "working")
    assert completed["status"] == "completed"
    assert completed["result"]["content"] == [{"type": "text", "text": "through"}]


async def test_the_task_is_durable_before_the_client_hears_of_it(
    server: MCPServer, gate: Gate, connect: Any, local: AuthContext, database_url: str
) -> None:
    """A client may store the id and go away at once; another process must find the task."""
    async with connect(server) as peer:
        task_id = await peer.start("wait")

        async with TaskStore.open(database_url) as elsewhere:
            task = await elsewhere.get_task(task_id, auth=local)

    assert (task.method, task.name) == ("tools/call", "wait")


async def test_a_tool_without_the_decorator_never_becomes_a_task(server: MCPServer, gate: Gate, connect: Any) -> None:
    """Nothing changes for the other tools of a server."""

    @server.tool()
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    async with connect(server) as peer:
        result = await peer.call("greet", name="Ada")

    assert result["content"] == [{"type": "text", "text": "Hello, Ada!"}]


async def test_a_legacy_task_parameter_is_ignored(server: MCPServer, gate: Gate, connect: Any) -> None:
    """The specification wants it neither honoured nor refused."""

    @server.tool()
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    async with connect(server) as peer:
        call = {"name": "greet", "arguments": {"name": "Ada"}, "task": {"ttl": 1000}}
        result = await peer.request("tools/call", call)

    assert result["content"] == [{"type": "text", "text": "Hello, Ada!"}]


async def test_the_policy_follows_the_function_not_its_name(
    server: MCPServer, tasks: TasksExtension, connect: Any
) -> None:
    """Tools are renamed, wrapped by decorators and registered as methods; another may take the old name."""

    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapper(*arguments: Any, **keywords: Any) -> Any:
            return await function(*arguments, **keywords)

        return wrapper

    class Tools:
        @tasks.task()
        async def method(self) -> str:
            return "from a method"

    @tasks.task()
    async def report() -> str:
        return "from a task"

    async def inline() -> str:
        return "inline"

    server.add_tool(logged(report), name="renamed")
    server.add_tool(Tools().method, name="method")
    server.add_tool(inline, name="report")

    async with connect(server) as peer:
        kinds = {name: (await peer.call(name))["resultType"] for name in ("renamed", "method", "report")}

    assert kinds == {"renamed": "task", "method": "task", "report": "complete"}


async def test_a_synchronous_tool_runs_as_a_task(
    server: MCPServer, tasks: TasksExtension, connect: Any, local: AuthContext
) -> None:
    """The SDK runs it in a thread, inside a task as well."""

    @server.tool()
    @tasks.task()
    def add(a: int, b: int) -> int:
        return a + b

    async with connect(server) as peer:
        completed = await result_of(tasks, peer, await peer.start("add", a=2, b=3), local)

    assert completed["result"]["structuredContent"] == {"result": 5}


async def test_lifetime_and_poll_interval_come_from_the_tool_or_else_from_the_extension(
    database_url: str, connect: Any
) -> None:
    """A report may be kept longer than a thumbnail."""
    tasks = TasksExtension(
        database_url, default_ttl=timedelta(minutes=2), default_poll_interval=timedelta(seconds=3), drain=AT_ONCE
    )
    server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan)

    @server.tool()
    @tasks.task(ttl=timedelta(minutes=9), poll_interval=timedelta(seconds=7))
    async def own() -> None: ...

    @server.tool()
    @tasks.task()
    async def default() -> None: ...

    async with connect(server) as peer:
        answers = [await peer.call(name) for name in ("own", "default")]

    assert [(answer["ttlMs"], answer["pollIntervalMs"]) for answer in answers] == [(540_000, 7_000), (120_000, 3_000)]


async def test_arguments_that_cannot_be_stored_are_refused(
    server: MCPServer, tasks: TasksExtension, connect: Any, refused: Any
) -> None:
    """JSON can spell half a character; a database can't keep it."""

    @server.tool()
    @tasks.task()
    async def echo(text: str) -> str:
        return text

    async with connect(server) as peer:
        with refused(-32602, "text"):
            await peer.call("echo", text="\ud800")


@pytest.mark.parametrize("mode", ["sometimes", None, lambda: None])
def test_a_wrong_mode_is_refused_at_once(tasks: TasksExtension, mode: Any) -> None:
    """Decorating without brackets passes the function as the mode."""
    with pytest.raises(ValueError, match="mode must be"):
        tasks.task(mode)


def test_a_policy_that_cannot_be_followed_is_refused_at_once(tasks: TasksExtension) -> None:
    """A tool's work is here; what is done elsewhere is no tool's, and nothing is attempted less than once."""
    with pytest.raises(ValueError, match="not external"):
        tasks.task(on_crash=OnCrash.EXTERNAL)
    with pytest.raises(ValueError, match="max_attempts"):
        tasks.task(on_crash="retry", max_attempts=0)


@pytest.mark.parametrize("name", ["ttl", "poll_interval"])
def test_a_duration_that_is_not_positive_is_refused_at_once(tasks: TasksExtension, name: str) -> None:
    """Otherwise the first call would fail, long after the server was started."""
    keywords: dict[str, Any] = {name: timedelta(0)}

    with pytest.raises(ValueError, match=f"{name} must be longer"):
        tasks.task(**keywords)


# --- capability and protocol version


async def test_a_client_that_does_not_declare_runs_an_optional_tool_inline(
    server: MCPServer, gate: Gate, connect: Any
) -> None:
    """A CreateTaskResult would be gibberish to it."""
    gate.opened.set()

    async with connect(server, declares=False) as peer:
        result = await peer.call("wait")

    assert result["content"] == [{"type": "text", "text": "through"}]


async def test_the_capability_counts_per_request(server: MCPServer, gate: Gate, connect: Any) -> None:
    """What a client declared before, or what another client declared, does not count."""
    gate.opened.set()

    async with connect(server) as declaring, connect(server, declares=False) as other:
        kinds = [(await peer.call("wait"))["resultType"] for peer in (declaring, other, declaring)]

    assert kinds == ["task", "complete", "task"]


async def test_a_required_tool_refuses_a_client_that_does_not_declare(
    server: MCPServer, tasks: TasksExtension, connect: Any
) -> None:
    """The error tells the client's author what to declare."""

    @server.tool()
    @tasks.task(mode="required")
    async def report() -> str:
        raise AssertionError("must not run")

    async with connect(server, declares=False) as peer:
        with pytest.raises(MCPError) as refusal:
            await peer.call("report")

    assert refusal.value.error.code == -32021
    assert refusal.value.error.data == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
async def test_the_missing_capability_is_reported_before_anything_else(
    server: MCPServer, connect: Any, refused: Any, method: str
) -> None:
    """A client that does not know the extension learns nothing from hints about its params."""
    async with connect(server, declares=False) as peer:
        with refused(-32021):
            await peer.request(method, {}, routed=False)


@pytest.mark.parametrize("method", ["tasks/list", "tasks/result"])
async def test_requests_of_the_older_generation_are_unknown(
    server: MCPServer, connect: Any, refused: Any, method: str
) -> None:
    """The extension removed them; a client must not mistake this server for one that still has them."""
    async with connect(server) as peer:
        with refused(-32601):
            await peer.request(method, {"taskId": "tsk_1"})


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
async def test_under_an_older_protocol_version_the_extension_does_not_exist(
    server: MCPServer, connect: Any, refused: Any, method: str
) -> None:
    """Those versions have tasks of another kind, which this must not be mistaken for."""
    async with connect(server, mode="legacy") as peer:
        with refused(-32601):
            await peer.request(method, {"taskId": "tsk_1", "inputResponses": {}})


async def test_under_an_older_protocol_version_tools_run_inline_or_say_why_not(
    server: MCPServer, tasks: TasksExtension, gate: Gate, connect: Any, refused: Any
) -> None:
    """Older clients keep what can be kept."""

    @server.tool()
    @tasks.task(mode="required")
    async def report() -> str:
        raise AssertionError("must not run")

    gate.opened.set()

    async with connect(server, mode="legacy") as peer:
        inline = await peer.call("wait")
        with refused(-32601, "runs only as a task"):
            await peer.call("report")

    assert inline["content"] == [{"type": "text", "text": "through"}]


# --- what the client sees of the work


async def test_progress_of_a_running_task_is_shown_by_the_next_poll(
    server: MCPServer, tasks: TasksExtension, connect: Any, local: AuthContext
) -> None:
    """After the response there is no channel for progress; the SDK would drop it without a word."""
    reported, go_on = asyncio.Event(), asyncio.Event()

    @server.tool()
    @tasks.task(mode="required")
    async def report(ctx: Context) -> str:
        await ctx.report_progress(3, 10, "rendering")
        reported.set()
        await go_on.wait()
        return "done"

    async with connect(server) as peer:
        task_id = await peer.start("report")
        await reported.wait()
        task = await tasks.store.get_task(task_id, auth=local)
        while task.progress is None:  # progress is written a moment after it was reported
            task = await tasks.store.wait_for_task(task_id, auth=local, since_version=task.version)
        polled = await peer.get(task_id)
        go_on.set()
        completed = await result_of(tasks, peer, task_id, local)

    assert polled["statusMessage"] == "rendering (3/10)"
    assert completed["status"] == "completed"


async def test_progress_after_the_task_was_cancelled_does_not_disturb_the_tool(
    server: MCPServer, tasks: TasksExtension, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool that cleans up after its cancellation may well report what it does."""
    running, cleaned_up = asyncio.Event(), asyncio.Event()

    @server.tool()
    @tasks.task()
    async def report(ctx: Context) -> str:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            await ctx.report_progress(4, 10, "cleaning up")
            cleaned_up.set()
        raise AssertionError("never comes here")

    async with connect(server) as peer:
        task_id = await peer.start("report")
        await running.wait()
        await peer.cancel(task_id)
        await cleaned_up.wait()
        polled = await peer.get(task_id)

    assert polled["status"] == "cancelled"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_cancel_reaches_the_work(server: MCPServer, gate: Gate, connect: Any) -> None:
    """The acknowledgement is empty; the work is stopped."""
    async with connect(server) as peer:
        task_id = await peer.start("wait")
        await gate.running.wait()

        acknowledged = await peer.cancel(task_id)
        await gate.cancelled.wait()
        polled = await peer.get(task_id)

    assert acknowledged.keys() <= {"resultType", "_meta"}
    assert polled["status"] == "cancelled"


class Failing(BaseModel):
    """What a tool does, by the way in which it fails or succeeds."""

    kind: str

    async def __call__(self) -> Any:
        match self.kind:
            case "crash":
                raise RuntimeError("password=hunter2")
            case "tool error":
                raise ToolError("The topic is empty.")
            case "model":
                return self
            case "nothing":
                return None
        return [self.kind, "and more"]


@pytest.mark.parametrize("kind", ["crash", "tool error", "model", "nothing", "list"])
async def test_the_inlined_result_is_what_the_call_would_have_returned(
    server: MCPServer, tasks: TasksExtension, connect: Any, local: AuthContext, kind: str
) -> None:
    """The specification demands it, for failures of the tool too; an exception's text must stay inside."""

    @server.tool()
    @tasks.task()
    async def work() -> Any:
        return await Failing(kind=kind)()

    async with connect(server) as peer, connect(server, declares=False) as inline_peer:
        inline = await inline_peer.call("work")
        polled = await result_of(tasks, peer, await peer.start("work"), local)

    expected = {key: value for key, value in inline.items() if key not in ("resultType", "_meta")}
    assert polled["status"] == "completed"
    assert polled["result"] == expected
    assert expected["isError"] is (kind in ("crash", "tool error"))
    assert "hunter2" not in str(polled)


async def test_a_protocol_error_of_the_tool_fails_the_task_with_the_same_error(
    server: MCPServer, tasks: TasksExtension, connect: Any, local: AuthContext
) -> None:
    """Code, message and data mean something to the client."""

    @server.tool()
    @tasks.task()
    async def work() -> str:
        raise MCPError(-32000, "Quota exceeded", {"limit": 3})

    async with connect(server) as peer:
        polled = await result_of(tasks, peer, await peer.start("work"), local)

    assert polled["status"] == "failed"
    assert polled["error"] == {"code": -32000, "message": "Quota exceeded", "data": {"limit": 3}}
    assert polled["statusMessage"] == "Quota exceeded"
    assert "result" not in polled


async def test_a_result_that_cannot_be_stored_fails_the_task(
    server: MCPServer, tasks: TasksExtension, connect: Any, local: AuthContext
) -> None:
    """The task must end, and say which value was the matter."""

    @server.tool()
    @tasks.task()
    async def work() -> str:
        return "half a character: \ud800"

    async with connect(server) as peer:
        polled = await result_of(tasks, peer, await peer.start("work"), local)

    assert polled["status"] == "failed"
    assert "content[0].text" in polled["error"]["message"]


# --- whose task


async def test_an_unknown_id_is_not_found(server: MCPServer, connect: Any, refused: Any) -> None:
    """As the specification words it."""
    async with connect(server) as peer:
        for request in (peer.get("tsk_1"), peer.cancel("tsk_1"), peer.update("tsk_1", {})):
            with refused(-32602, "Failed to retrieve task: Task not found"):
                await request


async def test_in_process_a_task_belongs_to_the_local_user(
    server: MCPServer, tasks: TasksExtension, gate: Gate, connect: Any, local: AuthContext
) -> None:
    """So that listing and retrying work there, and every local connection finds the task."""
    async with connect(server) as first, connect(server) as second:
        task_id = await first.start("wait")

        assert (await second.get(task_id))["status"] == "working"
        listed = await tasks.store.list_tasks(auth=local)

    assert [task.task_id for task in listed.tasks] == [task_id]


async def test_resolve_auth_decides_whose_request_it_is(database_url: str, connect: Any, refused: Any) -> None:
    """Applications with sessions of their own know their users better."""
    who = {"name": "alice"}

    def resolve(ctx: ServerRequestContext) -> AuthContext | None:
        return AuthContext(subject=who["name"])

    tasks = TasksExtension(database_url, resolve_auth=resolve, drain=AT_ONCE)
    server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan)

    @server.tool()
    @tasks.task()
    async def work() -> None: ...

    async with connect(server) as peer:
        task_id = await peer.start("work")
        who["name"] = "bob"
        with refused(-32602, "not found"):
            await peer.get(task_id)
        who["name"] = "alice"
        assert (await peer.get(task_id))["taskId"] == task_id


# --- lifespan


async def test_without_the_lifespan_the_first_call_says_so(database_url: str, connect: Any, refused: Any) -> None:
    """The mistake everybody makes once."""
    tasks = TasksExtension(database_url)
    server = MCPServer("reports", extensions=[tasks])

    @server.tool()
    @tasks.task()
    async def work() -> None: ...

    async with connect(server) as peer:
        with refused(-32603, "lifespan=tasks.lifespan"):
            await peer.call("work")
        with refused(-32603, "lifespan=tasks.lifespan"):
            await peer.get("tsk_1")


async def test_a_lifespan_of_ones_own_is_composed(database_url: str, connect: Any, local: AuthContext) -> None:
    """A running task uses what that lifespan yields, so it must be left last."""
    left: list[str] = []

    @asynccontextmanager
    async def my_own(server: MCPServer[dict[str, str]]) -> AsyncIterator[dict[str, str]]:
        yield {"greeting": "Hello"}
        left.append("own lifespan")

    tasks = TasksExtension(database_url, drain=AT_ONCE)
    server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan(my_own))
    running = asyncio.Event()

    @server.tool()
    @tasks.task()
    async def greet(ctx: Context[dict[str, str]]) -> str:
        return ctx.request_context.lifespan_context["greeting"]

    @server.tool()
    @tasks.task()
    async def work() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            left.append("work")

    async with connect(server) as peer:
        completed = await result_of(tasks, peer, await peer.start("greet"), local)
        await peer.start("work")
        await running.wait()

    assert completed["result"]["content"] == [{"type": "text", "text": "Hello"}]
    assert left == ["work", "own lifespan"]


async def test_the_store_stays_open_until_the_last_connection_leaves(
    server: MCPServer, tasks: TasksExtension, gate: Gate, connect: Any, local: AuthContext
) -> None:
    """In process the SDK enters the lifespan once per connection; one that leaves must not stop the others' work."""
    async with connect(server) as staying:
        async with connect(server) as leaving:
            task_id = await leaving.start("wait")
            await gate.running.wait()
        gate.opened.set()

        completed = await result_of(tasks, staying, task_id, local)

    assert completed["status"] == "completed"


async def test_results_are_there_after_a_restart(
    server: MCPServer, tasks: TasksExtension, gate: Gate, connect: Any, local: AuthContext, database_url: str
) -> None:
    """Another server process on the same database answers for the first."""
    gate.opened.set()
    async with connect(server) as peer:
        task_id = await peer.start("wait")
        before = await result_of(tasks, peer, task_id, local)

    restarted_tasks = TasksExtension(database_url)
    restarted = MCPServer("reports", extensions=[restarted_tasks], lifespan=restarted_tasks.lifespan)
    async with connect(restarted) as peer:
        after = await peer.get(task_id)

    assert after == before
    assert after["status"] == "completed"


async def test_work_that_a_stopping_server_interrupts_says_so_after_the_restart(
    server: MCPServer, gate: Gate, connect: Any
) -> None:
    """Not a crash, and not working for ever either."""
    async with connect(server) as peer:
        task_id = await peer.start("wait")
        await gate.running.wait()

    async with connect(server) as peer:
        polled = await peer.get(task_id)

    assert polled["status"] == "failed"
    assert "SERVER_STOPPED" in polled["error"]["message"]


async def test_an_open_store_is_used_and_left_open(database_url: str, connect: Any, local: AuthContext) -> None:
    """An application may share one store between its server and its own pages."""
    async with TaskStore.open(database_url) as store:
        tasks = TasksExtension(store)
        server = MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task()
        async def work() -> None: ...

        async with connect(server) as peer:
            task_id = await peer.start("work")
            await store.wait_for_task(task_id, auth=local)

        assert (await store.get_task(task_id, auth=local)).is_finished


async def test_options_for_an_open_store_are_refused(database_url: str) -> None:
    """They could not take effect any more."""
    async with TaskStore.open(database_url) as store:
        with pytest.raises(ValueError, match="options"):
            TasksExtension(store, options=StoreOptions())


async def test_two_servers_cannot_share_an_extension(server: MCPServer, tasks: TasksExtension, connect: Any) -> None:
    """A tool's name would be looked up in the wrong server."""
    other = MCPServer("other", extensions=[tasks], lifespan=tasks.lifespan)

    async with connect(server):
        with pytest.raises(RuntimeError, match="another server"):
            async with connect(other):
                pass


async def test_a_task_that_is_over_leaves_nothing_to_the_garbage_collector(
    server: MCPServer, tasks: TasksExtension, garbage_of: Any
) -> None:
    """A ring of objects around each request had the collector go over the whole heap again and again."""

    @server.tool()
    @tasks.task()
    async def add(a: int, b: int) -> int:
        return a + b

    assert await garbage_of(server, tasks) == []
