"""A client that speaks the tasks extension, and servers for it, in process and over HTTP."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal

import httpx2
import mcp_types
import pytest
import uvicorn
from fastmcp import FastMCP
from fastmcp.server.auth import AccessToken as FastMCPToken
from fastmcp.server.auth import TokenVerifier
from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, NotificationBinding, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from pydantic import AnyHttpUrl, BaseModel, ConfigDict

from taskstore import AuthContext, Task, TaskStatus, TaskStore
from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v2 import TasksExtension

EXTENSION = TasksExtension.identifier


class Answer(mcp_types.Result):
    """Any result, as it came over the wire."""

    model_config = ConfigDict(extra="allow")

    @property
    def wire(self) -> dict[str, Any]:
        return self.model_extra or {}


class CreatedTask(mcp_types.Result):
    """A CreateTaskResult."""

    model_config = ConfigDict(extra="allow")
    result_type: Literal["task"] = "task"

    @property
    def wire(self) -> dict[str, Any]:
        return {"resultType": self.result_type, **(self.model_extra or {})}


Messages = asyncio.Queue[dict[str, Any]]


class Heard:
    """Keeps the server's notifications that the SDK knows."""

    def __init__(self) -> None:
        self.messages: Messages = asyncio.Queue()

    async def hear(self, message: object) -> None:
        if isinstance(message, BaseModel):
            self.messages.put_nowait(message.model_dump(by_alias=True, exclude_none=True))


class Pushed(BaseModel):
    """The params of a notification, as they came over the wire."""

    model_config = ConfigDict(extra="allow")


class DeclaresTasks(ClientExtension):
    """Declares the extension, takes a CreateTaskResult as it is, and keeps what is pushed about tasks."""

    identifier = EXTENSION

    def __init__(self) -> None:
        self.pushed: Messages = asyncio.Queue()

    def notifications(self) -> list[NotificationBinding[Pushed]]:
        async def keep(params: Pushed) -> None:
            self.pushed.put_nowait(params.model_extra or {})

        return [NotificationBinding(method="notifications/tasks", params_type=Pushed, handler=keep)]

    def claims(self) -> list[ResultClaim[CreatedTask]]:
        async def resolve(created: CreatedTask, context: ClaimContext) -> mcp_types.CallToolResult:
            raise AssertionError("the tests poll for themselves")

        return [ResultClaim(result_type="task", model=CreatedTask, resolve=resolve)]


class RawRequest(mcp_types.Request[dict[str, Any], str]):
    """Any request, without routing header."""


class TaskRequest(RawRequest):
    """A request that is routed by its task id."""

    name_param: ClassVar[str | None] = "taskId"


class Peer:
    """A connected client in terms of the extension.

    Attributes:
        pushed: The params of the notifications about tasks that came so far.
        messages: The notifications that came so far of those that the SDK knows.
    """

    def __init__(self, client: Client, pushed: Messages, messages: Messages) -> None:
        self.client, self.pushed, self.messages = client, pushed, messages

    async def listen(self, **filters: object) -> dict[str, Any]:
        """Open a stream of notifications; return when the server ends it."""
        return await self.request("subscriptions/listen", {"notifications": filters}, routed=False)

    async def call(self, tool: str, **arguments: object) -> dict[str, Any]:
        """Call a tool and return the result's JSON, be it a task or not."""
        result = await self.client.session.call_tool(tool, arguments, allow_input_required=True, allow_claimed=True)
        if isinstance(result, CreatedTask):
            return result.wire
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def start(self, tool: str, **arguments: object) -> str:
        """Call a tool that must become a task, and return the task's id."""
        created = await self.call(tool, **arguments)
        assert created["resultType"] == "task", created
        return str(created["taskId"])

    async def request(self, method: str, params: Mapping[str, object], *, routed: bool = True) -> dict[str, Any]:
        """Send any request and return the result's JSON."""
        request = (TaskRequest if routed else RawRequest)(method=method, params=dict(params))
        return (await self.client.session.send_request(request, Answer)).wire

    async def get(self, task_id: str) -> dict[str, Any]:
        return await self.request("tasks/get", {"taskId": task_id})

    async def cancel(self, task_id: str) -> dict[str, Any]:
        return await self.request("tasks/cancel", {"taskId": task_id})

    async def update(self, task_id: str, responses: Mapping[str, object]) -> dict[str, Any]:
        return await self.request("tasks/update", {"taskId": task_id, "inputResponses": dict(responses)})


Connect = Callable[..., AbstractAsyncContextManager[Peer]]
Serve = Callable[..., AbstractAsyncContextManager[str]]


