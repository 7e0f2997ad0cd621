"""The seam to the SDK's middleware: what serves clients of MCP 2025-11-25 on a server of the SDK 2.x.

Under that version the SDK knows neither the capability nor a tool call that is answered with a task, and checks every
handler's result against its models; only what a middleware returns goes out as it is. The requests about tasks need
no such detour: they are bound like those of the extension.

Source: MCP 2025-11-25, "Tasks".
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND, ErrorData, Notification, Request, Result
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from taskstore.adapters.mcp_v2_policy import TaskMode
from taskstore.adapters.requests import Ask, RequestError, legacy_ttl, lesson_augmentation
from taskstore.adapters.wire import (
    WireObject,
    legacy_create_task_result,
    legacy_related,
    legacy_task,
    lesson_create_task_result,
    lesson_updated,
)
from taskstore.binding import AuthContext, shorten
from taskstore.errors import TaskStoreError
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Task, TaskStatus

logger = logging.getLogger("taskstore")

LEGACY_VERSION = "2025-11-25"  # older ones have no tasks

SEND_PATIENCE = timedelta(seconds=5)

_FOLLOWED = "taskstore.followed"


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


class _AnyRequest(Request[dict[str, Any], str]):
    """A request as it was stored: the models of the SDK would leave out what they don't know."""


class _AnyNotification(Notification[dict[str, Any], str]):
    """A notification as it is."""


class _AnyResult(Result):
    model_config = ConfigDict(extra="allow")


