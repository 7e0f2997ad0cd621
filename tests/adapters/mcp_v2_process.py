"""A server on the SDK 2.x with tools that report and hang: ``python mcp_v2_process.py --port 0 --url sqlite:///t.db``.

Prints its port when it listens. ``FOLDER`` is a folder for the marks by which test and tools tell each other how far
they are. ``DRAIN`` is how long the server lets its work go on when it is told to stop, in seconds.
"""

import asyncio
import os
from datetime import timedelta
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from starlette.applications import Starlette

from taskstore import OnCrash, StoreOptions
from taskstore.adapters.mcp_v2 import TasksExtension
from tests.conformance.server import run

FOLDER = Path(os.environ["FOLDER"])


def make_app(url: str) -> Starlette:
    """Make the ASGI application."""
    # Upkeep looks often, so that no test waits for it.
    options = StoreOptions(recovery_interval=timedelta(milliseconds=200))
    tasks = TasksExtension(url, options=options, drain=timedelta(seconds=float(os.environ["DRAIN"])))
    server = MCPServer("processes", extensions=[tasks], lifespan=tasks.lifespan)

    for policy in (OnCrash.FAIL, OnCrash.RETRY, OnCrash.ASK):

        @server.tool(name=policy)
        @tasks.task(on_crash=policy)
        async def report(ctx: Context) -> str:
            """Report again and again; done once there is the mark ``finish``."""
            done = 0
            while not (FOLDER / "finish").exists():
                done += 1
                await ctx.report_progress(done, message=f"step {done}")
                await asyncio.sleep(0.01)
            return "done"

    @server.tool()
    async def outsource() -> str:
        """Start a task whose work is elsewhere."""
        return (await tasks.store.create_task(auth=None, name="external", on_crash=OnCrash.EXTERNAL)).task_id

    return server.streamable_http_app()


if __name__ == "__main__":
    run(make_app)
