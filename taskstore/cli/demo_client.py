"""The client side of ``taskstore demo``: a user with a token, on the SDK's client, which learns to poll tasks."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import httpx2
import mcp_types
from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import ConfigDict, JsonValue

_PROTOCOL = "2026-07-28"


class _Answer(mcp_types.Result):
    """Any result, as it came over the wire."""

    model_config = ConfigDict(extra="allow")


class _CreatedTask(_Answer):
    """The answer to a call that became a task."""

    result_type: Literal["task"] = "task"


class _TasksExtension(ClientExtension):
    """Declares that this client knows tasks."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> list[ResultClaim[_CreatedTask]]:
        async def resolve(created: _CreatedTask, context: ClaimContext) -> mcp_types.CallToolResult:
            raise NotImplementedError("the demo polls for itself, to show the progress")

        return [ResultClaim(result_type="task", model=_CreatedTask, resolve=resolve)]


class _TasksGet(mcp_types.Request[dict[str, str], str]):
    """The request tasks/get; the SDK repeats the id in the Mcp-Name header."""

    name_param = "taskId"


class Poll:
    """What one tasks/get answered."""

    def __init__(self, wire: dict[str, JsonValue]) -> None:
        self._wire = wire

    @property
    def status(self) -> str:
        """The task's status."""
        return str(self._wire.get("status"))

    @property
    def message(self) -> str:
        """The status message; empty where there is none."""
        return str(self._wire.get("statusMessage", ""))

    @property
    def interval_seconds(self) -> float:
        """How long the server asks to wait before the next poll."""
        interval = self._wire.get("pollIntervalMs")
        return interval / 1000 if isinstance(interval, int | float) else 1.0

    @property
    def result(self) -> bytes:
        """The result as JSON; two are equal only when every byte of their content is."""
        return json.dumps(self._wire.get("result"), ensure_ascii=False).encode()

    @property
    def reason(self) -> str | None:
        """Why the task failed, by the error's data; None where it says nothing."""
        error = self._wire.get("error")
        data = error.get("data") if isinstance(error, dict) else None
        reason = data.get("reason") if isinstance(data, dict) else None
        return str(reason) if reason is not None else None


class User:
    """A user of the server, connected."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def start_report(self, topic: str, pages: int) -> str:
        """Ask for a report and return the id of the task that writes it; from here on the task may not get lost."""
        result = await self._client.session.call_tool(
            "generate_report", {"topic": topic, "pages": pages}, allow_claimed=True
        )
        if not isinstance(result, _CreatedTask):
            raise TypeError(f"the call became no task, but {result!r}")
        return str((result.model_extra or {})["taskId"])

    async def poll(self, task_id: str) -> Poll:
        """Poll a task once.

        Raises:
            MCPError: There is no such task for this user.
        """
        request = _TasksGet(method="tasks/get", params={"taskId": task_id})
        return Poll((await self._client.session.send_request(request, _Answer)).model_extra or {})

    async def refusal(self, task_id: str) -> str | None:
        """Poll a task that this user should not see; return the error's text, or None if the task was shown."""
        try:
            await self.poll(task_id)
        except MCPError as error:
            return error.error.message
        return None


@asynccontextmanager
async def connect(url: str, token: str) -> AsyncIterator[User]:
    """Connect to a server over streamable HTTP, with a bearer token."""
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False) as http,  # no proxy leads to this machine
        Client(streamable_http_client(url, http_client=http), mode=_PROTOCOL, extensions=[_TasksExtension()]) as client,
    ):
        yield User(client)
