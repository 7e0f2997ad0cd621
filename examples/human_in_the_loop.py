"""An MCP server whose tool waits for a person, for days if need be, through restarts and crashes.

The tool *returns* its question, so nothing of it runs while nobody answers: the question is in the database, and the
answer has the tool called again, by whatever server process is there then. Try it:

    python examples/human_in_the_loop.py
    python examples/client.py http://127.0.0.1:8000/mcp deploy '{"version": "1.4"}'

Stop or kill the server while the client asks, start it again, and answer: the client tells how to go on.
"""

import os
from datetime import timedelta

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult

from taskstore.adapters.mcp_v2 import TasksExtension

tasks = TasksExtension(os.environ.get("DEPLOYMENTS_DATABASE", "sqlite:///deployments.db"))
server = MCPServer("deployments", extensions=[tasks], middleware=[tasks.legacy], lifespan=tasks.lifespan)


@server.tool()
@tasks.task(mode="required", ttl=timedelta(days=7), on_crash="retry")
async def deploy(version: str, ctx: Context) -> str | InputRequiredResult:
    """Deploy a version, once somebody has approved it."""
    approval = (ctx.input_responses or {}).get("approval")
    if approval is None:
        await ctx.report_progress(1, 2, "built and tested")
        return InputRequiredResult(
            input_requests={"approval": ask(f"Deploy version {version}?")},
            request_state=f"build of {version}",  # what the next run needs of this one
        )
    if isinstance(approval, ElicitResult) and (approval.content or {}).get("approved"):
        return f"Deployed the {ctx.request_state}."
    return f"Version {version} was not approved."


def ask(message: str) -> ElicitRequest:
    """Ask for a yes or no."""
    schema = {"type": "object", "properties": {"approved": {"type": "boolean"}}, "required": ["approved"]}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


if __name__ == "__main__":
    server.run("streamable-http", port=int(os.environ.get("PORT", "8000")))
