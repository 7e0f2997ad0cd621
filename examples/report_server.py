"""An MCP server whose reports take minutes: copy it, and put your work in place of the sleep.

Run it on stdio with ``python examples/report_server.py``, or over HTTP with ``--http``. A client that declares the
extension io.modelcontextprotocol/tasks, or one of MCP 2025-11-25 that asks for a task, gets a task at once, polls it
with tasks/get, and finds the report there even if it, or this server, was restarted in between.
"""

import os
import sys
from datetime import timedelta

import anyio
from mcp.server.mcpserver import Context, MCPServer

from taskstore.adapters.mcp_v2 import TasksExtension

tasks = TasksExtension(os.environ.get("REPORTS_DATABASE", "sqlite:///reports.db"))
server = MCPServer("reports", extensions=[tasks], middleware=[tasks.legacy], lifespan=tasks.lifespan)


@server.tool()
@tasks.task(mode="required", ttl=timedelta(minutes=15))
async def generate_report(topic: str, ctx: Context, pages: int = 10) -> str:
    """Write a report on a topic, page by page."""
    for page in range(1, pages + 1):
        await ctx.report_progress(page, pages, f"writing page {page}")
        await anyio.sleep(1)
    return f"A report on {topic}, {pages} pages long."


if __name__ == "__main__":
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(os.environ.get("PORT", "8000")))
    else:
        server.run()
