"""A server on FastMCP and plain clients of MCP 2025-11-25: what the official clients do not show."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult

from taskstore.adapters.fastmcp import TaskConfig, TasksExtension

RELATED_TASK = "io.modelcontextprotocol/related-task"


@pytest.fixture
def server(database_url: str) -> FastMCP:
    server = FastMCP("trips")
    server.add_extension(TasksExtension(database_url, drain=timedelta(0)))
    return server


async def accept(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"action": "accept", "content": {"name": "Ada"}}


async def test_returned_questions_reach_a_client_that_waits(server: FastMCP, serve: Any, connect_legacy: Any) -> None:
    """FastMCP itself refuses to return questions to these clients; a task asks them on its stream."""

    @server.tool(task=True)
    async def book(ctx: Context) -> str | InputRequiredResult:
        named = (ctx.input_responses or {}).get("name")
        if isinstance(named, ElicitResult):
            return f"booked for {(named.content or {})['name']}"
        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        question = ElicitRequest(params=ElicitRequestFormParams(message="Your name?", requested_schema=schema))
        return InputRequiredResult(input_requests={"name": question})

    async with (
        serve(server) as url,
        connect_legacy(url, capabilities={"elicitation": {}}, respond=accept) as peer,
    ):
        task_id = await peer.start("book")
        result = await peer.result(task_id)

    ((method, params),) = peer.asked
    assert result["content"][0]["text"] == "booked for Ada"
    assert (method, params["message"]) == ("elicitation/create", "Your name?")
    assert params["_meta"][RELATED_TASK] == result["_meta"][RELATED_TASK] == {"taskId": task_id}


async def test_a_call_without_a_task_and_its_list_are_fastmcps_own(
    server: FastMCP, serve: Any, connect_legacy: Any, refused: Any
) -> None:
    """Beside the tasks nothing changes; a tool that needs one says so."""

    @server.tool(task=TaskConfig(mode="required"))
    async def long() -> str:
        return "done"

    @server.tool(task=True)
    async def either() -> str:
        return "done"

    @server.tool
    async def quick() -> str:
        return "done"

    async with serve(server) as url, connect_legacy(url) as peer:
        tools = (await peer.request("tools/list"))["tools"]
        inline = await peer.call("either")
        with refused(-32601, "only as a task"):
            await peer.call("long")
        with refused(-32601, "does not run as a task"):
            await peer.call("quick", task={})

    support = {tool["name"]: tool.get("execution", {}).get("taskSupport") for tool in tools}
    assert support == {"long": "required", "either": "optional", "quick": None}
    assert inline["content"][0]["text"] == "done"


async def test_an_older_protocol_version_has_no_tasks(
    server: FastMCP, serve: Any, connect_legacy: Any, refused: Any
) -> None:
    """There were none yet: optional tools run inline, and the requests about tasks are unknown."""

    @server.tool(task=True)
    async def either() -> str:
        return "done"

    async with serve(server) as url, connect_legacy(url, version="2025-06-18") as peer:
        inline = await peer.call("either", task={})
        with refused(-32601):
            await peer.get("tsk_any")

    assert "tasks" not in peer.initialized["capabilities"]
    assert inline["content"][0]["text"] == "done"
