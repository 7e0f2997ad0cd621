"""Servers and clients of the SDK 1.x; this folder runs in an environment of its own (tests/adapters/test_mcp_v1.py)."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import McpError
from mcp.shared.memory import create_connected_server_and_client_session
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route

from taskstore import AuthContext
from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v1 import DurableTasks, enable_durable_tasks

Work = Callable[[ServerTaskContext], Awaitable[types.Result]]
Connect = Callable[..., AbstractAsyncContextManager["Peer"]]
Serve = Callable[..., AbstractAsyncContextManager[str]]

AT_ONCE = timedelta(0)


def pytest_configure(config: pytest.Config) -> None:
    # The SDK says at every use that its 2.x has no such tasks.
    config.addinivalue_line("filterwarnings", "ignore:The experimental tasks API:DeprecationWarning")


def text(said: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=said)], isError=is_error)


class Reports:
    """A server of the SDK 1.x whose tools are written as its documentation has it.

    ``works`` says what each tool does as a task; ``wait`` runs until the test opens it.
    """

    def __init__(self) -> None:
        self.server: Server[Any, Any] = Server("reports")
        self.running, self.opened, self.stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.works: dict[str, Work] = {"wait": self.wait, "quick": quick, "required": quick}
        self.modes: dict[str, types.TaskExecutionMode] = {"required": types.TASK_REQUIRED}
        self.server.list_tools()(self.list_tools)
        self.server.call_tool()(self.call_tool)

    async def list_tools(self) -> list[types.Tool]:
        schema = {"type": "object", "properties": {"pages": {"type": "integer"}}}
        tools = [
            types.Tool(
                name=name,
                inputSchema=schema,
                execution=types.ToolExecution(taskSupport=self.modes.get(name, types.TASK_OPTIONAL)),
            )
            for name in self.works
        ]
        return [*tools, types.Tool(name="greet", inputSchema={"type": "object"})]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> types.CallToolResult | types.CreateTaskResult:
        experimental = self.server.request_context.experimental
        experimental.validate_task_mode(types.TASK_FORBIDDEN if name == "greet" else self.modes.get(name, "optional"))
        if experimental.is_task:
            created: types.CreateTaskResult = await experimental.run_task(self.works[name])
            return created
        return text("inline")

    async def wait(self, task: ServerTaskContext) -> types.Result:
        self.running.set()
        try:
            await self.opened.wait()
        finally:
            self.stopped.set()
        return text("through")


async def quick(task: ServerTaskContext) -> types.Result:
    return text("done")


class Peer:
    """A connected client; keeps the notifications that it got."""

    def __init__(self, session: ClientSession, notified: list[types.ServerNotification]) -> None:
        self.session, self.notified = session, notified

    async def start(self, tool: str, arguments: dict[str, Any] | None = None, **asked: Any) -> str:
        """Call a tool as a task, and return the task's id."""
        return (await self.create(tool, arguments, **asked)).task.taskId

    async def create(
        self, tool: str, arguments: dict[str, Any] | None = None, *, token: str | None = None, **asked: Any
    ) -> types.CreateTaskResult:
        params = types.CallToolRequestParams.model_validate(
            {
                "name": tool,
                "arguments": arguments or {},
                "task": asked,
                **({} if token is None else {"_meta": {"progressToken": token}}),
            }
        )
        request = types.ClientRequest(types.CallToolRequest(params=params))
        return await self.session.send_request(request, types.CreateTaskResult)

    async def get(self, task_id: str) -> types.GetTaskResult:
        return await self.session.experimental.get_task(task_id)

    async def polled(self, task_id: str, is_enough: Callable[[types.GetTaskResult], bool]) -> types.GetTaskResult:
        """Poll a task until it is as wanted."""
        with anyio.fail_after(30):
            while not is_enough(task := await self.get(task_id)):  # noqa: ASYNC110  clients poll
                await anyio.sleep(0.01)
            return task

    async def result(self, task_id: str) -> types.CallToolResult:
        return await self.session.experimental.get_task_result(task_id, types.CallToolResult)

    async def page(self, cursor: str | None = None) -> types.ListTasksResult:
        return await self.session.experimental.list_tasks(cursor)

    async def cancel(self, task_id: str) -> types.CancelTaskResult:
        return await self.session.experimental.cancel_task(task_id)

    async def until(self, is_enough: Callable[[list[types.ServerNotification]], bool], patience: float = 30) -> None:
        """Wait until the notifications so far are enough."""
        with anyio.fail_after(patience):
            while not is_enough(self.notified):  # noqa: ASYNC110  the SDK's callback is all there is
                await anyio.sleep(0.01)