@asynccontextmanager
async def _connect(
    target: MCPServer[Any] | FastMCP[Any] | str,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    declares: bool = True,
    mode: str = "2026-07-28",
    **options: Any,
) -> AsyncIterator[Peer]:
    async with contextlib.AsyncExitStack() as stack:
        where: Any = target._mcp_server if isinstance(target, FastMCP) else target
        if isinstance(target, str):
            bearer = {} if token is None else {"Authorization": f"Bearer {token}"}
            headers = {**(headers or {}), **bearer}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
            where = streamable_http_client(target, http_client=http)
        extension, heard = DeclaresTasks(), Heard()
        extensions = [extension] if declares else []
        client = Client(where, mode=mode, extensions=extensions, message_handler=heard.hear, **options)
        yield Peer(await stack.enter_async_context(client), extension.pushed, heard.messages)


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
async def _serve(server: MCPServer[Any] | FastMCP[Any], **options: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    make_app = server.http_app if isinstance(server, FastMCP) else server.streamable_http_app
    uvicorn_server = _Uvicorn(uvicorn.Config(make_app(**options), log_level="warning", lifespan="on"))
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


@pytest.fixture
def connect() -> Connect:
    """Connect to a server in process or to a URL: ``async with connect(server) as peer``."""
    return _connect


@pytest.fixture
def serve() -> Serve:
    """Serve over streamable HTTP on a free port: ``async with serve(server) as url``."""
    return _serve


@pytest.fixture
def tasks(database_url: str) -> TasksExtension:
    return TasksExtension(database_url, drain=timedelta(0))


@pytest.fixture
def server(tasks: TasksExtension) -> MCPServer:
    return MCPServer("reports", extensions=[tasks], lifespan=tasks.lifespan)


async def _never(*_: object) -> Any:
    raise AssertionError("questions of a task are not sent as requests of their own")


@pytest.fixture
def can_be_asked() -> dict[str, Any]:
    """Keywords that make a client declare elicitation, sampling and roots."""
    return {"elicitation_callback": _never, "sampling_callback": _never, "list_roots_callback": _never}


async def _wait_for(store: TaskStore, task_id: str, owner: AuthContext | None, status: TaskStatus) -> Task:
    async with asyncio.timeout(60):
        task = await store.get_task(task_id, auth=owner)
        while task.status is not status and not task.is_finished:
            task = await store.wait_for_task(task_id, auth=owner, since_version=task.version)
    assert task.status is status, task
    return task


@pytest.fixture
def wait_for() -> Callable[..., Awaitable[Task]]:
    """Wait until a task has a status: ``await wait_for(store, task_id, owner, TaskStatus.COMPLETED)``."""
    return _wait_for


@pytest.fixture
def local() -> AuthContext:
    """The auth context of a client in this process."""
    return local_user()


class Tokens:
    """A token verifier whose token *is* the user's name; every user comes through the same client."""

    async def verify_token(self, token: str) -> AccessToken | None:
        if token.startswith("nobody"):
            return None
        claims = {"iss": "https://issuer.example"}
        return AccessToken(token=token, client_id="app", scopes=[], subject=token, claims=claims)


@pytest.fixture
def authorization() -> dict[str, Any]:
    """Keywords that make an ``MCPServer`` demand a bearer token, which is the user's name."""
    url = AnyHttpUrl("http://127.0.0.1/mcp")
    settings = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=url, validate_token_resource=False
    )
    return {"auth": settings, "token_verifier": Tokens()}


class FastMCPTokens(TokenVerifier):
    """The same for FastMCP; it leaves the subject to the claims, as verifiers may."""

    async def verify_token(self, token: str) -> FastMCPToken | None:
        if token.startswith("nobody"):
            return None
        claims = {"iss": "https://issuer.example", "sub": token}
        return FastMCPToken(token=token, client_id="app", scopes=[], claims=claims)


@pytest.fixture
def fastmcp_authorization() -> dict[str, Any]:
    """Keywords that make a ``FastMCP`` server demand a bearer token, which is the user's name."""
    return {"auth": FastMCPTokens()}


async def _garbage_of(server: MCPServer[Any] | FastMCP[Any], tasks: Any) -> list[object]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        async with _connect(server) as peer:
            for number in range(5):
                task_id = await peer.start("add", a=number, b=1)
                await tasks.store.wait_for_task(task_id, auth=local_user())
            gc.collect()
            return [each for each in gc.garbage if type(each).__module__.startswith("taskstore.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture
def garbage_of() -> Callable[..., Awaitable[list[object]]]:
    """Run the tool ``add`` as tasks; list our objects that only the garbage collector can free after that.

    Seen with a wrapped concurrent future, and with a channel that held the connection that it was the channel of.
    """
    return _garbage_of


@contextlib.contextmanager
def _refused(code: int, text: str = "") -> Iterator[None]:
    with pytest.raises(MCPError) as caught:
        yield
    assert caught.value.error.code == code, caught.value.error
    assert text in caught.value.error.message


@pytest.fixture
def refused() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Expect a JSON-RPC error: ``with refused(-32602, "not found")``."""
    return _refused
