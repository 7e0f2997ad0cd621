"""The seam to FastMCP: how its tools are found and called for a task, and what they get there.

All that is private in FastMCP is touched here. A tool inside a task gets FastMCP's own ``Context``, dependencies and
server; only the request context beneath is of our making, so that what the tool says and asks goes to the task.
"""

import asyncio
import logging
import re
from collections.abc import Collection
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

from fastmcp import FastMCP
from fastmcp.exceptions import FastMCPError, NotFoundError
from fastmcp.server import dependencies
from fastmcp.server.context import Context
from fastmcp.server.dependencies import bind_request_context, extract_version_spec, get_http_headers
from fastmcp.server.providers.fastmcp_provider import FastMCPProviderTool
from fastmcp.tools.base import InputRequiredToolResult, Tool, ToolResult
from fastmcp.utilities.exceptions import get_http_status_code, is_timeout_error
from fastmcp.utilities.versions import VersionSpec
from mcp.server.context import ServerMiddleware, ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, CallToolRequestParams, CallToolResult, InputRequiredResult, TextContent
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import JsonValue
from uncalled_for import Provider

from taskstore.adapters.mcp_v2_legacy import LEGACY_VERSION
from taskstore.adapters.mcp_v2_rerun import request_of
from taskstore.handle import TaskHandle
from taskstore.runner import WorkError

logger = logging.getLogger("taskstore")


_SESSION_ID = "_fastmcp_state_prefix"  # where Context.session_id looks on a session


@dataclass(frozen=True, slots=True)
class _Running:
    handle: TaskHandle
    session: ServerSession


_running: ContextVar[_Running | None] = ContextVar("taskstore_running", default=None)


class RunningTask:
    """The task that a tool runs as, for synchronous tools: they have no other way to report, or to hear of a cancel.

    ::

        @mcp.tool(task=TaskConfig())
        def render(pages: int, task: RunningTask = CurrentTask()) -> str:
            for page in range(pages):
                if task.cancel_requested:
                    return "nobody reads this"
                task.report_progress(page, pages)

    When the tool runs inline there is no task: no cancel is requested, and what is reported goes nowhere.
    """

    def __init__(self, running: _Running | None, loop: asyncio.AbstractEventLoop) -> None:
        self._running, self._loop = running, loop

    @property
    def task_id(self) -> str | None:
        """The task's id; None when the tool runs inline."""
        return None if self._running is None else self._running.handle.task_id

    @property
    def cancel_requested(self) -> bool:
        """Whether the tool should stop; what it returns after that is not stored."""
        return self._running is not None and self._running.handle.cancel_requested

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report how far the work is, from any thread; returns at once."""
        if self._running is not None:
            report = self._running.session.report_progress(progress, total, message)
            asyncio.run_coroutine_threadsafe(report, self._loop).add_done_callback(_log_refusal)


class _CurrentTask(Provider[RunningTask]):
    async def __aenter__(self) -> RunningTask:
        return RunningTask(_running.get(), asyncio.get_running_loop())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


def CurrentTask() -> RunningTask:  # noqa: N802 (as FastMCP names its dependencies)
    """Give a tool its task; the default of a parameter, as in ``RunningTask``."""
    return cast(RunningTask, _CurrentTask())


class _StoredProgress(dependencies.InMemoryProgress):
    """What FastMCP's dependency ``Progress`` tells goes to the task, if there is one."""

    async def set_total(self, total: int) -> None:
        await super().set_total(total)
        await self._report()

    async def increment(self, amount: int = 1) -> None:
        await super().increment(amount)
        await self._report()

    async def set_message(self, message: str | None) -> None:
        await super().set_message(message)
        await self._report()

    async def _report(self) -> None:
        if (running := _running.get()) is not None:
            await running.session.report_progress(self.current or 0, self.total, self.message)


def store_progress() -> None:
    """Let the dependency ``Progress`` report to tasks; outside of them it is what it was.

    FastMCP has no hook for that: only where the tool runs in docket does it know another place than memory.
    """
    dependencies.InMemoryProgress = _StoredProgress  # type: ignore[misc]


def add_middleware(server: FastMCP[Any], middleware: ServerMiddleware[Any]) -> None:
    """Put a middleware of the SDK before all others, FastMCP's among them, if it is not there yet."""
    if middleware not in server._mcp_server.middleware:
        server._mcp_server.middleware.insert(0, middleware)


def name_of(server: FastMCP[Any]) -> str:
    """Name a server as its replicas and its next start are named; FastMCP's own made-up names are not."""
    made_up = re.fullmatch(rf"{type(server).__name__}-[0-9a-f]{{4}}", server.name)
    return "fastmcp" if made_up else server.name


def sdk_context(context: Context) -> ServerRequestContext | None:
    """Return the SDK's context of the request at hand; None for a call that no client requested."""
    request = context.request_context
    return None if request is None else request._srctx


def is_client_call() -> bool:
    """Tell whether the call at hand is the client's own, and not one that a tool or a middleware makes in turn."""
    return dependencies._is_client_tool_call()


def is_in_task() -> bool:
    """Tell whether this runs inside a task."""
    return _running.get() is not None