@asynccontextmanager
async def connect_to(
    target: Server[Any, Any] | str, *, token: str | None = None, **callbacks: Any
) -> AsyncIterator[Peer]:
    """Connect to a server in process, or to a URL."""
    notified: list[types.ServerNotification] = []

    async def keep(message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            notified.append(message)

    async with AsyncExitStack() as stack:
        if isinstance(target, str):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=60))
            read, write, _ = await stack.enter_async_context(streamable_http_client(target, http_client=http))
            session = await stack.enter_async_context(ClientSession(read, write, message_handler=keep, **callbacks))
            await session.initialize()
        else:
            session = await stack.enter_async_context(
                create_connected_server_and_client_session(target, message_handler=keep, **callbacks)
            )
        yield Peer(session, notified)


class Tokens:
    """A token verifier whose token *is* the user's name; every user comes through the same client."""

    async def verify_token(self, token: str) -> AccessToken | None:
        claims = {"iss": "https://issuer.example"}
        return AccessToken(token=token, client_id="app", scopes=[], subject=token, claims=claims)


class _Uvicorn(uvicorn.Server):
    """A server inside a test: says when it listens, and leaves the signals to pytest."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve_http(
    server: Server[Any, Any], *, authorization: bool = False, guarded: bool = True, stateless: bool = False
) -> AsyncIterator[str]:
    """Serve over streamable HTTP on a free port, with bearer tokens when asked for; yields the URL."""
    manager = StreamableHTTPSessionManager(server, stateless=stateless)

    class Endpoint:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await manager.handle_request(scope, receive, send)

    endpoint: Any = Endpoint()
    middleware = []
    if authorization:
        middleware = [
            Middleware(AuthenticationMiddleware, backend=BearerAuthBackend(Tokens())),
            Middleware(AuthContextMiddleware),
        ]
        if guarded:
            endpoint = RequireAuthMiddleware(endpoint, [])
    app = Starlette(routes=[Route("/mcp", endpoint)], middleware=middleware, lifespan=lambda _: manager.run())
    listener = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = _Uvicorn(uvicorn.Config(app, log_level="warning", lifespan="on", ws="none"))
    serving = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
    listening = asyncio.create_task(uvicorn_server.listening.wait())
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        raise AssertionError("the server did not start") from serving.exception()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        uvicorn_server.should_exit = True
        await serving
        listener.close()


@contextlib.contextmanager
def refusal(code: int, said: str = "") -> Iterator[None]:
    """Expect a JSON-RPC error."""
    with pytest.raises(McpError) as caught:
        yield
    assert caught.value.error.code == code, caught.value.error
    assert said in caught.value.error.message


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
async def tasks(reports: Reports, database_url: str) -> AsyncIterator[DurableTasks]:
    """The durable tasks of ``reports``, open for the whole test."""
    async with enable_durable_tasks(reports.server, database_url, drain=AT_ONCE) as opened:
        yield opened


@pytest.fixture
def connect() -> Connect:
    """Connect to a server in process or to a URL: ``async with connect(server) as peer``."""
    return connect_to


@pytest.fixture
def serve() -> Serve:
    """Serve over streamable HTTP: ``async with serve(server) as url``."""
    return serve_http


@pytest.fixture
def refused() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Expect a JSON-RPC error: ``with refused(-32602, "not found")``."""
    return refusal


@pytest.fixture
def local() -> AuthContext:
    """The auth context of a client in this process."""
    return local_user()
