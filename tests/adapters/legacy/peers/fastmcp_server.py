"""The server of ``server.py`` on FastMCP: ``python fastmcp_server.py DATABASE_URL`` serves it on stdio."""

import sys
from datetime import timedelta
from typing import Any

import anyio
from fastmcp import Context, FastMCP
from mcp.shared.exceptions import MCPError
from mcp_types import SamplingMessage, TextContent
from pydantic import BaseModel

from taskstore.adapters.fastmcp import TaskConfig, TasksExtension

POLL = timedelta(milliseconds=50)


class Confirmation(BaseModel):
    """What the user is asked for."""

    confirm: bool


def make_server(url: str, **server_options: Any) -> FastMCP[Any]:
    """Make a server with one tool for each way a task can go."""
    server: FastMCP[Any] = FastMCP("peers", **server_options)
    server.add_extension(TasksExtension(url, drain=timedelta(0)))
    optional = TaskConfig(poll_interval=POLL)

    @server.tool
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool(task=TaskConfig(mode="required", poll_interval=POLL))
    def add(a: int, b: int) -> int:
        return a + b

    @server.tool(task=optional)
    async def refuse() -> str:
        raise MCPError(-31999, "Quota exceeded", {"limit": 3})

    @server.tool(task=optional)
    async def break_down() -> str:
        raise RuntimeError("no")

    @server.tool(task=optional)
    async def hold() -> None:
        await anyio.sleep_forever()

    @server.tool(task=optional)
    async def count(ctx: Context) -> None:
        for value in (1, 2):
            await ctx.report_progress(value, 2)

    @server.tool(task=optional)
    async def confirm(ctx: Context) -> str:
        answer = await ctx.elicit("Delete?", Confirmation)
        return f"{answer.action}: {answer.data.confirm}" if answer.action == "accept" else answer.action

    @server.tool(task=optional)
    async def summarize(ctx: Context) -> str:
        messages = [SamplingMessage(role="user", content=TextContent(type="text", text="Summarize."))]
        answer = await ctx.session.create_message(messages, max_tokens=10)
        assert isinstance(answer.content, TextContent)
        return answer.content.text

    return server


if __name__ == "__main__":
    make_server(sys.argv[1]).run("stdio", show_banner=False)