async def find_tool(server: FastMCP[Any], params: CallToolRequestParams) -> Tool | None:
    """Find the tool of a call, in the version that it asks for; None if the caller has no such tool."""
    version = extract_version_spec(cast(dict[str, Any] | None, params.meta))
    try:
        return await server.get_tool(params.name, VersionSpec(eq=version) if version else None)
    except NotFoundError:
        return None


async def task_tools(server: FastMCP[Any]) -> list[Tool]:
    """List the tools that run as tasks, mounted ones too, once the server is up; for whatever caller."""
    await server._started.wait()  # the lifespans of mounted servers begin after that of the extension
    return [each for each in await server.get_tasks() if isinstance(each, Tool)]


def kept_headers(names: Collection[str]) -> dict[str, JsonValue]:
    """Return those headers of the request at hand that a tool needs in later runs."""
    headers = get_http_headers(include_all=True)
    return {name.lower(): headers[name.lower()] for name in names if name.lower() in headers}


def show_headers(headers: JsonValue) -> None:
    """Let ``get_http_headers()`` find the kept headers, where there is no request."""
    kept = headers if isinstance(headers, dict) else {}
    dependencies._background_task_headers.set({name: str(value) for name, value in kept.items()})


async def call_in_task(
    server: FastMCP[Any],
    params: CallToolRequestParams,
    inside: ServerRequestContext,
    handle: TaskHandle,
    *,
    tool: Tool | None = None,
    session_id: str | None = None,
) -> CallToolResult | InputRequiredResult:
    """Call a tool inside a task, below the middleware of the server; that of a mounted server is asked.

    Args:
        inside: The request context of the task.
        tool: Found already by the request that made the task; else it is found now, for the caller that was kept.
        session_id: Of that request, under which FastMCP keeps the state that its middleware wrote.

    Raises:
        MCPError: The tool ended in a JSON-RPC error.
        WorkError: The server has no such tool for this caller.
    """
    raw = {**request_of(params), "_meta": (inside.params or {}).get("_meta") or {}}
    # The token makes Context.report_progress() speak; where it leads is the business of the task's channel.
    meta: Any = {"progress_token": handle.task_id, **(inside.meta or {})}
    if session_id is not None:
        setattr(inside.session, _SESSION_ID, session_id)
    with bind_request_context(replace(inside, params=raw, meta=meta)) as request:
        async with Context(server):
            tool = tool or await find_tool(server, params)
            if tool is None:
                problem = f"Tool {params.name} is gone, or its caller may see it only with a token that was not kept."
                raise WorkError(INTERNAL_ERROR, problem)
            _running.set(_Running(handle, inside.session))
            # Context.elicit() takes the version for whether the client can be asked; inside a task it always can.
            # Not before the tool is found: session visibility depends on the true one.
            request.protocol_version = LEGACY_VERSION
            result = await _outcome(server, tool, dict(params.arguments or {}))
    return _call_result(result, inside.protocol_version)


async def _outcome(server: FastMCP[Any], tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Run a tool; what it raises becomes the result that FastMCP makes of it, but for JSON-RPC errors."""
    try:
        return await tool._run(arguments)
    except MCPError:
        raise
    except FastMCPError as error:
        # A mounted server has made a tool error of what its tool raised.
        if isinstance(tool, FastMCPProviderTool) and isinstance(error.__cause__, MCPError):
            raise error.__cause__ from error
        text = str(error)
    except Exception as error:  # a tool is foreign code
        logger.exception("Tool %s raised an unexpected exception.", tool.name)
        text = _masked(server, tool, error)
    return ToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def _masked(server: FastMCP[Any], tool: Tool, error: Exception) -> str:
    """Say what FastMCP says of an exception."""
    if get_http_status_code(error) == 429:
        return "Rate limited by upstream API, please retry later"
    if is_timeout_error(error):
        return "Upstream request timed out, please retry"
    said = f"Error calling tool {tool.name!r}"
    return said if server._mask_error_details else f"{said}: {error}"


def _call_result(result: ToolResult, protocol_version: str) -> CallToolResult | InputRequiredResult:
    """Give a tool's result the shape that the SDK has for it."""
    if isinstance(result, InputRequiredToolResult):
        return result.input_required
    structured: Any = result.structured_content
    # Before 2026-07-28 structured content is an object; FastMCP sends it anything else under a name, and marks that.
    if protocol_version not in MODERN_PROTOCOL_VERSIONS and not isinstance(structured, dict | None):
        meta = {**(result.meta or {}), "fastmcp": {"wrap_result": True}}
        wrapped = {"result": structured}
        result = ToolResult(content=result.content, structured_content=wrapped, meta=meta, is_error=result.is_error)
    wire = result.to_mcp_result()
    if isinstance(wire, CallToolResult):
        return wire
    content, structured = wire if isinstance(wire, tuple) else (wire, None)
    return CallToolResult(content=content, structured_content=structured)


def _log_refusal(report: Future[None]) -> None:
    if not report.cancelled() and (problem := report.exception()) is not None:
        logger.warning("What a tool reported of its progress is not stored. %s", problem)
