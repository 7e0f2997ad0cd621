"""Tools on FastMCP that are called again, and what they then know: after answers, after crashes, across processes."""

import asyncio
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastmcp import Context, FastMCP
from fastmcp.server.dependencies import get_access_token, get_http_headers
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult

from taskstore import AuthContext, OwnerKind, StoreOptions
from taskstore.adapters.fastmcp import TaskConfig, TasksExtension
from taskstore.testing import crash
from tests.adapters.processes import ServerProcess

WaitFor = Callable[..., Awaitable[Any]]
AT_ONCE = timedelta(0)
KEY, NEW_KEY = bytes(range(32)), bytes(range(200, 232))
PATIENCE_SECONDS = 60


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


async def poll(peer: Any, task_id: str, *statuses: str) -> dict[str, Any]:
    """Poll until a task has one of these statuses."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            polled: dict[str, Any] = await peer.get(task_id)
            if polled["status"] in statuses:
                return polled
            await anyio.sleep(0.02)


async def answer(peer: Any, task_id: str, value: str) -> None:
    """Wait for a task's one question, and answer it."""
    (key,) = (await poll(peer, task_id, "input_required"))["inputRequests"]
    await peer.update(task_id, {key: accept(value)})


def text_of(polled: dict[str, Any]) -> str:
    assert polled["status"] == "completed", polled
    return str(polled["result"]["content"][0]["text"])


class Trips:
    """A server with a tool that asks twice, its own or of a mounted server, and how often it ran."""

    def __init__(self, database_url: str, *, mounted: bool = False) -> None:
        self.server, self.tasks, self.runs = FastMCP("trips"), TasksExtension(database_url, drain=AT_ONCE), 0
        self.server.add_extension(self.tasks)
        owner = FastMCP("child") if mounted else self.server

        @owner.tool(name="book", task=True)
        async def book(greeting: str, ctx: Context) -> str | InputRequiredResult:
            self.runs += 1
            if ctx.request_state is None:
                return ask("name", "asked for the name")
            if ctx.request_state == "asked for the name":
                return ask("town", f"name: {answer_to(ctx, 'name')}")
            return f"{greeting}, {ctx.request_state}, town: {answer_to(ctx, 'town')}, on {ctx.fastmcp.name}"

        if mounted:
            self.server.mount(owner)


# --- questions that a tool returns


@pytest.mark.parametrize("mounted", [False, True])
async def test_a_parked_task_outlives_its_server(
    database_url: str, connect: Any, can_be_asked: Any, local: AuthContext, mounted: bool
) -> None:
    """It waits in the database, holds no process, and is entered again in another with its answers and its state."""
    first, second = Trips(database_url, mounted=mounted), Trips(database_url, mounted=mounted)

    async with connect(first.server, **can_be_asked) as peer:
        task_id = await peer.start("book", greeting="Hello")
        asked = await poll(peer, task_id, "input_required")
        parked = await first.tasks.store.get_task(task_id, auth=local)
    async with connect(second.server, **can_be_asked) as peer:
        still = await peer.get(task_id)
        await answer(peer, task_id, "Ada")
        await second.tasks.store.wait_for_task(task_id, auth=local, since_version=parked.version + 1)
        await answer(peer, task_id, "London")
        completed = await poll(peer, task_id, "completed", "failed")

    where = "child" if mounted else "trips"
    assert text_of(completed) == f"Hello, name: Ada, town: London, on {where}"
    assert still["inputRequests"] == asked["inputRequests"]
    assert parked.owner_kind is OwnerKind.PARKED
    assert (first.runs, second.runs) == (1, 2)


async def test_a_later_run_is_one_of_the_same_version(database_url: str, connect: Any, can_be_asked: Any) -> None:
    """The newest version of a tool may not understand the answers to the questions of an older one."""
    server = FastMCP("trips")
    server.add_extension(TasksExtension(database_url, drain=AT_ONCE))

    @server.tool(name="book", version="1", task=True)
    async def first(ctx: Context) -> str | InputRequiredResult:
        name = answer_to(ctx, "name")
        return ask("name") if name is None else f"version 1 for {name}"

    @server.tool(name="book", version="2", task=True)
    async def second() -> str:
        return "version 2"

    async with connect(server, **can_be_asked) as peer:
        created = await peer.request("tools/call", {"name": "book", "_meta": {"fastmcp": {"version": "1"}}})
        await answer(peer, created["taskId"], "Ada")
        completed = await poll(peer, created["taskId"], "completed", "failed")

    assert text_of(completed) == "version 1 for Ada"