class LegacyClient:
    """The client that created a task: hears of the task for as long as its session lasts, and after that nothing.

    The call was answered long ago, so everything goes to the session's own stream: the GET stream of streamable HTTP,
    or the one pipe of stdio. A client that reads nothing for a while is sent nothing more: it must not hold up a tool.

    Args:
        lesson: Whether notifications/tasks/updated goes out too.
    """

    def __init__(self, ctx: ServerRequestContext, task_id: str, *, lesson: bool = False) -> None:
        self._session, self._task_id, self._lesson = ctx.session, task_id, lesson
        self._progress_token = progress_token_from_params(ctx.params)
        self._progress = -math.inf
        self._hears = True

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification with the mark of the task."""
        await self._send(method, legacy_related(params, self._task_id))

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Send progress under the token of the call, if it had one; only what is more than the last time.

        Source: MCP 2025-11-25, "Progress": the value must increase, and a task keeps its token until it is finished.
        """
        if self._progress_token is None or progress <= self._progress:
            return
        self._progress = progress
        params: WireObject = {"progressToken": self._progress_token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        await self.notify("notifications/progress", params)

    async def follow(self, store: TaskStore, auth: AuthContext | None) -> None:
        """Send each new status of the task until it is finished."""
        status, version = TaskStatus.WORKING, 1  # what the client has been told with the task
        updated: WireObject = {"taskId": self._task_id, "state": status.value}
        try:
            while not status.is_finished:
                task = await store.wait_for_task(self._task_id, auth=auth, since_version=version)
                version = task.version
                if task.status is not status:
                    status = task.status
                    # Without the mark of the task: the task is all that is in there.
                    await self._send("notifications/tasks/status", legacy_task(task))
                if self._lesson and lesson_updated(task) != updated:
                    updated = lesson_updated(task)
                    await self._send("notifications/tasks/updated", updated)
        except TaskStoreError as problem:
            logger.info("Task %s is followed no longer: %s", shorten(self._task_id), problem)

    async def _send(self, method: str, params: Mapping[str, JsonValue]) -> None:
        if not self._hears:
            return
        notification: Any = _AnyNotification(method=method, params=dict(params))
        try:
            async with asyncio.timeout(SEND_PATIENCE.total_seconds()):
                await self._session.send_notification(notification)
        except TimeoutError:
            self._hears = False
            logger.warning("The client of task %s takes no notifications; it gets no more.", shorten(self._task_id))


def ask_on_stream(ctx: ServerRequestContext) -> Ask:
    """Make what puts questions to the client on the stream of its request."""
    stream = ServerMessageMetadata(related_request_id=ctx.request_id)

    async def ask(method: str, params: WireObject) -> JsonValue:
        request: Any = _AnyRequest(method=method, params=params)
        try:
            answer = await ctx.session.send_request(request, _AnyResult, metadata=stream)
        except NoBackChannelError as problem:
            raise ConnectionError(problem.message) from problem
        except MCPError as error:
            if (error.code, error.message) == (CONNECTION_CLOSED, "Connection closed"):  # the SDK's own words
                raise ConnectionError(error.message) from error
            raise RequestError(error.code, error.message, error.data) from error
        except ValidationError as problem:
            raise RequestError(INVALID_PARAMS, f"The client's response to {method} is malformed.") from problem
        wire: JsonValue = answer.model_dump(by_alias=True, mode="json", exclude_unset=True)
        return wire

    return ask


def wire_of(result: HandlerResult) -> dict[str, Any]:
    """Return the JSON of what a handler, or another middleware, returned.

    Raises:
        MCPError: It returned one as a value.
    """
    if isinstance(result, ErrorData):
        raise MCPError.from_error_data(result)
    if isinstance(result, BaseModel):
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dict(result or {})


class LegacyMiddleware:
    """Declares tasks to clients of 2025-11-25, and answers their augmented tool calls; all else passes through.

    Args:
        mode_of: Says how the tool of a name runs as a task; None is never.
        tells_apart: Whether the requestor of a request has an auth context, and so a list of its own.
        lesson: Whether clients may speak as the lesson does; see ``TasksExtension``.
    """

    def __init__(
        self,
        mode_of: Callable[[str], Awaitable[TaskMode | None]],
        tells_apart: Callable[[ServerRequestContext], bool],
        *,
        lesson: bool = False,
    ) -> None:
        self._mode_of = mode_of
        self._tells_apart = tells_apart
        self._lesson = lesson
        self._creators: dict[str, LegacyClient] = {}
        self._following: set[asyncio.Task[None]] = set()

    async def __call__(self, ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
        """Handle one message, as the SDK asks of a middleware."""
        if ctx.method == "initialize":
            return self._declare(ctx, await call_next(ctx))
        if ctx.protocol_version == LEGACY_VERSION:
            if ctx.method == "tools/list":
                return await self.with_task_support(await call_next(ctx))
            if ctx.method == "tools/call":
                return await self._call_tool(ctx, call_next)
        return await call_next(ctx)

    def follow(self, ctx: ServerRequestContext, store: TaskStore, auth: AuthContext | None, task_id: str) -> None:
        """Let the client of a request hear of a task from now on, until the task is finished or the session ends."""
        creator = self._creators[task_id] = LegacyClient(ctx, task_id, lesson=self._lesson)
        following = asyncio.create_task(creator.follow(store, auth))
        for kept in (self._following, _followed_by(ctx)):
            kept.add(following)
            following.add_done_callback(kept.discard)
        following.add_done_callback(lambda _: self._creators.pop(task_id))

    def creator_of(self, task_id: str) -> LegacyClient | None:
        """Return the client that hears of a live task, if there is one in this process."""
        return self._creators.get(task_id)

    def close(self) -> None:
        """Follow no task any longer."""
        _cancel(self._following)

    def _declare(self, ctx: ServerRequestContext, result: HandlerResult) -> HandlerResult:
        wire = wire_of(result)
        if wire["protocolVersion"] != LEGACY_VERSION:
            return result
        tasks: dict[str, Any] = {"cancel": {}, "requests": {"tools": {"call": {}}}}
        if self._tells_apart(ctx):
            tasks["list"] = {}
        return {**wire, "capabilities": {**wire["capabilities"], "tasks": tasks}}

    async def with_task_support(self, result: HandlerResult) -> HandlerResult:
        """Say in a list of tools how each runs as a task."""
        wire = wire_of(result)
        return {**wire, "tools": [await self._tool(tool) for tool in wire["tools"]]}

    async def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        mode = await self._mode_of(tool["name"])
        return tool if mode is None else {**tool, "execution": {"taskSupport": mode}}

    async def _call_tool(self, ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
        """Answer a call with a task if it asks for one; refuse it when that is not how the tool runs."""
        params = dict(ctx.params or {})
        name, asked = params.get("name"), params.pop("task", None)
        if not isinstance(name, str):
            return await call_next(ctx)
        mode = await self._mode_of(name)
        if asked is None and self._lesson:
            with _refusals():
                asked = lesson_augmentation(params, can_be_task=mode is not None)
        if asked is None:
            if mode == "required":
                raise MCPError(METHOD_NOT_FOUND, f"Tool {name} runs only as a task; send the field task with the call.")
            return await call_next(ctx)
        if mode is None:
            raise MCPError(METHOD_NOT_FOUND, f"Tool {name} does not run as a task; send the call without it.")
        if not isinstance(asked, Mapping):
            raise MCPError(INVALID_PARAMS, "Invalid params: task must be an object.")
        with _refusals():
            augmentation = Augmentation(legacy_ttl(asked, DEFAULT))
        # Without the field: the SDK's models allow fewer numbers in it than JSON does.
        result = await call_next(_augmented(replace(ctx, params=params), augmentation))
        if augmentation.task is None:
            return result
        answer = lesson_create_task_result if self._lesson else legacy_create_task_result
        return dict(answer(augmentation.task))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RequestError as refusal:
        raise MCPError(refusal.code, refusal.message, refusal.data) from refusal


def _followed_by(ctx: ServerRequestContext) -> set[asyncio.Task[None]]:
    """Return what follows tasks for the session of a request; all of it ends with the session."""
    connection = ctx.session._connection  # private, for want of another way to the end of a session
    followed: set[asyncio.Task[None]] | None = connection.state.get(_FOLLOWED)
    if followed is None:
        followed = connection.state[_FOLLOWED] = set()
        connection.exit_stack.callback(_cancel, followed)
    return followed


def _cancel(followed: set[asyncio.Task[None]]) -> None:
    for each in followed:
        each.cancel()


def _augmented(ctx: ServerRequestContext, augmentation: Augmentation) -> AugmentedContext:
    own = {field.name: getattr(ctx, field.name) for field in fields(ServerRequestContext)}
    return AugmentedContext(**own, augmentation=augmentation)
