"""The report server on the SDK 1.x, for clients of MCP 2025-11-25: copy it, and put your work in place of the sleep.

Run it on stdio with ``python examples/report_server_mcp1.py``, or over HTTP with ``--http``. A client that sends the
field ``task`` with its call gets a task at once, polls it with tasks/get, and finds the report with tasks/result even
if it, or this server, was restarted in between.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import TASK_REQUIRED, CallToolResult, CreateTaskResult, TextContent, Tool, ToolExecution
from starlette.applications import Starlette
from starlette.routing import Mount

from taskstore.adapters.mcp_v1 import DurableTaskContext, enable_durable_tasks

server = Server("reports")
tasks = enable_durable_tasks(server, os.environ.get("REPORTS_DATABASE", "sqlite:///reports.db"))


@server.list_tools()
async def list_tools() -> list[Tool]:
    """Name the tool, which runs only as a task."""
    schema = {
        "type": "object",
        "properties": {"topic": {"type": "string"}, "pages": {"type": "integer"}},
        "required": ["topic"],
    }
    execution = ToolExecution(taskSupport=TASK_REQUIRED)
    return [Tool(name="generate_report", description="Write a report.", inputSchema=schema, execution=execution)]


@server.call_tool()
async def call_tool(name: str, arguments: dict[str, object]) -> CreateTaskResult:
    """Write a report on a topic, page by page, as a task."""
    topic, pages = arguments["topic"], int(str(arguments.get("pages", 10)))

    async def write(task: DurableTaskContext) -> CallToolResult:
        for page in range(1, pages + 1):
            await task.report_progress(page, pages, f"writing page {page}")
            await asyncio.sleep(1)
        return CallToolResult(content=[TextContent(type="text", text=f"A report on {topic}, {pages} pages long.")])

    created: CreateTaskResult = await server.request_context.experimental.run_task(write)
    return created


async def serve_stdio() -> None:
    """Serve the one client that started this process."""
    async with tasks, stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def serve_http() -> None:
    """Serve any number of clients on port 8000."""
    manager = StreamableHTTPSessionManager(server)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with tasks, manager.run():
            yield

    app = Starlette(routes=[Mount("/mcp", app=manager.handle_request)], lifespan=lifespan)
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))


if __name__ == "__main__":
    if "--http" in sys.argv:
        serve_http()
    else:
        asyncio.run(serve_stdio())
