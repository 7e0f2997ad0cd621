"""TaskRunner: runs work as tasks, apart from the requests that asked for it; cancel, shutdown, last write.

A request may end, or its connection go away, while the work goes on. So the work lives in the runner's own
asyncio tasks, never in the task group of a request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import JsonValue

from taskstore.binding import AuthContext, shorten
from taskstore.errors import (
    DatabaseUnavailableError,
    LeaseLostError,
    PayloadError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.handle import TaskHandle
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import ReasonCode, Task

logger = logging.getLogger("taskstore")

INTERNAL_ERROR = -32603  # JSON-RPC 2.0, "Error object"

_STOPPED = f"{ReasonCode.SERVER_STOPPED}: the server was stopped before the task finished."
_FIRST_RETRY = timedelta(seconds=0.5)
_LONGEST_RETRY = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What the work returned; ``is_error`` says that the tool reported a failure of its own (MCP ``isError``)."""

    result: JsonValue | Mapping[str, JsonValue]
    is_error: bool = False


class WorkError(Exception):
    """The work ended in a JSON-RPC error; the task fails with exactly this code, message and data."""

    def __init__(self, code: int, message: str, data: JsonValue = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


T = TypeVar("T")
Work = Callable[[TaskHandle], Awaitable[WorkResult]]


class TaskRunner:
    """Runs work as tasks of one store. Make it on the event loop (asyncio) that the work shall run on.

    Args:
        cancel_grace: How long cancelled work may take to stop before the log says that it didn't.
    """

    def __init__(self, store: TaskStore, *, cancel_grace: timedelta = timedelta(seconds=10)) -> None:
        self._store = store
        self._cancel_grace = cancel_grace
        self._starting: set[asyncio.Task[Task]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._works: set[asyncio.Task[WorkResult | WorkError]] = set()
        self._closed = False
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(
        self,
        work: Work,
        *,
        auth: AuthContext | None,
        ttl: timedelta | Default | None = DEFAULT,
        poll_interval: timedelta | None = None,
        method: str = "tools/call",
        name: str | None = None,
        request: JsonValue | Mapping[str, JsonValue] = None,
        session_id: str | None = None,
    ) -> Task:
        """Create a task and run ``work`` as it; the keywords are those of ``TaskStore.create_task``.

        The work gets the task's handle and a copy of the caller's context variables. What it returns completes
        the task, a ``WorkError`` fails it; of any other exception the client sees "Error executing tool <name>",
        and the log the rest. When the caller is cancelled meanwhile, the task is either not created, or created
        and run: never created and left to nobody.

        Returns:
            The task, durable when this returns.

        Raises:
            RuntimeError: The runner is closed.
            PayloadError: ``request`` cannot be stored.
        """
        if self._closed:
            raise RuntimeError("This TaskRunner is closed: the server is stopping and takes no more tasks.")

        async def create_and_run() -> Task:
            task = await self._store.create_task(
                auth=auth,
                ttl=ttl,
                poll_interval=poll_interval,
                method=method,
                name=name,
                request=request,
                session_id=session_id,
            )
            # No await may come in between: a cancellation of this task would find no handle to tell the work.
            handle = self._store.handle(task)
            _keep(self._running, asyncio.create_task(self._run(handle, work, name or method)))
            return task

        return await asyncio.shield(_keep(self._starting, asyncio.create_task(create_and_run())))

    async def close(self, drain: timedelta = timedelta(seconds=5)) -> None:
        """Take no more work, give what runs the drain time to finish, then cancel the rest.

        A task whose work had to be cancelled is ``failed`` and says that the server stopped.
        """
        self._closed = True
        if self._starting:
            await asyncio.wait(self._starting)
        if self._running:
            await asyncio.wait(self._running, timeout=drain.total_seconds())
        if not self._stopping.done():
            self._stopping.set_result(None)
        if self._running:
            await asyncio.wait(self._running)

    async def _run(self, handle: TaskHandle, work: Work, name: str) -> None:
        """Run one task's work to its end: its own, a cancellation, or the runner's."""
        try:
            await self._run_held(handle, work, name)
        finally:
            handle.stop_work()  # whatever could not be stored, upkeep fails

    async def _run_held(self, handle: TaskHandle, work: Work, name: str) -> None:
        working = _keep(self._works, asyncio.create_task(_outcome(work, handle, name)))
        cancelled = asyncio.create_task(handle.wait_cancelled())
        ends: list[asyncio.Future[Any]] = [working, cancelled, self._stopping]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled.cancel()
        if working.done():
            outcome = _unexpected(name) if working.cancelled() else working.result()
        else:
            await self._stop(working, handle, name)
            if handle.cancel_requested:
                return
            in_time = working.done() and not working.cancelled()
            outcome = working.result() if in_time else _stopped()
        await self._report(handle, outcome, name)

    async def _stop(self, working: asyncio.Task[WorkResult | WorkError], handle: TaskHandle, name: str) -> None:
        """Cancel work and wait for it no longer than the grace time."""
        working.cancel()
        await asyncio.wait({working}, timeout=self._cancel_grace.total_seconds())
        if not working.done():
            logger.warning(
                "Tool %s of task %s did not stop within %s of its cancellation; it runs on, its result is dropped.",
                name,
                shorten(handle.task_id),
                self._cancel_grace,
            )

    async def _report(self, handle: TaskHandle, outcome: WorkResult | WorkError, name: str) -> None:
        """Store how the work ended, trying again for as long as the database is away."""
        delay = _FIRST_RETRY
        while True:
            try:
                await _write(handle, outcome, name)
            except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
                logger.info("What tool %s came to is not stored. %s", name, refusal)
            except DatabaseUnavailableError as problem:
                if not self._stopping.done():
                    logger.warning(
                        "The outcome of task %s waits for the database. %s", shorten(handle.task_id), problem
                    )
                    await asyncio.wait({self._stopping}, timeout=delay.total_seconds())
                    delay = min(2 * delay, _LONGEST_RETRY)
                    continue
                logger.exception("The outcome of task %s could not be stored.", shorten(handle.task_id))
            except TaskStoreError:
                logger.exception("The outcome of task %s could not be stored.", shorten(handle.task_id))
            return


async def _outcome(work: Work, handle: TaskHandle, name: str) -> WorkResult | WorkError:
    """Await the work and turn every way it can end into an outcome, but for its cancellation by the runner."""
    try:
        return await work(handle)
    except WorkError as error:
        return error
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        # The work awaited something that somebody else cancelled; nobody cancelled the work itself.
        logger.exception("Tool %s of task %s ended in a stray cancellation.", name, shorten(handle.task_id))
        return _unexpected(name)
    except (TaskFinishedError, LeaseLostError, TaskNotFoundError) as refusal:
        # Nothing is left to say: what the tool wrote last was refused, because the task is over or somebody else's.
        logger.info("Tool %s of task %s ended: %s", name, shorten(handle.task_id), refusal)
        return _unexpected(name)
    except Exception:  # a tool is foreign code: whatever it raises ends its task and nothing else
        logger.exception("Tool %s of task %s raised an unexpected exception.", name, shorten(handle.task_id))
        return _unexpected(name)


async def _write(handle: TaskHandle, outcome: WorkResult | WorkError, name: str) -> None:
    try:
        if isinstance(outcome, WorkError):
            await handle.fail(outcome.message, code=outcome.code, data=outcome.data)
        else:
            await handle.complete(outcome.result, is_error=outcome.is_error)
    except PayloadError as refusal:
        message = f"Tool {name} ended, but what it returned cannot be stored. {refusal}"
        await handle.fail(message, data={"reason": ReasonCode.UNSTORABLE_RESULT, "path": refusal.path})


def _unexpected(name: str) -> WorkError:
    return WorkError(INTERNAL_ERROR, f"Error executing tool {name}")


def _stopped() -> WorkError:
    return WorkError(INTERNAL_ERROR, _STOPPED, {"reason": ReasonCode.SERVER_STOPPED.value})


def _keep(kept: set[asyncio.Task[T]], task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Hold a task until it is done: the event loop alone holds it only weakly."""
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task