async def test_a_synchronous_tool_can_return_its_questions(database_url: str, connect: Any, can_be_asked: Any) -> None:
    """It needs no event loop for that, nor a thread while the user thinks."""
    server = FastMCP("trips")
    server.add_extension(TasksExtension(database_url, drain=AT_ONCE))

    @server.tool(task=TaskConfig())
    def book(ctx: Context) -> str | InputRequiredResult:
        name = answer_to(ctx, "name")
        return ask("name") if name is None else f"booked for {name}"

    async with connect(server, **can_be_asked) as peer:
        task_id = await peer.start("book")
        await answer(peer, task_id, "Ada")
        completed = await poll(peer, task_id, "completed", "failed")

    assert text_of(completed) == "booked for Ada"


async def test_a_tool_that_only_wants_to_be_called_again_is(database_url: str, connect: Any) -> None:
    """It returns its state and no question: FastMCP's client would call again at once."""
    server = FastMCP("trips")
    server.add_extension(TasksExtension(database_url, drain=AT_ONCE))

    @server.tool(task=True)
    async def count(ctx: Context) -> str | InputRequiredResult:
        so_far = int(ctx.request_state or 0)
        return str(so_far) if so_far == 2 else InputRequiredResult(request_state=str(so_far + 1))

    async with connect(server) as peer:
        completed = await poll(peer, await peer.start("count"), "completed", "failed")

    assert text_of(completed) == "2"


# --- what a later run knows of its caller


class Secrets:
    """A server that demands a token, with a tool that says who its caller is, and says it again when answered."""

    def __init__(
        self, database_url: str, config: TaskConfig, options: Any, keys: Sequence[bytes] = (KEY,), **tool: Any
    ) -> None:
        self.tasks = TasksExtension(database_url, options=StoreOptions(keys=keys), drain=AT_ONCE)
        self.server = FastMCP("secrets", **options)
        self.server.add_extension(self.tasks)

        @self.server.tool(task=config, **tool)
        async def whoami(ctx: Context) -> str | InputRequiredResult:
            token = get_access_token()
            said = f"{token and token.claims['sub']} of {get_http_headers().get('x-tenant')}"
            return ask("sure", said) if ctx.request_state is None else f"{ctx.request_state}, then {said}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TaskConfig(), "alice of acme, then None of None"),
        (TaskConfig(needs_token=True), "alice of acme, then alice of None"),
        (TaskConfig(needs_headers=["X-Tenant"]), "alice of acme, then None of acme"),
        (TaskConfig(needs_token=True, needs_headers=["x-tenant"]), "alice of acme, then alice of acme"),
    ],
)
async def test_a_later_run_knows_of_its_caller_what_the_tool_asked_to_keep(
    database_url: str,
    connect: Any,
    serve: Any,
    can_be_asked: Any,
    fastmcp_authorization: Any,
    config: TaskConfig,
    said: str,
) -> None:
    """fastmcp-tasks keeps token and all headers of every call; what is not kept cannot be stolen."""
    secrets = Secrets(database_url, config, fastmcp_authorization)

    async with (
        serve(secrets.server) as url,
        connect(url, token="alice", headers={"x-tenant": "acme", "x-more": "m"}, **can_be_asked) as peer,
    ):
        task_id = await peer.start("whoami")
        await answer(peer, task_id, "yes")
        completed = await poll(peer, task_id, "completed", "failed")

    assert text_of(completed) == said


