"""The seam to the SDK's subscriptions/listen: streams that carry the changes of tasks too.

The SDK's own handler knows a closed set of events, and an extension cannot bind a method of the specification. So a
handler of ours stands before the SDK's: that one keeps the stream, and ours adds to it.

Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks, "Notifications".
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.server.session import ServerSession
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY, InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    Notification,
    RequestId,
    ServerNotification,
    SubscriptionFilter,
    SubscriptionsAcknowledgedNotification,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from taskstore.adapters.mcp_v2_legacy import wire_of
from taskstore.adapters.requests import LIMIT_EXCEEDED
from taskstore.adapters.wire import detailed_task
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, TaskNotFoundError, TaskStoreError
from taskstore.store import TaskStore

_LISTEN = "subscriptions/listen"
_MOST_TASKS = 1000
_LIMIT_PAUSE = timedelta(seconds=1)

Listen = Callable[[ServerRequestContext, SubscriptionsListenRequestParams], Awaitable[HandlerResult]]
Admit = Callable[[ServerRequestContext], tuple[TaskStore, AuthContext | None]]


class _TaskNotification(Notification[dict[str, Any], str]):
    """A notification as it is: the SDK's models would leave out null fields, and ttlMs may be null."""


class TaskListenHandler:
    """Serves subscriptions/listen: ``taskIds`` here, all else by the handler that was there before.

    Args:
        admit: Checks a request's capability, and says which store and whose tasks are meant.
    """

    def __init__(self, others: Listen, admit: Admit) -> None:
        self._others, self._admit = others, admit

    async def __call__(self, ctx: ServerRequestContext, params: SubscriptionsListenRequestParams) -> HandlerResult:
        """Serve one stream, until its client leaves; or until all is said, if it is about tasks alone."""
        filters = params.notifications.model_extra or {}
        if "taskIds" not in filters:
            return await self._others(ctx, params)
        store, auth = self._admit(ctx)
        stream = _TaskStream(ctx, store, auth, await _existing(store, auth, _checked(filters["taskIds"])))
        # A stream of its own session, through which the acknowledgement of the other handler passes.
        session: Any = stream
        others = asyncio.ensure_future(self._others(replace(ctx, session=session), params))
        tasks = asyncio.create_task(stream.run())
        is_about_tasks_alone = not params.notifications.model_dump(exclude_none=True, exclude={"taskIds"})
        try:
            await asyncio.wait({others, tasks}, return_when=asyncio.FIRST_COMPLETED)
            if tasks.done():
                tasks.result()
                if is_about_tasks_alone:
                    return SubscriptionsListenResult(_meta=stream.meta)
            return await others
        finally:
            others.cancel()
            tasks.cancel()


