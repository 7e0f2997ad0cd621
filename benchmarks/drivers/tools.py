"""A server of the official SDK 2.x and its client, in this process, with taskstore behind its tools.

An operation is a plain tool call, the same call answered with a task's handle, and one poll of that task: what the
adapter adds to a call is the difference of the first two. The tool of the task is done at once, as the plain one is.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter

from mcp import Client
from mcp.server.mcpserver import MCPServer

from benchmarks.work import REQUEST_TEXT, RESULT_TEXT
from taskstore import TaskStore
from taskstore.adapters.mcp_v2 import RemoteTask, TasksClient, TasksExtension


class Tools:
    """One client of one server."""

    def __init__(self, client: Client, tasks: TasksClient) -> None:
        self._client, self._tasks = client, tasks

    @classmethod
    @asynccontextmanager
    async def connect(cls, store: TaskStore) -> AsyncIterator["Tools"]:
        """Serve two tools, and connect to them."""
        extension, tasks = TasksExtension(store), TasksClient()
        # At INFO, the default, the SDK has Rich print each line of the audit log: slower than all that is measured.
        server = MCPServer("benchmark", extensions=[extension], lifespan=extension.lifespan, log_level="WARNING")

        @server.tool()
        async def plain(topic: str) -> str:
            return RESULT_TEXT

        @server.tool()
        @extension.task()
        async def task(topic: str) -> str:
            return RESULT_TEXT

        async with AsyncExitStack() as stack:
            yield cls(await stack.enter_async_context(Client(server, extensions=[tasks])), tasks)

    async def call(self) -> list[float]:
        """Call both tools and poll once; return the instants before, between and after."""
        arguments = {"topic": REQUEST_TEXT}
        at = [perf_counter()]
        await self._client.call_tool("plain", arguments)
        at.append(perf_counter())
        started = await self._tasks.start(self._client, "task", arguments)
        at.append(perf_counter())
        assert isinstance(started, RemoteTask), "the client declares the extension"
        await started.get()
        at.append(perf_counter())
        while (await started.get()).status == "working":
            pass  # the next call is not to meet the end of this task
        return at