async def test_what_is_kept_of_a_caller_is_sealed_and_goes_with_the_work(
    tmp_path: Path, connect: Any, serve: Any, can_be_asked: Any, fastmcp_authorization: Any
) -> None:
    """A token in a copied database file would be good for as long as it is valid."""
    path = tmp_path / "tasks.db"
    config = TaskConfig(needs_token=True, needs_headers=["x-tenant"])
    secrets = Secrets(f"sqlite:///{path}", config, fastmcp_authorization)

    def kept() -> bytes | None:
        with sqlite3.connect(path) as connection:
            ((caller,),) = connection.execute("SELECT caller FROM taskstore_tasks").fetchall()
        return None if caller is None else bytes(caller)

    async with (
        serve(secrets.server) as url,
        connect(url, token="alice", headers={"x-tenant": "acme"}, **can_be_asked) as peer,
    ):
        task_id = await peer.start("whoami")
        await poll(peer, task_id, "input_required")
        while_live = kept()
        await answer(peer, task_id, "yes")
        await poll(peer, task_id, "completed", "failed")
        after = kept()

    assert while_live is not None
    assert b"alice" not in while_live
    assert b"acme" not in while_live
    assert after is None


async def test_a_question_outlives_the_rotation_of_the_keys(
    database_url: str, connect: Any, serve: Any, can_be_asked: Any, fastmcp_authorization: Any
) -> None:
    """With the one key of fastmcp-tasks, another key fails whatever waits for its answer."""
    config = TaskConfig(needs_token=True, needs_headers=["x-tenant"])
    servers = [
        Secrets(database_url, config, fastmcp_authorization, keys)
        for keys in ([KEY], [NEW_KEY, KEY], [NEW_KEY])  # before, while and after the keys are changed
    ]
    caller = {"token": "alice", "headers": {"x-tenant": "acme"}, **can_be_asked}

    async with serve(servers[0].server) as url, connect(url, **caller) as peer:
        task_id = await peer.start("whoami")
        asked = await poll(peer, task_id, "input_required")
    async with serve(servers[1].server) as url, connect(url, **caller) as peer:
        while_changing = await peer.get(task_id)
        await servers[1].tasks.store.operator.rotate_keys()
    async with serve(servers[2].server) as url, connect(url, **caller) as peer:
        await answer(peer, task_id, "yes")
        completed = await poll(peer, task_id, "completed", "failed")

    assert while_changing["inputRequests"] == asked["inputRequests"]
    assert text_of(completed) == "alice of acme, then alice of acme"


@pytest.mark.parametrize("config", [TaskConfig(needs_token=True), TaskConfig(needs_headers=["x-tenant"])])
async def test_a_store_without_keys_keeps_no_secrets(
    database_url: str, connect: Any, serve: Any, fastmcp_authorization: Any, refused: Any, config: TaskConfig
) -> None:
    """Rather refuse the call than write a token into a database in the clear."""
    server = FastMCP("secrets", **fastmcp_authorization)
    server.add_extension(TasksExtension(database_url, drain=AT_ONCE))

    @server.tool(task=config)
    async def whoami() -> None: ...

    async with serve(server) as url, connect(url, token="alice") as peer:
        with refused(-32603, "keys="):
            await peer.call("whoami")


async def test_a_tool_that_is_for_some_callers_is_found_again_only_with_the_token(
    database_url: str, connect: Any, serve: Any, can_be_asked: Any, fastmcp_authorization: Any
) -> None:
    """A later run without a token never passes for one with it; it says what is missing."""
    ended = []
    for config in (TaskConfig(), TaskConfig(needs_token=True)):
        secrets = Secrets(database_url, config, fastmcp_authorization, auth=lambda context: context.token is not None)
        async with serve(secrets.server) as url, connect(url, token="alice", **can_be_asked) as peer:
            task_id = await peer.start("whoami")
            await answer(peer, task_id, "yes")
            ended.append(await poll(peer, task_id, "completed", "failed"))

    assert [each["status"] for each in ended] == ["failed", "completed"]
    assert "token that was not kept" in ended[0]["error"]["message"]


