"""TasksExtension on FastMCP, through the official SDK's client: tools that were written for its own background tasks.

These tests go through every seam of FastMCP that the adapter depends on; a new FastMCP that moves one fails here.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from fastmcp import Client, Context, FastMCP
from fastmcp.dependencies import CurrentFastMCP, Depends, Progress
from fastmcp.exceptions import ToolError
from fastmcp.server import create_proxy
from fastmcp.server.middleware import Middleware
from fastmcp.tools import Tool
from fastmcp.tools.tool_transform import ArgTransform
from mcp.shared.exceptions import MCPError
from mcp_types import SamplingMessage, TextContent
from pydantic import BaseModel

from taskstore import AuthContext, OnCrash, StoreOptions, TaskStatus, TaskStore
from taskstore.adapters.fastmcp import CurrentTask, RunningTask, TaskConfig, TasksExtension
from taskstore.adapters.mcp_v2 import TasksClient

WaitFor = Callable[..., Awaitable[Any]]
AT_ONCE = timedelta(0)


@pytest.fixture
def tasks(database_url: str) -> TasksExtension:
    return TasksExtension(url=database_url, drain=AT_ONCE)


@pytest.fixture
def server(tasks: TasksExtension) -> FastMCP:
    server = FastMCP("reports")
    server.add_extension(tasks)
    return server


@pytest.fixture
def run(
    server: FastMCP, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext, can_be_asked: Any
) -> Any:
    """Call a tool that must become a task; return the finished task as a poll shows it."""

    async def call(tool: str, **arguments: object) -> dict[str, Any]:
        async with connect(server, **can_be_asked) as peer:
            task_id = await peer.start(tool, **arguments)
            await tasks.store.wait_for_task(task_id, auth=local)
            polled: dict[str, Any] = await peer.get(task_id)
            return polled

    return call


async def _poll(peer: Any, task_id: str, *statuses: str) -> dict[str, Any]:
    """Poll until a task has one of these statuses."""
    with anyio.fail_after(60):
        while True:
            polled: dict[str, Any] = await peer.get(task_id)
            if polled["status"] in statuses:
                return polled
            await anyio.sleep(0.02)


async def _finished(peer: Any, task_id: str) -> dict[str, Any]:
    return await _poll(peer, task_id, "completed", "failed", "cancelled")


async def _question(peer: Any, task_id: str) -> tuple[str, Any]:
    """Wait for a task's one question; return its key and the request."""
    ((key, request),) = (await _poll(peer, task_id, "input_required"))["inputRequests"].items()
    return key, request


def text_of(polled: dict[str, Any]) -> str:
    return str(polled["result"]["content"][0]["text"])


# --- what FastMCP's own background tasks can do


class Point(BaseModel):
    """A structured result."""

    x: int
    y: int


@pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
async def test_a_tool_that_is_declared_a_task_becomes_one(server: FastMCP, run: Any) -> None:
    """Nothing of a tool changes: neither its declaration nor its dependencies nor the shape of its result."""

    async def origin() -> int:
        return 40

    @server.tool(task=True)
    async def locate(
        x: int,
        ctx: Context,
        y: int = Depends(origin),
        this: FastMCP = CurrentFastMCP(),
        progress: Progress = Progress(),
    ) -> Point:
        await progress.set_total(4)
        await progress.increment(3)
        await ctx.info("half way")
        assert ctx.fastmcp is this is server
        return Point(x=x, y=y)

    polled = await run("locate", x=2)

    assert polled["status"] == "completed"
    assert polled["result"]["structuredContent"] == {"x": 2, "y": 40}
    assert (polled["ttlMs"], polled["pollIntervalMs"]) == (3_600_000, 5000)


@pytest.mark.parametrize("way", ["context", "dependency"])
async def test_progress_of_a_tool_is_stored(
    server: FastMCP, tasks: TasksExtension, connect: Any, local: AuthContext, way: str
) -> None:
    """Seen elsewhere: without a progress token, or without docket, progress went nowhere."""

    @server.tool(task=True)
    async def render(ctx: Context, progress: Progress = Progress()) -> None:
        if way == "context":
            await ctx.report_progress(3, 10, "rendering")
        else:
            await progress.set_total(10)
            await progress.set_message("rendering")
            await progress.increment(3)

    async with connect(server) as peer:
        polled = await _finished(peer, await peer.start("render"))
        task = await tasks.store.get_task(polled["taskId"], auth=local)

    assert polled["statusMessage"] == "rendering"
    assert (task.progress, task.progress_total) == (3, 10)


