"""The server that the MCP conformance suite tests: ``python tests/conformance/server.py --port 8000 --url sqlite:///t.db``.

Its tools are those that the suite's tasks scenarios call, by name and behaviour. Prints its port when it listens;
with ``--port 0`` the system chooses one.
"""

import argparse
import socket
from collections.abc import Callable

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    InputResponses,
)
from starlette.applications import Starlette

from taskstore.adapters.mcp_v2 import TasksExtension


def make_server(url: str) -> MCPServer:
    """Make the server over a store; the suite sends no token, so there is no authorization."""
    tasks = TasksExtension(url)
    server = MCPServer("conformance", extensions=[tasks], lifespan=tasks.lifespan)

    @server.tool()
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool()
    @tasks.task()
    async def slow_compute(seconds: float = 1, label: str = "") -> str:
        await anyio.sleep(seconds)
        return f"done {label}"

    @server.tool()
    @tasks.task(mode="required")
    async def failing_job() -> str:
        await anyio.sleep(1)
        raise RuntimeError("this text stays on the server")

    @server.tool()
    @tasks.task()
    async def protocol_error_job() -> str:
        raise MCPError(INTERNAL_ERROR, "The job failed at protocol level.")

    @server.tool()
    @tasks.task()
    async def confirm_delete(filename: str, ctx: Context) -> str | InputRequiredResult:
        confirmed = answers(ctx.input_responses).get("confirm")
        if confirmed is None:
            return ask({"confirm": (f"Delete {filename}?", "confirm", "boolean")})
        return f"deleted {filename}" if (confirmed.content or {}).get("confirm") else f"kept {filename}"

    @server.tool()
    @tasks.task()
    async def multi_input(ctx: Context) -> str | InputRequiredResult:
        given = answers(ctx.input_responses)
        if not given:
            return ask({"first": ("Your first name?", "name", "string"), "last": ("Your last name?", "name", "string")})
        return " ".join(str((given[key].content or {}).get("name")) for key in ("first", "last"))

    @server.tool()
    @tasks.task(mode="required", input_first=True)
    async def test_tool_with_task(ctx: Context) -> str | InputRequiredResult:
        named = answers(ctx.input_responses).get("user_name")
        if named is None:
            return ask({"user_name": ("Your name?", "name", "string")})
        return f"Task completed for {(named.content or {}).get('name')}"

    return server


def ask(questions: dict[str, tuple[str, str, str]]) -> InputRequiredResult:
    """Ask questions: per key a message, and name and type of the one field to fill in."""
    requests = {}
    for key, (message, name, kind) in questions.items():
        schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
        requests[key] = ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))
    return InputRequiredResult(input_requests=requests)


def answers(responses: InputResponses | None) -> dict[str, ElicitResult]:
    """Return the answers to the questions of the call before."""
    return {key: each for key, each in (responses or {}).items() if isinstance(each, ElicitResult)}


class _AnnouncedServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


def make_app(url: str) -> Starlette:
    """Make the ASGI application."""
    return make_server(url).streamable_http_app()


def run(make_app: Callable[[str], Starlette]) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    app = make_app(arguments.url)
    _AnnouncedServer(uvicorn.Config(app, host="127.0.0.1", port=arguments.port, log_level="warning")).run()


if __name__ == "__main__":
    run(make_app)