async def test_two_users_of_one_client_do_not_see_each_others_tasks(
    database_url: str, connect: Any, serve: Any, fastmcp_authorization: Any, refused: Any
) -> None:
    """Also when the verifier leaves the subject to the claims of the token, as FastMCP's may."""
    server = FastMCP("secrets", **fastmcp_authorization)
    server.add_extension(TasksExtension(database_url, drain=AT_ONCE))

    @server.tool(task=True)
    async def quick() -> None: ...

    async with serve(server) as url, connect(url, token="alice") as alice, connect(url, token="bob") as bob:
        task_id = await alice.start("quick")
        for request in (bob.get(task_id), bob.cancel(task_id), bob.update(task_id, {})):
            with refused(-32602, "Task not found"):
                await request
        mine = await alice.get(task_id)

    assert mine["taskId"] == task_id


# --- after a crash


@pytest.mark.parametrize("mounted", [False, True])
async def test_a_tool_that_can_bear_it_is_called_again_after_a_crash(
    database_url: str, connect: Any, mounted: bool
) -> None:
    """Its arguments, its version and its server are those of the first call."""
    attempts: list[str] = []
    hanging = asyncio.Event()

    def make() -> tuple[FastMCP, TasksExtension]:
        server, tasks = FastMCP("trips"), TasksExtension(database_url, drain=AT_ONCE)
        server.add_extension(tasks)
        owner = FastMCP("child") if mounted else server

        @owner.tool(name="book", task=TaskConfig(on_crash="retry"))
        async def book(to: str, ctx: Context) -> str:
            attempts.append(to)
            if len(attempts) == 1:
                hanging.set()
                await asyncio.Event().wait()
            return f"{to} by {ctx.fastmcp.name}"

        if mounted:
            server.mount(owner, namespace="travel")
        return server, tasks

    (first, tasks), (second, _) = make(), make()
    name = "travel_book" if mounted else "book"

    async with connect(first) as peer:
        task_id = await peer.start(name, to="Rome")
        await hanging.wait()
        crash(tasks.store)
        async with connect(second) as later:
            completed = await poll(later, task_id, "completed", "failed")

    assert text_of(completed) == f"Rome by {'child' if mounted else 'trips'}"
    assert attempts == ["Rome", "Rome"]


async def test_no_tool_runs_before_the_lifespan_of_its_mounted_server(database_url: str, connect: Any) -> None:
    """FastMCP enters the lifespans of mounted servers after those of extensions, which may have work waiting."""
    runs: list[object] = []
    hanging, too_early = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastMCP) -> AsyncIterator[dict[str, str]]:
        if runs:
            with anyio.move_on_after(1):
                await too_early.wait()
        yield {"database": "open"}

    def make() -> tuple[FastMCP, TasksExtension]:
        server, tasks = FastMCP("trips"), TasksExtension(database_url, drain=AT_ONCE)
        server.add_extension(tasks)
        child = FastMCP("child", lifespan=lifespan)

        @child.tool(task=TaskConfig(on_crash="retry"))
        async def book(ctx: Context) -> str:
            runs.append(dict(ctx.lifespan_context))
            if len(runs) == 1:
                hanging.set()
                await asyncio.Event().wait()
            too_early.set()
            return "booked"

        server.mount(child)
        return server, tasks

    (first, tasks), (second, _) = make(), make()

    async with connect(first) as peer:
        task_id = await peer.start("book")
        await hanging.wait()
        crash(tasks.store)
        async with connect(second) as later:
            completed = await poll(later, task_id, "completed", "failed")

    assert text_of(completed) == "booked"
    assert runs == [{"database": "open"}] * 2


async def test_a_late_result_of_a_process_taken_for_dead_changes_nothing(database_url: str, connect: Any) -> None:
    """On Redis the finished task's result changed, when the first process woke up."""
    runs: list[str] = []
    running, wake, woken = threading.Event(), threading.Event(), threading.Event()

    def make() -> tuple[FastMCP, TasksExtension]:
        server, tasks = FastMCP("trips"), TasksExtension(database_url, drain=AT_ONCE)
        server.add_extension(tasks)

        @server.tool(task=TaskConfig(on_crash="retry"))
        def book() -> str:
            runs.append("run")
            number = len(runs)
            if number == 1:
                running.set()
                wake.wait(PATIENCE_SECONDS)
                woken.set()
            return f"run {number}"

        return server, tasks

    (first, tasks), (second, _) = make(), make()

    async with connect(first) as peer:
        task_id = await peer.start("book")
        assert await anyio.to_thread.run_sync(running.wait, PATIENCE_SECONDS)
        crash(tasks.store)
        async with connect(second) as later:
            before = await poll(later, task_id, "completed", "failed")
            wake.set()
            assert await anyio.to_thread.run_sync(woken.wait, PATIENCE_SECONDS)
            after = await later.get(task_id)

    assert text_of(before) == "run 2"
    assert after == before


