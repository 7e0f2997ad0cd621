"""The seam to the SDK's request context: what a tool gets while it runs as a task, and what it gave back.

``Context.report_progress()`` of a tool calls ``report_progress()`` of the session, which calls ``progress()`` of the
request's channel; after the response that channel drops everything. So a task's tool gets a session of its own over
the channel below, and a connection without a way to the client: under the protocol version of the extension, log
messages and requests to the client do not exist for tasks.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio
from mcp.server.connection import Connection
from mcp.server.context import HandlerResult, ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, ErrorData, RequestId
from mcp_types.methods import serialize_server_result
from pydantic import BaseModel, ValidationError

from taskstore.errors import LeaseLostError, TaskFinishedError, TaskNotFoundError
from taskstore.handle import TaskHandle
from taskstore.runner import WorkError, WorkResult

logger = logging.getLogger("taskstore")


def task_context(ctx: ServerRequestContext, handle: TaskHandle) -> ServerRequestContext:
    """Make the context that a tool gets inside a task: the request's, with progress going to the task."""
    client = ctx.session.client_params
    connection = Connection.from_envelope(
        ctx.protocol_version, None if client is None else client.client_info, ctx.session.client_capabilities
    )
    session = ServerSession(_TaskChannel(handle, ctx.request_id), connection)
    return replace(ctx, session=session, close_sse_stream=None, close_standalone_sse_stream=None)


def work_result(result: HandlerResult, tool_name: str, protocol_version: str) -> WorkResult:
    """Give a tool's result the shape that the same call would have had on the wire.

    ``resultType`` is left out: it belongs to the envelope of a response, and an inlined result has none.

    Raises:
        WorkError: The call would have been answered with a JSON-RPC error, or it asks for input.

    Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks, "Task Execution Errors": the result is what the
    request would have returned.
    """
    if isinstance(result, ErrorData):
        raise WorkError(result.code, result.message, result.data)
    if isinstance(result, BaseModel):
        wire = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    else:
        wire = dict(result or {})
    result_type = wire.get("resultType", "complete")
    if result_type == "input_required":
        raise WorkError(
            INTERNAL_ERROR, f"Tool {tool_name} asked for input while it ran as a task, which is not supported."
        )
    if result_type == "complete":  # any other type is an extension's, which alone knows its shape
        try:
            wire = serialize_server_result("tools/call", protocol_version, wire)
        except ValidationError as problem:
            logger.exception("Tool %s returned an invalid result.", tool_name)
            raise WorkError(INTERNAL_ERROR, "Handler returned an invalid result") from problem
        wire.pop("resultType", None)
    return WorkResult(wire, is_error=wire.get("isError") is True)


@dataclass
class _TaskChannel:
    """The SDK's ``DispatchContext`` of a task: progress is stored, all else has no client to go to."""

    handle: TaskHandle
    request_id: RequestId | None
    transport: TransportContext = field(default_factory=lambda: TransportContext(kind="task", can_send_request=False))
    message_metadata: MessageMetadata = None
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    can_send_request: bool = False

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        try:
            await self.handle.progress(progress, total=total, message=message)
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
            logger.debug("Progress dropped: the work is being cancelled. %s", refusal)

    async def notify(
        self,
        method: str,
        params: Mapping[str, object] | None,
        opts: CallOptions | None = None,
    ) -> None:
        logger.debug("Dropped %s: a task has no stream to the client.", method)

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, object] | None,
        opts: CallOptions | None = None,
    ) -> dict[str, object]:
        raise NoBackChannelError(method)
