"""A FastMCP server whose reports take minutes; it runs on this store, or as it stands on fastmcp-tasks and Redis.

``python examples/fastmcp_server.py`` serves it on stdio, over the database of ``REPORTS_URL``. With a URL of Redis, or
``memory://``, it is served by fastmcp-tasks: one import, one URL; the tools stay as they are.
"""

import os

import anyio
from fastmcp import Context, FastMCP
from fastmcp.utilities.tasks import TaskConfig
from mcp_types import ElicitRequest, ElicitRequestFormParams, InputRequiredResult

url = os.environ.get("REPORTS_URL", "sqlite:///reports.db")
if url.startswith(("redis", "memory")):
    from fastmcp_tasks import TasksExtension
else:
    from taskstore.adapters.fastmcp import TasksExtension

mcp = FastMCP("reports")
mcp.add_extension(TasksExtension(url=url))


@mcp.tool(task=TaskConfig(mode="required"))
async def generate_report(topic: str, ctx: Context, pages: int = 10) -> str:
    """Write a report on a topic, page by page."""
    for page in range(1, pages + 1):
        await ctx.report_progress(page, pages, f"writing page {page}")
        await anyio.sleep(1)
    return f"A report on {topic}, {pages} pages long."


@mcp.tool(task=True)
async def delete_report(topic: str, ctx: Context) -> str | InputRequiredResult:
    """Delete a report, if the user is sure; while they think, no process waits for them."""
    answer = (ctx.input_responses or {}).get("sure")
    if answer is None:
        schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
        params = ElicitRequestFormParams(message=f"Delete the report on {topic}?", requested_schema=schema)
        return InputRequiredResult(input_requests={"sure": ElicitRequest(params=params)})
    return f"The report on {topic} is deleted." if answer.content == {"sure": True} else "Nothing is deleted."


if __name__ == "__main__":
    mcp.run(show_banner=False)
