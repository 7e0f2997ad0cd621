"""The seam to the SDK's middleware: what serves clients of MCP 2025-11-25 on a server of the SDK 2.x.

Under that version the SDK knows neither the capability nor a tool call that is answered with a task, and checks every
handler's result against its models; only what a middleware returns goes out as it is. The requests about tasks need
no such detour: they are bound like those of the extension.

Source: MCP 2025-11-25, "Tasks".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

from taskstore.adapters.requests import RequestError, legacy_ttl
from taskstore.adapters.wire import legacy_create_task_result
from taskstore.store import DEFAULT, Default
from taskstore.task import Task

LEGACY_VERSION = "2025-11-25"  # older ones have no tasks

TaskMode = Literal["optional", "required"]


@dataclass
class Augmentation:
    """What a client asks for with the ``task`` field of its call, and the task that it got."""

    ttl: timedelta | Default | None
    task: Task | None = None


@dataclass(kw_only=True)
class AugmentedContext(ServerRequestContext):
    """The context of a tool call that asks for a task; whoever makes the task puts it into ``augmentation``.

    Being a field of the context, it passes through other middlewares, which may replace the rest.
    """

    augmentation: Augmentation


class LegacyMiddleware:
    """Declares tasks to clients of 2025-11-25, and answers their augmented tool calls; all else passes through.

    Args:
        mode_of: Says how the tool of a name runs as a task; None is never.
        tells_apart: Whether the requestor of a request has an auth context, and so a list of its own.
    """

    def __init__(
        self,
        mode_of: Callable[[str], TaskMode | None],
        tells_apart: Callable[[ServerRequestContext], bool],
    ) -> None:
        self._mode_of = mode_of
        self._tells_apart = tells_apart

    async def __call__(self, ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
        """Handle one message, as the SDK asks of a middleware."""
        if ctx.method == "initialize":
            return self._declare(ctx, await call_next(ctx))
        if ctx.protocol_version == LEGACY_VERSION:
            if ctx.method == "tools/list":
                return self._with_task_support(await call_next(ctx))
            if ctx.method == "tools/call":
                return await self._call_tool(ctx, call_next)
        return await call_next(ctx)

    def _declare(self, ctx: ServerRequestContext, result: HandlerResult) -> HandlerResult:
        wire = _wire(result)
        if wire.get("protocolVersion") != LEGACY_VERSION:
            return result
        tasks: dict[str, Any] = {"cancel": {}, "requests": {"tools": {"call": {}}}}
        if self._tells_apart(ctx):
            tasks["list"] = {}
        return {**wire, "capabilities": {**wire["capabilities"], "tasks": tasks}}

    def _with_task_support(self, result: HandlerResult) -> HandlerResult:
        wire = _wire(result)
        return {**wire, "tools": [self._tool(tool) for tool in wire["tools"]]}

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        mode = self._mode_of(tool["name"])
        return tool if mode is None else {**tool, "execution": {"taskSupport": mode}}

    async def _call_tool(self, ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
        """Answer a call with a task if it asks for one; refuse it when that is not how the tool runs."""
        params = dict(ctx.params or {})
        name, asked = params.get("name"), params.pop("task", None)
        if not isinstance(name, str):
            return await call_next(ctx)
        mode = self._mode_of(name)
        if asked is None:
            if mode == "required":
                raise MCPError(METHOD_NOT_FOUND, f"Tool {name} runs only as a task; send the field task with the call.")
            return await call_next(ctx)
        if mode is None:
            raise MCPError(METHOD_NOT_FOUND, f"Tool {name} does not run as a task; send the call without it.")
        if not isinstance(asked, Mapping):
            raise MCPError(INVALID_PARAMS, "Invalid params: task must be an object.")
        try:
            augmentation = Augmentation(legacy_ttl(asked, DEFAULT))
        except RequestError as refusal:
            raise MCPError(refusal.code, refusal.message, refusal.data) from refusal
        # Without the field: the SDK's models allow fewer numbers in it than JSON does.
        result = await call_next(_augmented(replace(ctx, params=params), augmentation))
        return result if augmentation.task is None else dict(legacy_create_task_result(augmentation.task))


def _augmented(ctx: ServerRequestContext, augmentation: Augmentation) -> AugmentedContext:
    own = {field.name: getattr(ctx, field.name) for field in fields(ServerRequestContext)}
    return AugmentedContext(**own, augmentation=augmentation)


def _wire(result: HandlerResult) -> dict[str, Any]:
    """Return a result's JSON; another middleware may have made a model of it."""
    if result is None or isinstance(result, dict):
        return result or {}
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)
