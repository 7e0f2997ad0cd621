"""TasksExtension over streamable HTTP: connections that end, bearer tokens, routing headers."""

import asyncio
from datetime import timedelta
from typing import Any, ClassVar

import httpx2
import pytest
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import Request
from pydantic import BaseModel

from taskstore import AuthContext, TaskNotFoundError
from taskstore.adapters.mcp_v2 import TasksExtension


class Sure(BaseModel):
    """What a tool asks for."""

    sure: bool


class Fixture:
    """A server with a tool that waits, and the events of that tool."""

    def __init__(self, database_url: str, **server_options: Any) -> None:
        self.tasks = TasksExtension(database_url, drain=timedelta(0))
        self.server = MCPServer("reports", extensions=[self.tasks], lifespan=self.tasks.lifespan, **server_options)
        self.running, self.opened = asyncio.Event(), asyncio.Event()

        @self.server.tool()
        @self.tasks.task(mode="required")
        async def wait() -> str:
            self.running.set()
            await self.opened.wait()
            return "through"


async def test_the_work_survives_the_end_of_the_connection(database_url: str, connect: Any, serve: Any) -> None:
    """The client that asked is gone; any later connection finds the result."""
    fixture = Fixture(database_url)

    async with serve(fixture.server) as url:
        async with connect(url) as peer:
            task_id = await peer.start("wait")
            await fixture.running.wait()
        fixture.opened.set()
        await fixture.tasks.store.wait_for_task(task_id, auth=None)
        async with connect(url) as later:
            polled = await later.get(task_id)

    assert polled["status"] == "completed"
    assert polled["result"]["content"] == [{"type": "text", "text": "through"}]


@pytest.mark.parametrize("options", [{}, {"stateless_http": True}, {"json_response": True, "stateless_http": True}])
async def test_questions_and_notifications_need_no_session(
    database_url: str, connect: Any, serve: Any, can_be_asked: Any, options: dict[str, bool]
) -> None:
    """Behind a load balancer each request is on its own; the listening stream is one, whatever else is answered so."""
    fixture = Fixture(database_url)

    @fixture.server.tool()
    @fixture.tasks.task()
    async def elicit(ctx: Context) -> str:
        return (await ctx.elicit("Sure?", Sure)).action

    async with serve(fixture.server, **options) as url, connect(url, **can_be_asked) as peer:
        task_id = await peer.start("elicit")
        listening = asyncio.create_task(peer.listen(taskIds=[task_id]))
        while "inputRequests" not in (pushed := await asyncio.wait_for(peer.pushed.get(), 60)):
            pass
        await peer.update(task_id, {key: {"action": "decline"} for key in pushed["inputRequests"]})
        await asyncio.wait_for(listening, 60)
        completed = await peer.get(task_id)

    assert completed["result"]["structuredContent"] == {"result": "decline"}


async def test_the_wire_has_a_null_ttl_and_integers(database_url: str, serve: Any) -> None:
    """The SDK leaves out null fields of models, and this one is required."""
    fixture = Fixture(database_url)

    async with serve(fixture.server) as url:
        task = await fixture.tasks.store.create_task(auth=None, poll_interval=timedelta(seconds=2))
        async with httpx2.AsyncClient() as http:
            answer = await http.post(url, headers=_headers("tasks/get", task.task_id), json=_body(task.task_id))

    wire = answer.json()["result"]
    assert answer.status_code == 200
    assert type(wire["ttlMs"]) is int
    assert wire["pollIntervalMs"] == 2_000
    assert wire["createdAt"].endswith("Z")


async def test_without_authorization_the_id_is_the_key(
    database_url: str, connect: Any, serve: Any, local: AuthContext
) -> None:
    """Over HTTP nobody is the local user: every caller would be, from everywhere."""
    fixture = Fixture(database_url)

    async with serve(fixture.server) as url:
        async with connect(url) as peer, connect(url) as other:
            task_id = await peer.start("wait")
            assert (await other.get(task_id))["status"] == "working"
        with pytest.raises(TaskNotFoundError):
            await fixture.tasks.store.get_task(task_id, auth=local)