async def test_tasks_may_be_the_default_of_a_server(tasks: TasksExtension, connect: Any) -> None:
    """``FastMCP(tasks=True)`` declares every tool that does not say otherwise."""
    server = FastMCP("reports", tasks=True)
    server.add_extension(tasks)

    @server.tool
    async def slow() -> str:
        return "done"

    @server.tool(task=False)
    async def quick() -> str:
        return "done"

    async with connect(server) as peer:
        created, inline = await peer.call("slow"), await peer.call("quick")

    assert (created["resultType"], inline["resultType"]) == ("task", "complete")


async def test_a_mode_is_what_it_is_elsewhere(server: FastMCP, connect: Any, refused: Any) -> None:
    """A client that does not declare tasks gets what it can bear: the result, or a refusal that says why."""

    @server.tool(task=TaskConfig(mode="required"))
    async def long() -> str:
        return "done"

    @server.tool(task=TaskConfig(mode="optional", poll_interval=timedelta(seconds=2)))
    async def either() -> str:
        return "done"

    async with connect(server) as peer, connect(server, declares=False) as other:
        created = await peer.call("either")
        inline = await other.call("either")
        with refused(-32021):
            await other.call("long")

    assert (created["resultType"], created["pollIntervalMs"]) == ("task", 2000)
    assert inline["content"][0]["text"] == "done"


@pytest.mark.parametrize("masked", [False, True])
async def test_errors_are_those_of_the_call_without_a_task(
    tasks: TasksExtension, connect: Any, local: AuthContext, masked: bool
) -> None:
    """What a tool says to its caller, and what the server hides, must not depend on how it runs."""
    server = FastMCP("reports", mask_error_details=masked)
    server.add_extension(tasks)

    @server.tool(task=True)
    async def refuses() -> None:
        raise ToolError("no such topic")

    @server.tool(task=True)
    async def breaks() -> None:
        raise RuntimeError("password: 1234")

    @server.tool(task=True)
    async def counts(to: int) -> None: ...

    calls: dict[str, dict[str, object]] = {"refuses": {}, "breaks": {}, "counts": {"to": "ten"}}
    inline, inside = [], []
    async with connect(server) as peer, connect(server, declares=False) as other:
        for name, arguments in calls.items():
            inline.append(await other.call(name, **arguments))
            task_id = await peer.start(name, **arguments)
            await tasks.store.wait_for_task(task_id, auth=local)
            inside.append(await peer.get(task_id))

    assert [each["status"] for each in inside] == ["completed"] * 3
    assert [each["result"]["isError"] for each in inside] == [True] * 3
    assert [text_of(each) for each in inside] == [each["content"][0]["text"] for each in inline]
    assert ("1234" in text_of(inside[1])) is not masked


@pytest.mark.parametrize("mounted", [False, True])
async def test_a_protocol_error_fails_the_task_with_all_that_it_says(server: FastMCP, run: Any, mounted: bool) -> None:
    """FastMCP makes a tool error of it; the specification, and fastmcp-tasks, make it the error of the task."""
    owner = FastMCP("child") if mounted else server

    @owner.tool(task=True)
    async def pay() -> None:
        raise MCPError(-31999, "Quota exceeded", {"limit": 3})

    if mounted:
        server.mount(owner)

    polled = await run("pay")

    assert polled["status"] == "failed"
    assert polled["error"] == {"code": -31999, "message": "Quota exceeded", "data": {"limit": 3}}


async def test_a_mounted_tool_runs_as_its_server_would_run_it(
    server: FastMCP, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext, can_be_asked: Any
) -> None:
    """By its new name, behind the middleware of its own server, which may guard it; and it can ask."""
    child, seen = FastMCP("child"), []

    class Guard(Middleware):
        async def on_call_tool(self, context: Any, call_next: Any) -> Any:
            seen.append(context.message.name)
            return await call_next(context)

    child.add_middleware(Guard())

    @child.tool(task=TaskConfig(mode="required", ttl=timedelta(minutes=40)))
    async def book(ctx: Context, this: FastMCP = CurrentFastMCP()) -> str:
        answer = await ctx.elicit("Where to?", str)
        return f"{this.name}: {answer.data}" if answer.action == "accept" else answer.action

    server.mount(child, namespace="travel")

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("travel_book")
        await wait_for(tasks.store, task_id, local, TaskStatus.INPUT_REQUIRED)
        (key,) = (await peer.get(task_id))["inputRequests"]
        await peer.update(task_id, {key: {"action": "accept", "content": {"value": "Rome"}}})
        await tasks.store.wait_for_task(task_id, auth=local)
        polled = await peer.get(task_id)

    assert (text_of(polled), polled["ttlMs"]) == ("child: Rome", 2_400_000)
    assert seen == ["book"]


