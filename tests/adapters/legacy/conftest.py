"""A client of MCP 2025-11-25 that sends and gets plain JSON, so that no model of an SDK stands in between."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client._memory import InMemoryTransport
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from mcp.shared.dispatcher import CallOptions
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

from taskstore.adapters.mcp_v2 import TasksExtension

RELATED_TASK = "io.modelcontextprotocol/related-task"

Respond = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]


async def decline(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"action": "decline"}


class LegacyPeer:
    """A connected client; keeps what the server sent."""

    def __init__(self, dispatcher: JSONRPCDispatcher, version: str, respond: Respond) -> None:
        self._dispatcher, self._respond = dispatcher, respond
        self._options: CallOptions = {"headers": {MCP_PROTOCOL_VERSION_HEADER: version}}
        self.initialized: dict[str, Any] = {}
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.notified: list[tuple[str, Mapping[str, Any]]] = []
        self._news = asyncio.Event()

    async def request(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._dispatcher.send_raw_request(method, params, self._options)

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        await self._dispatcher.notify(method, params, self._options)

    async def call(self, tool: str, arguments: Mapping[str, Any] | None = None, **params: Any) -> dict[str, Any]:
        return await self.request("tools/call", {"name": tool, "arguments": arguments or {}, **params})

    async def start(self, tool: str, arguments: Mapping[str, Any] | None = None, **params: Any) -> str:
        """Call a tool as a task, and return the task's id."""
        created = await self.call(tool, arguments, **{"task": {}, **params})
        return str(created["task"]["taskId"])

    async def get(self, task_id: str) -> dict[str, Any]:
        return await self.request("tasks/get", {"taskId": task_id})

    async def result(self, task_id: str) -> dict[str, Any]:
        return await self.request("tasks/result", {"taskId": task_id})

    async def cancel(self, task_id: str) -> dict[str, Any]:
        return await self.request("tasks/cancel", {"taskId": task_id})

    async def until_notified(self, enough: Callable[[list[tuple[str, Mapping[str, Any]]]], bool]) -> None:
        """Wait until the notifications so far are enough."""
        with anyio.fail_after(30):
            while not enough(self.notified):
                self._news.clear()
                await self._news.wait()

    async def on_request(self, _: object, method: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
        self.asked.append((method, params or {}))
        return await self._respond(method, params or {})

    async def on_notify(self, _: object, method: str, params: Mapping[str, Any] | None) -> None:
        self.notified.append((method, params or {}))
        self._news.set()


ConnectLegacy = Callable[..., AbstractAsyncContextManager[LegacyPeer]]


@asynccontextmanager
async def _connect(
    target: MCPServer[Any] | str,
    *,
    token: str | None = None,
    capabilities: Mapping[str, Any] | None = None,
    respond: Respond = decline,
    version: str = "2025-11-25",
) -> AsyncIterator[LegacyPeer]:
    async with AsyncExitStack() as stack:
        transport: Any
        if isinstance(target, str):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
            transport = streamable_http_client(target, http_client=http)
        else:
            transport = InMemoryTransport(target)
        streams = await stack.enter_async_context(transport)
        dispatcher: JSONRPCDispatcher = JSONRPCDispatcher(streams[0], streams[1])
        peer = LegacyPeer(dispatcher, version, respond)
        running = asyncio.create_task(dispatcher.run(peer.on_request, peer.on_notify))
        await asyncio.sleep(0)
        try:
            client = {"name": "legacy", "version": "1"}
            declared = {"protocolVersion": version, "capabilities": dict(capabilities or {}), "clientInfo": client}
            peer.initialized = await dispatcher.send_raw_request("initialize", declared)
            await peer.notify("notifications/initialized")
            yield peer
        finally:
            running.cancel()
            await asyncio.wait({running})


@pytest.fixture
def connect_legacy() -> ConnectLegacy:
    """Connect to a server in process or to a URL: ``async with connect_legacy(server) as peer``."""
    return _connect


class Reports:
    """A server with tools that run never, at will and only as a task, and the events of the one that waits."""

    def __init__(
        self, database_url: str, *, compat: Any = None, result_mode: Any = "block", **server_options: Any
    ) -> None:
        self.tasks = TasksExtension(database_url, drain=timedelta(0), compat=compat, result_mode=result_mode)
        self.server: MCPServer[Any] = MCPServer(
            "reports",
            extensions=[self.tasks],
            middleware=[self.tasks.legacy],
            lifespan=self.tasks.lifespan,
            **server_options,
        )
        self.running, self.opened, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @self.server.tool()
        async def greet(name: str) -> str:
            return f"Hello, {name}!"

        @self.server.tool()
        @self.tasks.task()
        async def wait() -> str:
            self.running.set()
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return "through"

        @self.server.tool()
        @self.tasks.task(mode="required")
        async def add(a: int, b: int) -> int:
            return a + b


@pytest.fixture
def reports(database_url: str) -> Reports:
    return Reports(database_url)


@pytest.fixture
def make_reports(database_url: str) -> Callable[..., Reports]:
    """Make the server with options of its own, such as authorization, or the extension's ``compat``."""

    def make(**options: Any) -> Reports:
        return Reports(database_url, **options)

    return make
