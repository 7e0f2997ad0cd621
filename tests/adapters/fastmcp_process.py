"""A FastMCP server with tools that hang, ask and kill: ``python fastmcp_process.py --port 0 --url sqlite:///t.db``.

Prints its port when it listens. ``HUNG`` names a file: while there is none, the tool ``hang_once`` makes it and hangs.
"""

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path

from fastmcp import Context, FastMCP
from mcp_types import InputRequiredResult

from taskstore import StoreOptions
from taskstore.adapters.fastmcp import TaskConfig, TasksExtension
from tests.conformance.server import answers, ask, run

OFTEN = StoreOptions(recovery_interval=timedelta(milliseconds=200))


def make_server(url: str) -> FastMCP:
    """Make the server; upkeep looks often, so that no test waits for it."""
    server = FastMCP("processes")
    server.add_extension(TasksExtension(url, options=OFTEN, drain=timedelta(0)))

    @server.tool(task=True)
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool(task=True)
    async def greet(ctx: Context) -> str | InputRequiredResult:
        name = answers(ctx.input_responses).get("name")
        return (
            ask({"name": ("Name?", "value", "string")}) if name is None else f"Hello, {(name.content or {})['value']}"
        )

    @server.tool(task=True)
    async def hang(ctx: Context) -> None:
        await ctx.report_progress(1, 2, "hanging")
        await asyncio.Event().wait()

    @server.tool(task=TaskConfig(on_crash="retry"))
    async def hang_once(ctx: Context) -> str:
        if is_first(Path(os.environ["HUNG"])):
            await ctx.report_progress(1, 2, "hanging")
            await asyncio.Event().wait()
        return "done the second time"

    @server.tool(task=TaskConfig(on_crash="retry", max_attempts=2))
    def poison() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return server


def is_first(mark: Path) -> bool:
    """Tell whether nobody has called this before, and leave a mark."""
    is_new = not mark.exists()
    mark.touch()
    return is_new


if __name__ == "__main__":
    run(lambda url: make_server(url).http_app(path="/mcp"))
