"""An MCP server whose tool has its client's model think, in the middle of a task.

The tool *awaits* what it asks for, so it waits in its process; the request itself is in the database, and any server
process may take the answer. Try it, and be the model yourself:

    python examples/sampling.py
    python examples/client.py http://127.0.0.1:8000/mcp summarize '{"texts": ["Once upon a time", "The end"]}'
"""

import os

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    SamplingMessage,
    TextContent,
)

from taskstore.adapters.mcp_v2 import TasksExtension

tasks = TasksExtension(os.environ.get("SUMMARIES_DATABASE", "sqlite:///summaries.db"))
server = MCPServer("summaries", extensions=[tasks], middleware=[tasks.legacy], lifespan=tasks.lifespan)


@server.tool()
@tasks.task(mode="required")
async def summarize(texts: list[str], ctx: Context) -> list[str]:
    """Summarize texts, one after the other."""
    summaries = []
    for number, text in enumerate(texts):
        await ctx.report_progress(number, len(texts), "summarizing")
        summaries.append(await ask_the_model(ctx, f"Summarize in one sentence: {text}"))
    return summaries


async def ask_the_model(ctx: Context, prompt: str) -> str:
    """Ask the client's model."""
    message = SamplingMessage(role="user", content=TextContent(text=prompt))
    request = CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=200))
    answer = await ctx.session.send_request(request, CreateMessageResult)
    return answer.content.text if isinstance(answer.content, TextContent) else ""


if __name__ == "__main__":
    server.run("streamable-http", port=int(os.environ.get("PORT", "8000")))