async def test_a_guard_of_a_mounted_server_holds_inside_a_task(server: FastMCP, run: Any) -> None:
    """A task must be no way around it."""
    child = FastMCP("child")

    class Guard(Middleware):
        async def on_call_tool(self, context: Any, call_next: Any) -> Any:
            raise ToolError("not for you")

    child.add_middleware(Guard())

    @child.tool(task=True)
    async def secret() -> str:
        return "secret"

    server.mount(child)

    polled = await run("secret")

    assert (polled["result"]["isError"], text_of(polled)) == (True, "not for you")


async def test_a_proxied_tool_runs_inline_beside_tasks(server: FastMCP, connect: Any) -> None:
    """It is a task of its own server, if it is one at all; FastMCP forbids it here."""
    backend = FastMCP("backend")

    @backend.tool
    async def far() -> str:
        return "from afar"

    @server.tool(task=True)
    async def near(ctx: Context) -> str:
        result = await ctx.fastmcp.call_tool("far")
        return str(result.content[0].text)  # type: ignore[union-attr]

    server.mount(create_proxy(backend))

    async with connect(server) as peer:
        inline, created = await peer.call("far"), await peer.call("near")
        polled = await _finished(peer, created["taskId"])

    assert inline["content"][0]["text"] == "from afar"
    assert text_of(polled) == "from afar"


async def test_a_transformed_tool_stays_a_task(server: FastMCP, run: Any) -> None:
    """Renaming a tool, or hiding an argument, must not quietly take its task away."""

    @server.tool(task=TaskConfig(ttl=timedelta(minutes=40)))
    async def write(topic: str, pages: int) -> str:
        return f"{pages} pages on {topic}"

    original = await server.get_tool("write")
    assert original is not None
    renamed = Tool.from_tool(original, name="brief", transform_args={"pages": ArgTransform(hide=True, default=1)})
    server.add_tool(renamed)

    polled = await run("brief", topic="tides")

    assert (text_of(polled), polled["ttlMs"]) == ("1 pages on tides", 2_400_000)


async def test_a_call_that_comes_after_the_lifespan_is_told_so(
    server: FastMCP, tasks: TasksExtension, connect: Any, refused: Any
) -> None:
    """In process, FastMCP ends the lifespan with the first client that leaves, while others may still call."""

    @server.tool(task=True)
    async def quick() -> None: ...

    async with connect(server) as peer:
        async with tasks.lifespan():
            pass
        with refused(-32603, "not open"):
            await peer.call("quick")


async def test_a_tool_inside_a_tool_is_no_task_of_its_own(server: FastMCP, run: Any, connect: Any) -> None:
    """The client asked for one task. Outside of one, a tool that needs a task cannot be called so."""

    @server.tool(task=TaskConfig(mode="required"))
    async def inner() -> str:
        return "inner"

    @server.tool(task=True)
    async def outer(ctx: Context) -> str:
        result = await ctx.fastmcp.call_tool("inner")
        return f"outer of {result.content[0].text}"  # type: ignore[union-attr]

    polled = await run("outer")
    async with connect(server, declares=False) as other:
        refused = await other.call("outer")

    assert text_of(polled) == "outer of inner"
    assert refused["isError"] is True
    assert "runs only as a task" in refused["content"][0]["text"]


async def test_the_version_that_was_asked_for_runs(server: FastMCP, connect: Any) -> None:
    """Both are called ``report``; the newest would be the wrong one."""

    @server.tool(name="report", version="1", task=True)
    async def first() -> str:
        return "version 1"

    @server.tool(name="report", version="2", task=True)
    async def second() -> str:
        return "version 2"

    async with connect(server) as peer:
        created = await peer.request("tools/call", {"name": "report", "_meta": {"fastmcp": {"version": "1"}}})
        polled = await _finished(peer, created["taskId"])

    assert text_of(polled) == "version 1"


async def test_a_tool_that_this_client_alone_may_see_runs_as_its_task(server: FastMCP, connect: Any) -> None:
    """FastMCP shows it by a rule for this client, which must be found inside the task too."""

    @server.tool(task=True, tags={"hidden"})
    async def extra() -> str:
        return "here"

    @server.tool
    async def unlock(ctx: Context) -> None:
        await ctx.enable_components(tags={"hidden"})

    server.disable(tags={"hidden"})

    async with connect(server) as peer:
        before = await peer.call("extra")
        await peer.call("unlock")
        created = await peer.call("extra")
        polled = await _finished(peer, created["taskId"])

    assert before["isError"] is True
    assert text_of(polled) == "here"


