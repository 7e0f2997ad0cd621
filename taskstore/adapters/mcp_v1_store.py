"""The SDK's ``TaskStore`` interface of 1.x over ours: what code written for that interface gets.

The interface knows neither who asks nor who holds a task. So each call stands for the requestor of the request that
it is made in, and only the process that holds a task writes it. A write that comes too late is absorbed, as the
interface's callers expect: an exception of theirs would end the whole session.
"""

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from mcp.shared.exceptions import McpError
from mcp.shared.experimental.tasks.store import TaskStore as SDKTaskStore
from mcp.types import INTERNAL_ERROR, ErrorData, Result, TaskMetadata
from mcp.types import Task as SDKTask
from mcp.types import TaskStatus as SDKTaskStatus

from taskstore.adapters.requests import RequestError, legacy_list_tasks, legacy_task_result, legacy_ttl
from taskstore.adapters.wire import legacy_task
from taskstore.binding import AuthContext
from taskstore.errors import LeaseLostError, NotFinishedError, TaskFinishedError, TaskNotFoundError
from taskstore.handle import TaskHandle
from taskstore.runner import WorkError, WorkResult
from taskstore.store import TaskStore
from taskstore.task import Task, TaskStatus

logger = logging.getLogger("taskstore")

# The SDK's tasks/result waits in a loop, so an early return is harmless; a change that fell between its read and its
# wait would be waited for in vain.
_LONGEST_WAIT = timedelta(seconds=1)


class DurableTaskStore(SDKTaskStore):
    """Tasks of the requestor whose request is being answered; outside of one, of the local user.

    Args:
        store: Returns the open store.
        auth: Says whose request it is.
        default_ttl: Lifetime of tasks that ask for none; finite, since the SDK cannot say ``"ttl": null``.
    """

    def __init__(
        self,
        store: Callable[[], TaskStore],
        auth: Callable[[], AuthContext | None],
        *,
        default_ttl: timedelta,
        poll_interval: timedelta,
    ) -> None:
        self._store, self._auth = store, auth
        self._default_ttl, self._poll_interval = default_ttl, poll_interval

    async def create_task(self, metadata: TaskMetadata, task_id: str | None = None) -> SDKTask:
        """Create a task held by this process; ``task_id`` is ignored, since it would tie the task to a session."""
        try:
            ttl = requested_ttl(metadata, self._default_ttl)
        except RequestError as refusal:
            raise mcp_error(refusal) from refusal
        return sdk_task(await self._store().create_task(auth=self._auth(), ttl=ttl, poll_interval=self._poll_interval))

    async def get_task(self, task_id: str) -> SDKTask | None:
        """Read a task; None for one that is unknown, expired or somebody else's."""
        try:
            return sdk_task(await self._store().get_task(task_id, auth=self._auth()))
        except TaskNotFoundError:
            return None

    async def update_task(
        self, task_id: str, status: SDKTaskStatus | None = None, status_message: str | None = None
    ) -> SDKTask:
        """Change a task that this process holds, and return it; a finished one is returned as it stands.

        Raises:
            ValueError: The task is not found; or the status is ``input_required``, which comes of asking alone.
        """
        record = await self._record(task_id)
        match status:
            case "cancelled":
                return await self._settled(record, self._store().cancel_task(task_id, auth=self._auth()))
            case "input_required":
                raise ValueError("A task waits for input when it asks: use elicit() of its context.")
        handle = self._handle(record)
        if handle is None:
            return sdk_task(record)
        if status == "failed":
            return await self._settled(record, handle.fail(status_message or "The task failed."))
        if status_message is not None:
            await self._said(handle, status_message)
        if status == "completed":
            return await self._settled(record, handle.complete({}))
        return sdk_task(record).model_copy(update={} if status_message is None else {"statusMessage": status_message})

    async def store_result(self, task_id: str, result: Result) -> None:
        """Store the result and finish the task in one write; what comes after the finish is absorbed.

        Raises:
            ValueError: The task is not found.
        """
        record = await self._record(task_id)
        handle = self._handle(record)
        if handle is not None:
            outcome = work_result(result)
            await self._settled(record, handle.complete(outcome.result, is_error=outcome.is_error))

    async def get_result(self, task_id: str) -> Result | None:
        """Read the result of a finished task; None before, and for a task that is not found.

        Raises:
            McpError: What the call ended in, when it was no result; the SDK sends it on as it is.
        """
        task = await self.get_task(task_id)
        if task is None or not TaskStatus(task.status).is_finished:
            return None
        try:
            return Result.model_validate(await legacy_task_result(self._store(), self._auth(), {"taskId": task_id}))
        except RequestError as refusal:
            raise mcp_error(refusal) from refusal

    async def list_tasks(self, cursor: str | None = None) -> tuple[list[SDKTask], str | None]:
        """Read a page of the requestor's tasks, newest first; nobody's tasks are listed to nobody.

        Raises:
            McpError: The cursor is not from the page before (-32602).
        """
        auth = self._auth()
        if auth is None:
            return [], None
        try:
            page = await legacy_list_tasks(self._store(), auth, {} if cursor is None else {"cursor": cursor})
        except RequestError as refusal:
            raise mcp_error(refusal) from refusal
        tasks, next_cursor = page["tasks"], page.get("nextCursor")
        assert isinstance(tasks, list)
        return [SDKTask.model_validate(task) for task in tasks], None if next_cursor is None else str(next_cursor)

    async def delete_task(self, task_id: str) -> bool:
        """Delete a finished task; False when it is not found.

        Raises:
            ValueError: The task is live, and its work may be running; cancel it first.
        """
        try:
            await self._store().delete_task(task_id, auth=self._auth())
        except TaskNotFoundError:
            return False
        except NotFinishedError as refusal:
            raise ValueError(str(refusal)) from refusal
        return True

    async def wait_for_update(self, task_id: str) -> None:
        """Return at the next change of a task, at once when it is finished, and now and then without a change.

        Raises:
            ValueError: The task is not found.
        """
        record = await self._record(task_id)
        if not record.is_finished:
            await self._store().wait_for_task(
                task_id, auth=self._auth(), since_version=record.version, timeout=_LONGEST_WAIT
            )

    async def notify_update(self, task_id: str) -> None:
        """Do nothing: every change wakes its waiters, in every process."""

    async def _record(self, task_id: str) -> Task:
        try:
            return await self._store().get_task(task_id, auth=self._auth())
        except TaskNotFoundError as refusal:
            raise ValueError(str(refusal)) from refusal

    def _handle(self, record: Task) -> TaskHandle | None:
        """Return the handle of a task that this process holds; None when nothing can be written any more."""
        try:
            return self._store().handle(record)
        except LeaseLostError as refusal:
            logger.info("A write came too late and is not stored. %s", refusal)
            return None

    async def _settled(self, record: Task, finishing: Awaitable[Task]) -> SDKTask:
        """Return the task as it stands after a finishing write, whoever wrote it."""
        settled = await winner(finishing)
        return sdk_task(record if settled is None else settled)

    async def _said(self, handle: TaskHandle, message: str) -> None:
        try:
            await handle.progress(None, message=message)
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
            logger.info("A write came too late and is not stored. %s", refusal)