async def test_two_principals_of_one_client_are_isolated(
    database_url: str, connect: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """Alice and Bob use the same application; a stolen id must not open the other's task."""
    fixture = Fixture(database_url, **authorization)

    async with serve(fixture.server) as url, connect(url, token="alice") as alice, connect(url, token="bob") as bob:
        task_id = await alice.start("wait")
        for request in (bob.get(task_id), bob.cancel(task_id), bob.update(task_id, {})):
            with refused(-32602, "Failed to retrieve task: Task not found"):
                await request
        seen_by_alice = await alice.get(task_id)
        owner = AuthContext(client_id="app", issuer="https://issuer.example", subject="alice")
        task = await fixture.tasks.store.get_task(task_id, auth=owner)

    assert seen_by_alice["status"] == "working"
    assert task.task_id == task_id


async def test_inside_a_task_the_tool_still_sees_its_request(
    database_url: str, connect: Any, serve: Any, authorization: dict[str, Any]
) -> None:
    """Tools decide by token, headers and client capabilities; those must not change because the call is a task."""
    fixture = Fixture(database_url, **authorization)
    responded = asyncio.Event()

    @fixture.server.tool()
    @fixture.tasks.task(mode="required")
    async def who(ctx: Context) -> list[str]:
        await responded.wait()
        token, capabilities = get_access_token(), ctx.client_capabilities
        assert token is not None
        assert capabilities is not None
        return [str(token.subject), (ctx.headers or {})["mcp-name"], *(capabilities.extensions or {})]

    async with serve(fixture.server) as url, connect(url, token="alice") as alice:
        task_id = await alice.start("who")
        responded.set()
        owner = AuthContext(client_id="app", issuer="https://issuer.example", subject="alice")
        await fixture.tasks.store.wait_for_task(task_id, auth=owner)
        polled = await alice.get(task_id)

    assert polled["result"]["structuredContent"] == {"result": ["alice", "who", TasksExtension.identifier]}


async def test_a_server_with_authorization_takes_no_request_without_token(
    database_url: str, connect: Any, serve: Any, refused: Any, authorization: dict[str, Any]
) -> None:
    """Mounted behind something that forgets to check tokens, tasks must not turn into anybody's."""
    fixture = Fixture(database_url, **authorization)
    unguarded = fixture.server._lowlevel_server

    async with serve(unguarded) as url, connect(url) as peer:
        with refused(-32600, "access token"):
            await peer.call("wait")
        with refused(-32600, "access token"):
            await peer.get("tsk_1")
        assert not fixture.running.is_set()


class MisroutedRequest(Request[dict[str, Any], str]):
    """A request whose routing header names another task."""

    name_param: ClassVar[str | None] = "decoy"


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
async def test_the_routing_header_must_name_the_task(
    database_url: str, connect: Any, serve: Any, refused: Any, method: str
) -> None:
    """A proxy routes by the header; a body that says otherwise would act on another task than was checked."""
    fixture = Fixture(database_url)

    async with serve(fixture.server) as url, connect(url) as peer:
        task_id = await peer.start("wait")
        params = {"taskId": task_id, "inputResponses": {}}
        with refused(-32020):
            await peer.request(method, params, routed=False)
        with refused(-32020):
            misrouted = MisroutedRequest(method=method, params={**params, "decoy": "tsk_other"})
            await peer.client.session.send_request(misrouted, dict)

        assert (await peer.get(task_id))["status"] == "working"


def _headers(method: str, task_id: str) -> dict[str, str]:
    return {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": method,
        "Mcp-Name": task_id,
    }


def _body(task_id: str) -> dict[str, Any]:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
    }
    return {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"taskId": task_id, "_meta": meta}}
