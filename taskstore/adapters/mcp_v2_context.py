"""The seam to the SDK's request context: what a tool gets while it runs as a task, and what it gave back.

``Context.report_progress()`` of a tool calls ``report_progress()`` of the session, which calls ``progress()`` of the
request's channel; after the response that channel drops everything. So a task's tool gets a session of its own, and
everything that the session sends goes to the channel below: progress to the task, requests to the client into its
input requests, which wait in the database for their answers. Notifications, log messages among them, exist only for
tasks of MCP 2025-11-25.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.context import CallNext, ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    INTERNAL_ERROR,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    REQUEST_TIMEOUT,
    CallToolRequestParams,
    ClientCapabilities,
    ElicitationCapability,
    FormElicitationCapability,
    Implementation,
    MissingRequiredClientCapabilityErrorData,
    RequestId,
    RootsCapability,
    SamplingCapability,
    SamplingToolsCapability,
    UrlElicitationCapability,
)
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import JsonValue, ValidationError

from taskstore.adapters.mcp_v2_legacy import LegacyClient, wire_of
from taskstore.errors import LeaseLostError, TaskFinishedError, TaskNotFoundError
from taskstore.handle import TaskHandle
from taskstore.runner import WorkError, WorkParked, WorkResult

logger = logging.getLogger("taskstore")

_FIRST_PAUSE = timedelta(milliseconds=50)
_LONGEST_PAUSE = timedelta(milliseconds=250)


def task_context(
    ctx: ServerRequestContext, handle: TaskHandle, creator: LegacyClient | None = None
) -> ServerRequestContext:
    """Make the context that a tool gets inside a task: the request's, with all that it sends going to the task.

    Args:
        creator: The client of MCP 2025-11-25 that hears of the task, notifications of the tool included.
    """
    client, capabilities = ctx.session.client_params, ctx.session.client_capabilities
    info = None if client is None else client.client_info
    session = task_session(handle, ctx.protocol_version, info, capabilities, ctx.request_id, creator)
    return replace(ctx, session=session, close_sse_stream=None, close_standalone_sse_stream=None)


def task_session(
    handle: TaskHandle,
    protocol_version: str,
    client_info: Implementation | JsonValue,
    capabilities: ClientCapabilities | JsonValue,
    request_id: RequestId | None,
    creator: LegacyClient | None,
) -> ServerSession:
    """Make the session of a tool inside a task, for the client that called it, or its JSON."""
    channel = _TaskChannel(handle, request_id, creator, protocol_version)
    connection = Connection.from_envelope(protocol_version, client_info, capabilities, outbound=channel)
    channel.capabilities = connection.client_capabilities
    return ServerSession(channel, connection)


async def run_tool(
    params: CallToolRequestParams, inside: ServerRequestContext, call_next: CallNext
) -> WorkResult | WorkParked:
    """Run a tool to the end, or to its questions.

    Args:
        params: What the tool is called with.
        inside: The tool's context inside the task.

    Raises:
        WorkError: The call would have been answered with a JSON-RPC error.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            wire = wire_of(await call_next(inside))
            if wire.get("resultType") != "input_required":
                return work_result(wire, params.name, inside.protocol_version)
            if requests := wire.get("inputRequests"):
                asked = input_requests(requests, inside.session.client_capabilities, inside.protocol_version)
                return WorkParked(asked, wire.get("requestState"))
        except MCPError as error:
            raise WorkError(error.code, error.message, error.data) from error
        # It asks nothing, so it wants to be called again after a while, as the SDK's client would do.
        params.input_responses, params.request_state = None, wire["requestState"]
        await asyncio.sleep(pause.total_seconds())
        pause = min(2 * pause, _LONGEST_PAUSE)


def work_result(wire: dict[str, Any], tool_name: str, protocol_version: str) -> WorkResult:
    """Give a tool's result the shape that the same call would have had on the wire.

    ``resultType`` is left out: it belongs to the envelope of a response, and an inlined result has none.

    Raises:
        WorkError: The call would have been answered with a JSON-RPC error.

    Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks, "Task Execution Errors": the result is what the
    request would have returned.
    """
    if wire.get("resultType", "complete") == "complete":  # any other type is an extension's, which knows its shape
        try:
            wire = serialize_server_result("tools/call", protocol_version, wire)
        except ValidationError as problem:
            logger.exception("Tool %s returned an invalid result.", tool_name)
            raise WorkError(INTERNAL_ERROR, "Handler returned an invalid result") from problem
        wire.pop("resultType", None)
    return WorkResult(wire, is_error=wire.get("isError") is True)