def sdk_task(task: Task) -> SDKTask:
    """Make the SDK's model of a task."""
    return SDKTask.model_validate(legacy_task(task))


def requested_ttl(metadata: TaskMetadata, default: timedelta) -> timedelta:
    """Return the lifetime that a request asks for, always finite.

    Raises:
        RequestError: The lifetime is negative (-32602).
    """
    asked = legacy_ttl(metadata.model_dump(mode="json", exclude_none=True), default)
    assert isinstance(asked, timedelta), "null is left out, and the default is finite"
    return asked


def work_result(result: Result) -> WorkResult:
    """Give a result the shape that it has on the wire.

    Raises:
        WorkError: It is none.
    """
    if not isinstance(result, Result):
        logger.error("The work of a task must return a Result, such as CallToolResult, not %s.", type(result).__name__)
        raise WorkError(INTERNAL_ERROR, "Handler returned an invalid result")
    wire = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return WorkResult(wire, is_error=wire.get("isError") is True)


async def winner(finishing: Awaitable[Task]) -> Task | None:
    """Return the record that stands after a finishing write: its own, or the one that was first; None when lost."""
    try:
        return await finishing
    except TaskFinishedError as refusal:
        logger.info("A write came too late and is not stored. %s", refusal)
        return refusal.task
    except (LeaseLostError, TaskNotFoundError) as refusal:
        logger.info("A write came too late and is not stored. %s", refusal)
        return None


def mcp_error(refusal: RequestError | WorkError) -> McpError:
    """Make the SDK's exception of a refusal."""
    return McpError(ErrorData(code=refusal.code, message=refusal.message, data=refusal.data))