# --- processes of their own


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Start a server process; what a test leaves running is killed."""
    with ExitStack() as stack:

        def start_one() -> ServerProcess:
            hung = str(tmp_path / "hung")
            return stack.enter_context(ServerProcess("fastmcp_process.py", database_url, HUNG=hung))

        yield start_one


async def test_a_killed_server_tells_the_truth_at_its_next_start(
    start: Callable[[], ServerProcess], connect: Any, can_be_asked: Any
) -> None:
    """Kill -9: what was finished is there, what was parked waits, what ran says so, what can be retried is."""
    first = start()
    async with connect(first.url, **can_be_asked) as peer:
        finished = await peer.start("add", a=1, b=2)
        await poll(peer, finished, "completed")
        parked = await peer.start("greet")
        await poll(peer, parked, "input_required")
        lost, retried = await peer.start("hang"), await peer.start("hang_once")
        for task_id in (lost, retried):
            await message(peer, task_id, "hanging")
    first.stop(signal.SIGKILL)

    second = start()
    async with connect(second.url, **can_be_asked) as peer:
        verdict = await peer.get(lost)
        result = await peer.get(finished)
        await answer(peer, parked, "Ada")
        greeted, done = (
            await poll(peer, parked, "completed", "failed"),
            await poll(peer, retried, "completed", "failed"),
        )

    assert (verdict["status"], verdict["error"]["data"]["reason"]) == ("failed", "CRASH_RECOVERY")
    assert text_of(result) == "3"
    assert text_of(greeted) == "Hello, Ada"
    assert text_of(done) == "done the second time"


async def test_a_tool_that_kills_its_process_is_given_up(start: Callable[[], ServerProcess], connect: Any) -> None:
    """fastmcp-tasks hands such a task to one worker after the other, for ever."""
    process = start()
    async with connect(process.url) as peer:
        task_id = await peer.start("poison")
    for _ in range(2):  # it kills the first process, then each that takes it up
        process.end()
        process = start()
    async with connect(process.url) as peer:
        verdict = await poll(peer, task_id, "completed", "failed")

    assert verdict["status"] == "failed"
    assert verdict["error"]["data"]["reason"] == "CRASH_RECOVERY"


async def test_any_replica_answers_for_all_and_takes_over_from_the_dead(
    start: Callable[[], ServerProcess], connect: Any, can_be_asked: Any
) -> None:
    """Behind a load balancer no client knows, or needs to know, who runs its task."""
    replicas = [start() for _ in range(3)]
    async with (
        connect(replicas[0].url, **can_be_asked) as one,
        connect(replicas[1].url, **can_be_asked) as two,
        connect(replicas[2].url, **can_be_asked) as three,
    ):
        task_id = await one.start("greet")
        await answer(two, task_id, "Ada")
        greeted = await poll(three, task_id, "completed", "failed")
        held, hung = await one.start("hang"), await one.start("hang_once")
        await message(two, hung, "hanging")
        await two.cancel(held)
        cancelled = await three.get(held)
    replicas[0].stop(signal.SIGKILL)
    async with connect(replicas[1].url, **can_be_asked) as two:
        done = await poll(two, hung, "completed", "failed")

    assert text_of(greeted) == "Hello, Ada"
    assert cancelled["status"] == "cancelled"
    assert text_of(done) == "done the second time"


async def message(peer: Any, task_id: str, text: str) -> None:
    """Wait until a task says this of itself."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while text not in (await peer.get(task_id)).get("statusMessage", ""):  # noqa: ASYNC110
            await anyio.sleep(0.02)
