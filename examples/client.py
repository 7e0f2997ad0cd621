"""A client on the terminal: calls a tool that answers with a task, shows its progress, and asks you its questions.

    python examples/client.py URL TOOL '{"argument": 1}'
    python examples/client.py URL --resume TASK_ID

It prints the task's id first. Whatever happens then to client or server, the second command goes on.
"""

import argparse
import json

import anyio
import httpx2
from mcp import Client
from mcp.client.context import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CallToolResult,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    TextContent,
)

from taskstore.adapters.mcp_v2 import PolledTask, RemoteTask, TasksClient


async def elicit(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Have the form filled in on the terminal; an empty line declines."""
    if not isinstance(params, ElicitRequestFormParams):
        return ElicitResult(action="decline")
    content: dict[str, str | int | float | bool | list[str] | None] = {}
    for name, field in params.requested_schema.get("properties", {}).items():
        line = await anyio.to_thread.run_sync(input, f"{params.message} ({name}) ")
        if not line:
            return ElicitResult(action="decline")
        content[name] = line.lower() in ("y", "yes", "true") if field.get("type") == "boolean" else line
    return ElicitResult(action="accept", content=content)


async def sample(context: ClientRequestContext, params: CreateMessageRequestParams) -> CreateMessageResult:
    """Have the model's part played on the terminal."""
    prompt = params.messages[-1].content_as_list[0]
    line = await anyio.to_thread.run_sync(input, f"{prompt.text if isinstance(prompt, TextContent) else prompt} ")
    return CreateMessageResult(role="assistant", content=TextContent(text=line), model="you")


async def show(task: PolledTask) -> None:
    """Show how far a task is."""
    print(f"{task.status}: {task.status_message or ''}", flush=True)


async def main(arguments: argparse.Namespace) -> None:
    """Start a task, or take one up, and wait for its result."""
    tasks = TasksClient(on_poll=show)
    headers = {} if arguments.token is None else {"Authorization": f"Bearer {arguments.token}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(
            streamable_http_client(arguments.url, http_client=http),
            mode="2026-07-28",
            extensions=[tasks],
            elicitation_callback=elicit,
            sampling_callback=sample,
        ) as client,
    ):
        task: RemoteTask | CallToolResult
        if arguments.resume:
            task = tasks.resume(client, arguments.resume)
        else:
            task = await tasks.start(client, arguments.tool, json.loads(arguments.arguments))
        if isinstance(task, RemoteTask):
            print(f"task: {task.task_id}", flush=True)
            task = await task.result()
        for content in task.content:
            print(content.text if isinstance(content, TextContent) else content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("tool", nargs="?")
    parser.add_argument("arguments", nargs="?", default="{}")
    parser.add_argument("--resume", metavar="TASK_ID")
    parser.add_argument("--token")
    anyio.run(main, parser.parse_args())
