"""The server of ``server.py`` on FastMCP: ``python tests/conformance/fastmcp_server.py --port 8000 --url sqlite:///t.db``."""

import anyio
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, InputRequiredResult
from starlette.applications import Starlette

from taskstore.adapters.fastmcp import TaskConfig, TasksExtension
from tests.conformance.server import answers, ask, run


def make_server(url: str) -> FastMCP:
    """Make the server over a store; the suite sends no token, so there is no authorization."""
    server = FastMCP("conformance")
    server.add_extension(TasksExtension(url))

    @server.tool
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool(task=True)
    async def slow_compute(seconds: float = 1, label: str = "") -> str:
        await anyio.sleep(seconds)
        return f"done {label}"

    @server.tool(task=TaskConfig(mode="required"))
    async def failing_job() -> str:
        await anyio.sleep(1)
        raise ToolError("The job failed.")

    @server.tool(task=True)
    async def protocol_error_job() -> str:
        raise MCPError(INTERNAL_ERROR, "The job failed at protocol level.")

    @server.tool(task=True)
    async def confirm_delete(filename: str, ctx: Context) -> str | InputRequiredResult:
        confirmed = answers(ctx.input_responses).get("confirm")
        if confirmed is None:
            return ask({"confirm": (f"Delete {filename}?", "confirm", "boolean")})
        return f"deleted {filename}" if (confirmed.content or {}).get("confirm") else f"kept {filename}"

    @server.tool(task=True)
    async def multi_input(ctx: Context) -> str | InputRequiredResult:
        given = answers(ctx.input_responses)
        if not given:
            return ask({"first": ("Your first name?", "name", "string"), "last": ("Your last name?", "name", "string")})
        return " ".join(str((given[key].content or {}).get("name")) for key in ("first", "last"))

    @server.tool(task=TaskConfig(mode="required", input_first=True))
    async def test_tool_with_task(ctx: Context) -> str | InputRequiredResult:
        named = answers(ctx.input_responses).get("user_name")
        if named is None:
            return ask({"user_name": ("Your name?", "name", "string")})
        return f"Task completed for {(named.content or {}).get('name')}"

    return server


def make_app(url: str) -> Starlette:
    """Make the ASGI application, at the path that the test calls."""
    return make_server(url).http_app(path="/mcp")


if __name__ == "__main__":
    run(make_app)