def input_requests(
    requests: Mapping[str, JsonValue], capabilities: ClientCapabilities | None, protocol_version: str
) -> Mapping[str, JsonValue]:
    """Give a tool's requests to the client the shape that input requests have on the wire.

    Raises:
        MCPError: The client did not declare what one of the requests needs (-32021, as for the call itself).
        NoBackChannelError: One of them is no request that a client could be asked.
    """
    for request in requests.values():
        required = _required_capabilities(request)
        if not _covers(capabilities, required):
            data = MissingRequiredClientCapabilityErrorData(required_capabilities=required)
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                "The tool needs to ask the client for what the client did not declare.",
                data.model_dump(by_alias=True, mode="json", exclude_none=True),
            )
    if protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return requests
    wire = {"resultType": "input_required", "inputRequests": dict(requests)}
    shaped: Mapping[str, JsonValue] = serialize_server_result("tools/call", protocol_version, wire)["inputRequests"]
    return shaped


def raise_refusal(answer: JsonValue) -> None:
    """Raise the JSON-RPC error with which a client of MCP 2025-11-25 answered a question (``wire.input_error``).

    Raises:
        MCPError: It is one.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):  # any client may send what looks like it
        code = error.get("code")
        raise MCPError(code if isinstance(code, int) else INTERNAL_ERROR, str(error.get("message")), error.get("data"))


def _required_capabilities(request: JsonValue) -> ClientCapabilities:
    """Tell what a client must have declared to be asked this."""
    method = request.get("method") if isinstance(request, dict) else None
    params = request.get("params") if isinstance(request, dict) else None
    asked = params if isinstance(params, dict) else {}
    match method:
        case "elicitation/create" if asked.get("mode") == "url":
            return ClientCapabilities(elicitation=ElicitationCapability(url=UrlElicitationCapability()))
        case "elicitation/create":
            return ClientCapabilities(elicitation=ElicitationCapability(form=FormElicitationCapability()))
        case "sampling/createMessage":
            tools = None if {"tools", "toolChoice"}.isdisjoint(asked) else SamplingToolsCapability()
            return ClientCapabilities(sampling=SamplingCapability(tools=tools))
        case "roots/list":
            return ClientCapabilities(roots=RootsCapability())
    raise NoBackChannelError(str(method))


def _covers(declared: ClientCapabilities | None, required: ClientCapabilities) -> bool:
    """Tell whether a client declared what is required; a bare ``elicitation: {}`` means forms."""
    if declared is None:
        return False
    if required.roots is not None:
        return declared.roots is not None
    if required.sampling is not None:
        tools = required.sampling.tools is None or (
            declared.sampling is not None and declared.sampling.tools is not None
        )
        return declared.sampling is not None and tools
    if declared.elicitation is None or required.elicitation is None:
        return False
    if required.elicitation.url is not None:
        return declared.elicitation.url is not None
    return declared.elicitation.form is not None or declared.elicitation.url is None


@dataclass
class _TaskChannel:
    """The SDK's ``DispatchContext`` of a task: progress and requests are stored, all else has no client to go to."""

    handle: TaskHandle
    request_id: RequestId | None
    creator: LegacyClient | None
    protocol_version: str
    # Of the connection, which holds this channel; the channel must not hold it in turn, or each call would leave a ring
    # of objects to the garbage collector.
    capabilities: ClientCapabilities | None = field(init=False, default=None)
    transport: TransportContext = field(default_factory=lambda: TransportContext(kind="task", can_send_request=True))
    message_metadata: MessageMetadata = None
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    can_send_request: bool = True

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        try:
            await self.handle.progress(progress, total=total, message=message)
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
            logger.debug("Progress dropped: the work is being cancelled. %s", refusal)
            return
        if self.creator is not None and not self.handle.cancel_requested:
            await self.creator.progress(progress, total, message)

    async def notify(
        self,
        method: str,
        params: Mapping[str, JsonValue] | None,
        opts: CallOptions | None = None,
    ) -> None:
        if method == "notifications/progress":  # FastMCP reports so, and tools that send it themselves
            said: Mapping[str, Any] = params or {}
            await self.progress(said["progress"], said.get("total"), said.get("message"))
        elif self.creator is not None:
            await self.creator.notify(method, params)
        else:
            logger.debug("Dropped %s: this task has no stream to a client.", method)

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, JsonValue] | None,
        opts: CallOptions | None = None,
    ) -> dict[str, Any]:
        """Ask through the task, and return the answer when it is there; nothing of it is validated here."""
        request: dict[str, JsonValue] = {"method": method}
        if params is not None:
            request["params"] = dict(params)
        name = method.partition("/")[0]
        asked = input_requests({name: request}, self.capabilities, self.protocol_version)
        try:
            async with asyncio.timeout((opts or {}).get("timeout")):
                answers: Mapping[str, Any] = await self.handle.ask(asked)
        except TimeoutError as problem:
            raise MCPError(REQUEST_TIMEOUT, f"Nobody answered {method} in time.") from problem
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
            # Of the errors that a tool may raise, the one that the SDK doesn't log: the work is being cancelled.
            raise MCPError(INTERNAL_ERROR, f"{method} was not answered: the task is over.") from refusal
        answer: dict[str, Any] = answers[name]
        raise_refusal(answer)
        return answer