async def test_middleware_sees_the_call_once_and_what_it_left_is_found_inside(server: FastMCP, run: Any) -> None:
    """It may count, or bill; and tools read what it wrote into the state of the request."""
    seen = []

    class Tenant(Middleware):
        async def on_call_tool(self, context: Any, call_next: Any) -> Any:
            seen.append(context.message.name)
            await context.fastmcp_context.set_state("tenant", "acme")
            return await call_next(context)

    server.add_middleware(Tenant())

    @server.tool(task=True)
    async def whose(ctx: Context) -> str:
        return str(await ctx.get_state("tenant"))

    polled = await run("whose")

    assert text_of(polled) == "acme"
    assert seen == ["whose"]


# --- questions that a tool awaits


@pytest.mark.filterwarnings("ignore:The sampling capability is deprecated")
async def test_a_tool_can_await_an_answer_of_the_user_and_of_the_model(
    server: FastMCP, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext, can_be_asked: Any
) -> None:
    """FastMCP refuses ctx.elicit() to clients of 2026-07-28, since a plain call cannot ask; a task can."""

    @server.tool(task=True)
    async def write(ctx: Context) -> str:
        tone = await ctx.elicit("Which tone?", ["dry", "warm"])
        assert tone.action == "accept"
        messages = [SamplingMessage(role="user", content=TextContent(type="text", text=f"Be {tone.data}."))]
        answer = await ctx.session.create_message(messages, max_tokens=10)
        assert isinstance(answer.content, TextContent)
        return answer.content.text

    said = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "Warm greetings."}}
    answers = [{"action": "accept", "content": {"value": "warm"}}, said]
    asked = []
    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("write")
        for answer in answers:
            key, question = await _question(peer, task_id)
            asked.append(question["method"])
            await peer.update(task_id, {key: answer})
        await tasks.store.wait_for_task(task_id, auth=local)
        polled = await peer.get(task_id)

    assert asked == ["elicitation/create", "sampling/createMessage"]
    assert text_of(polled) == "Warm greetings."


# --- synchronous tools


async def test_a_synchronous_tool_runs_in_a_thread_and_reports_from_there(
    server: FastMCP, tasks: TasksExtension, run: Any, connect: Any
) -> None:
    """fastmcp-tasks refuses them; most scientific and database code is synchronous."""
    threads, ids = [], []

    @server.tool(task=TaskConfig())
    def crunch(n: int, task: RunningTask = CurrentTask()) -> int:
        threads.append(threading.current_thread())
        ids.append(task.task_id)
        task.report_progress(n, 10, "crunching")
        return n * n

    polled = await run("crunch", n=4)
    async with connect(server, declares=False) as other:
        inline = await other.call("crunch", n=5)

    assert (polled["result"]["structuredContent"], polled["statusMessage"]) == ({"result": 16}, "crunching")
    assert inline["structuredContent"] == {"result": 25}
    assert ids == [polled["taskId"], None]
    assert threading.main_thread() not in threads


async def test_a_synchronous_tool_hears_that_its_task_was_cancelled(
    server: FastMCP, tasks: TasksExtension, connect: Any, wait_for: WaitFor, local: AuthContext
) -> None:
    """A thread cannot be interrupted; it can ask, and stop."""
    running, heard = threading.Event(), threading.Event()

    @server.tool(task=TaskConfig())
    def crunch(task: RunningTask = CurrentTask()) -> str:
        running.set()
        while not task.cancel_requested:
            heard.wait(0.01)
        heard.set()
        return "too late"

    async with connect(server) as peer:
        task_id = await peer.start("crunch")
        assert await anyio.to_thread.run_sync(running.wait, 30)
        await peer.cancel(task_id)
        assert await anyio.to_thread.run_sync(heard.wait, 30)
        polled = await peer.get(task_id)

    assert polled["status"] == "cancelled"


async def test_a_cancelled_coroutine_is_interrupted(server: FastMCP, tasks: TasksExtension, connect: Any) -> None:
    """As an asyncio task is: what it holds is released."""
    running, released = asyncio.Event(), asyncio.Event()

    @server.tool(task=True)
    async def wait() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            released.set()

    async with connect(server) as peer:
        task_id = await peer.start("wait")
        await running.wait()
        await peer.cancel(task_id)
        async with asyncio.timeout(30):
            await released.wait()
        polled = await peer.get(task_id)

    assert polled["status"] == "cancelled"