class _TaskStream:
    """One stream, as the session that the other handler sends through; notifications of tasks are sent beside it."""

    def __init__(
        self, ctx: ServerRequestContext, store: TaskStore, auth: AuthContext | None, task_ids: Sequence[str]
    ) -> None:
        self._session: ServerSession = ctx.session
        self._request_id = ctx.request_id
        self._store, self._auth, self._task_ids = store, auth, task_ids
        self._acknowledged = asyncio.Event()
        self.meta: Any = {SUBSCRIPTION_ID_META_KEY: ctx.request_id}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def send_notification(
        self, notification: ServerNotification, related_request_id: RequestId | None = None
    ) -> None:
        """Send what the other handler has to say; its acknowledgement names the tasks as well."""
        if isinstance(notification, SubscriptionsAcknowledgedNotification):
            honored = notification.params.notifications.model_copy(update={"taskIds": list(self._task_ids)})
            params = notification.params.model_copy(update={"notifications": honored})
            await self._session.send_notification(
                notification.model_copy(update={"params": params}), related_request_id
            )
            self._acknowledged.set()
        else:
            await self._session.send_notification(notification, related_request_id)

    async def run(self) -> None:
        """Send every task as it is, and again after each change, until all are finished.

        Raises:
            MCPError: The store cannot be read any more.
        """
        await self._acknowledged.wait()
        watching = [asyncio.create_task(self._watch(task_id)) for task_id in self._task_ids]
        try:
            await asyncio.gather(*watching)
        except TaskStoreError as problem:
            raise MCPError(INTERNAL_ERROR, "The tasks cannot be watched any longer; listen again.") from problem
        finally:
            for each in watching:
                each.cancel()

    async def _watch(self, task_id: str) -> None:
        try:
            while True:
                try:
                    details = await self._store.get_details(task_id, auth=self._auth)
                except LimitExceededError:  # of reads a minute, which polls of the same requestor use up too
                    await asyncio.sleep(_LIMIT_PAUSE.total_seconds())
                    continue
                params: dict[str, Any] = {**detailed_task(details), "_meta": self.meta}
                del params["resultType"]  # of a response; this is none
                notification: Any = _TaskNotification(method="notifications/tasks", params=params)
                await self._session.send_notification(notification, self._request_id)
                if details.task.is_finished:
                    return
                await self._store.wait_for_task(task_id, auth=self._auth, since_version=details.task.version)
        except TaskNotFoundError:
            return  # deleted, or expired


class TaskListenMiddleware:
    """Serves ``taskIds`` on a server that has no handler of subscriptions/listen, FastMCP's; all else passes through.

    It registers none: a server with a handler declares that it tells of changes of its tools, prompts and resources.
    """

    def __init__(self, admit: Admit) -> None:
        self._serve = TaskListenHandler(ListenHandler(InMemorySubscriptionBus()), admit)

    async def __call__(self, ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
        """Handle one message, as the SDK asks of a middleware."""
        if ctx.method != _LISTEN or ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return await call_next(ctx)
        params = SubscriptionsListenRequestParams.model_validate(ctx.params or {}, by_name=False)
        filters = params.notifications.model_extra or {}
        if "taskIds" not in filters:
            return await call_next(ctx)
        # Of what else is asked for nobody will tell, so the acknowledgement does not name it.
        about_tasks = SubscriptionFilter.model_validate({"taskIds": filters["taskIds"]})
        result = await self._serve(ctx, params.model_copy(update={"notifications": about_tasks}))
        return {"resultType": "complete", **wire_of(result)}


def serve_tasks_on_listen(server: MCPServer[Any], admit: Admit) -> None:
    """Put the handler before the server's own; a server without one (``subscriptions=False``) stays so."""
    entry = server._lowlevel_server.get_request_handler(_LISTEN)
    if entry is not None and not isinstance(entry.handler, TaskListenHandler):
        handler = TaskListenHandler(entry.handler, admit)
        server._lowlevel_server.add_request_handler(_LISTEN, SubscriptionsListenRequestParams, handler)


def _checked(task_ids: object) -> list[str]:
    if not isinstance(task_ids, list) or not all(isinstance(each, str) for each in task_ids):
        raise MCPError(INVALID_PARAMS, "Invalid params: notifications.taskIds must be an array of strings.")
    if len(task_ids) > _MOST_TASKS:
        raise MCPError(INVALID_PARAMS, f"Invalid params: at most {_MOST_TASKS} taskIds on one stream.")
    return list(dict.fromkeys(task_ids))


async def _existing(store: TaskStore, auth: AuthContext | None, task_ids: Sequence[str]) -> list[str]:
    """Leave out what is unknown, expired or somebody else's: it cannot be told apart."""
    existing = []
    for task_id in task_ids:
        try:
            await store.get_task(task_id, auth=auth)
        except TaskNotFoundError:
            continue
        except LimitExceededError as refusal:
            raise MCPError(INTERNAL_ERROR, str(refusal), {"reason": LIMIT_EXCEEDED}) from refusal
        existing.append(task_id)
    return existing
