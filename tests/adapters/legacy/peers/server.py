"""The server that the real clients talk to: ``python server.py DATABASE_URL`` serves it on stdio."""

import sys
from datetime import timedelta
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import SamplingMessage, TextContent
from pydantic import BaseModel

from taskstore.adapters.mcp_v2 import TasksExtension


class Confirmation(BaseModel):
    """What the user is asked for."""

    confirm: bool


def make_server(url: str, **server_options: Any) -> MCPServer[Any]:
    """Make a server with one tool for each way a task can go."""
    tasks = TasksExtension(url, default_poll_interval=timedelta(milliseconds=50), drain=timedelta(0))
    server: MCPServer[Any] = MCPServer(
        "peers", extensions=[tasks], middleware=[tasks.legacy], lifespan=tasks.lifespan, **server_options
    )

    @server.tool()
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool()
    @tasks.task(mode="required")
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool()
    @tasks.task()
    async def refuse() -> str:
        raise MCPError(-31999, "Quota exceeded", {"limit": 3})

    @server.tool()
    @tasks.task()
    async def break_down() -> str:
        raise RuntimeError("no")

    @server.tool()
    @tasks.task()
    async def hold() -> None:
        await anyio.sleep_forever()

    @server.tool()
    @tasks.task()
    async def count(ctx: Context) -> None:
        for value in (1, 2):
            await ctx.report_progress(value, 2)

    @server.tool()
    @tasks.task()
    async def confirm(ctx: Context) -> str:
        answer = await ctx.elicit("Delete?", Confirmation)
        return f"{answer.action}: {answer.data.confirm}" if answer.action == "accept" else answer.action

    @server.tool()
    @tasks.task()
    async def summarize(ctx: Context) -> str:
        messages = [SamplingMessage(role="user", content=TextContent(type="text", text="Summarize."))]
        answer = await ctx.session.create_message(messages, max_tokens=10)
        assert isinstance(answer.content, TextContent)
        return answer.content.text

    return server


if __name__ == "__main__":
    make_server(sys.argv[1]).run("stdio")