# --- what a tool may say of its tasks


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "always"},
        {"on_crash": "panic"},
        {"on_crash": OnCrash.EXTERNAL},
        {"max_attempts": 0},
        {"ttl": AT_ONCE},
        {"poll_interval": AT_ONCE},
    ],
)
def test_a_wrong_configuration_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    """Not when the first client calls."""
    with pytest.raises(ValueError, match=r"always|panic|external|max_attempts|ttl|poll_interval"):
        TaskConfig(**wrong)


def test_one_string_is_no_list_of_headers() -> None:
    """Its letters would be taken for names."""
    with pytest.raises(TypeError, match="needs_headers"):
        TaskConfig(needs_headers="x-tenant")


@pytest.mark.parametrize(("asked", "ttl_ms"), [(timedelta(minutes=7), 420_000), (None, None)])
async def test_a_tool_has_a_lifetime_of_its_own(
    database_url: str, connect: Any, asked: timedelta | None, ttl_ms: int | None
) -> None:
    """fastmcp-tasks has one for all; unlimited is null on the wire, and not left out."""
    options = StoreOptions(max_ttl=None)
    server = FastMCP("reports")
    server.add_extension(TasksExtension(database_url, options=options, drain=AT_ONCE))

    @server.tool(task=TaskConfig(ttl=asked))
    async def quick() -> None: ...

    async with connect(server) as peer:
        created = await peer.call("quick")

    assert created["ttlMs"] == ttl_ms


# --- the store


async def test_a_store_of_ones_own_is_left_open(store: TaskStore, connect: Any, local: AuthContext) -> None:
    """It may serve a web page too."""
    server = FastMCP("reports")
    server.add_extension(TasksExtension(store, drain=AT_ONCE))

    @server.tool(task=True)
    async def quick() -> str:
        return "done"

    async with connect(server) as peer:
        task_id = await peer.start("quick")
        await store.wait_for_task(task_id, auth=local)

    assert (await store.get_task(task_id, auth=local)).status is TaskStatus.COMPLETED
    with pytest.raises(ValueError, match="options"):
        TasksExtension(store, options=StoreOptions())


@pytest.mark.parametrize(("given", "kept"), [("reports", "reports"), (None, "fastmcp")])
async def test_a_server_has_the_same_name_after_a_restart(
    database_url: str, connect: Any, local: AuthContext, given: str | None, kept: str
) -> None:
    """FastMCP makes up a new name for a server without one, under which nobody would find its tasks again."""
    server, tasks = FastMCP(given), TasksExtension(database_url, drain=AT_ONCE)
    server.add_extension(tasks)

    @server.tool(task=True)
    async def quick() -> None: ...

    async with connect(server) as peer:
        task_id = await peer.start("quick")
        task = await tasks.store.get_task(task_id, auth=local)

    assert task.server == kept


def test_before_its_server_runs_an_extension_says_so(tasks: TasksExtension) -> None:
    """The usual cause: the extension was given to no server."""
    with pytest.raises(MCPError, match="not open"):
        _ = tasks.store


async def test_a_server_may_be_served_again(server: FastMCP, tasks: TasksExtension, connect: Any) -> None:
    """Tests do, and development servers that reload: each time the store is opened anew, and its tasks are there."""

    @server.tool(task=True)
    async def quick() -> str:
        return "done"

    async with connect(server) as peer:
        task_id = await peer.start("quick")
        await _finished(peer, task_id)
    async with connect(server) as peer:
        polled = await peer.get(task_id)

    assert text_of(polled) == "done"


async def test_fastmcps_own_client_waits_for_a_task(server: FastMCP, tasks: TasksExtension) -> None:
    """Without fastmcp-tasks its client knows of no tasks; given the client's extension it does."""

    @server.tool(task=TaskConfig(mode="required", poll_interval=timedelta(milliseconds=20)))
    async def greet(ctx: Context) -> str:
        answer = await ctx.elicit("Your name?", str)
        return f"Hello, {answer.data}" if answer.action == "accept" else answer.action

    async def answer(message: str, response_type: Any, params: Any, context: Any) -> Any:
        return {"value": "Ada"}

    async with Client(server, extensions=[TasksClient()], elicitation_handler=answer) as client:
        result = await client.call_tool("greet")

    assert result.data == "Hello, Ada"


async def test_a_task_that_is_over_leaves_nothing_to_the_garbage_collector(
    server: FastMCP, tasks: TasksExtension, garbage_of: Any
) -> None:
    """A ring of objects around each request had the collector go over the whole heap again and again."""

    @server.tool(task=True)
    async def add(a: int, b: int) -> int:
        return a + b

    assert await garbage_of(server, tasks) == []
