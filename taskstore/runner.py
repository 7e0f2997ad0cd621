"""TaskRunner: runs work as tasks, apart from the requests that asked for it; cancel, shutdown, last write.

A request may end, or its connection go away, while the work goes on. So the work lives in the runner's own
asyncio tasks, never in the task group of a request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

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
from taskstore.payload import check_type
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Claim, OnCrash, ReasonCode, Task

logger = logging.getLogger("taskstore")

INTERNAL_ERROR = -32603  # JSON-RPC 2.0, "Error object"

_CLAIM_WAIT = timedelta(seconds=1)
_FIRST_RETRY = timedelta(seconds=0.5)
_LONGEST_RETRY = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What the work returned; ``is_error`` says that the tool reported a failure of its own (MCP ``isError``)."""

    result: JsonValue | Mapping[str, JsonValue]
    is_error: bool = False

    def __post_init__(self) -> None:
        check_type(self.is_error, bool, "is_error")


@dataclass(frozen=True, slots=True)
class WorkParked:
    """The work ended with questions to the requestor; its answers bring it to another run (``TaskHandle.park``)."""

    requests: Mapping[str, JsonValue]
    state: JsonValue = None

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("Work that parks its task needs at least one request to the requestor.")


class WorkError(Exception):
    """The work ended in a JSON-RPC error; the task fails with exactly this code, message and data."""

    def __init__(self, code: int, message: str, data: JsonValue = None) -> None:
        check_type(code, int, "code")
        check_type(message, str, "message")
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


T = TypeVar("T")
Work = Callable[[TaskHandle], Awaitable[WorkResult | WorkParked]]


class Rerun(Protocol):
    """What a runner needs to run tasks again: parked ones that are answered, and those of ended processes."""

    async def names(self) -> Collection[str]:
        """Name the tools that can be run now."""

    def work(self, claim: Claim) -> Work:
        """Make the work of another run."""


class _HandOver:
    """The outcome of work that was stopped with its server: the task's own policy decides."""


_Outcome = WorkResult | WorkParked | WorkError | _HandOver


class TaskRunner:
    """Runs work as tasks of one store. Make it on the event loop (asyncio) that the work shall run on.

    Args:
        rerun: How tasks are run again; without it this runner claims none.
        max_reruns: How many of them run at once; the others wait in the database.
        cancel_grace: How long cancelled work may take to stop before the log says that it didn't.
    """

    def __init__(
        self,
        store: TaskStore,
        *,
        rerun: Rerun | None = None,
        max_reruns: int = 10,
        cancel_grace: timedelta = timedelta(seconds=10),
    ) -> None:
        self._store = store
        self._cancel_grace = cancel_grace
        self._reruns = asyncio.Semaphore(max_reruns)
        self._claiming = None if rerun is None else asyncio.create_task(self._run_queued(rerun))
        self._starting: set[asyncio.Task[Task]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._works: set[asyncio.Task[_Outcome]] = set()
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
        on_crash: OnCrash = OnCrash.FAIL,
        max_attempts: int | None = None,
        caller: JsonValue | Mapping[str, JsonValue] = None,
    ) -> Task:
        """Create a task and run ``work`` as it; the keywords are those of ``TaskStore.create_task``.

        The work gets the task's handle and a copy of the caller's context variables. What it returns completes
        the task, or parks it; a ``WorkError`` fails it; of any other exception the client sees "Error executing
        tool <name>", and the log the rest. When the caller is cancelled meanwhile, the task is either not created,
        or created and run: never created and left to nobody.

        Returns:
            The task, durable when this returns.

        Raises:
            RuntimeError: The runner is closed.
            ValueError: ``on_crash`` is ``external``, which is work that no runner does; and as ``create_task()``.
            PayloadError: ``request`` or ``caller`` cannot be stored.
        """
        if self._closed:
            raise RuntimeError("This TaskRunner is closed: the server is stopping and takes no more tasks.")
        if on_crash == OnCrash.EXTERNAL:
            raise ValueError("An external task is not run here; create it with TaskStore.create_task().")

        async def create_and_run() -> Task:
            task = await self._store.create_task(
                auth=auth,
                ttl=ttl,
                poll_interval=poll_interval,
                method=method,
                name=name,
                request=request,
                session_id=session_id,
                on_crash=on_crash,
                max_attempts=max_attempts,
                caller=caller,
            )
            # No await may come in between: a cancellation of this task would find no handle to tell the work.
            handle = self._store.handle(task)
            _keep(self._running, asyncio.create_task(self._run(handle, work, name or method)))
            return task

        return await asyncio.shield(_keep(self._starting, asyncio.create_task(create_and_run())))

    async def close(self, drain: timedelta = timedelta(seconds=5)) -> None:
        """Take no more work, give what runs the drain time to finish, then cancel the rest.

        A task whose work had to be cancelled is handed over as its ``on_crash`` says: it fails with SERVER_STOPPED,
        or waits for a runner.
        """
        self._closed = True
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.wait({self._claiming})
        if self._starting:
            await asyncio.wait(self._starting)
        if self._running:
            await asyncio.wait(self._running, timeout=drain.total_seconds())
        if not self._stopping.done():
            self._stopping.set_result(None)
        if self._running:
            await asyncio.wait(self._running)

    async def _run_queued(self, rerun: Rerun) -> None:
        """Claim queued tasks for as long as the runner is open, and run each in a task of its own."""
        while True:
            await self._reruns.acquire()
            try:
                claim = await self._claim(rerun)
            except BaseException:
                self._reruns.release()
                raise
            handle = self._store.handle(claim.task)
            running = asyncio.create_task(self._run_again(handle, rerun, claim))
            _keep(self._running, running).add_done_callback(lambda _: self._reruns.release())

    async def _claim(self, rerun: Rerun) -> Claim:
        while True:
            try:
                claim = await self._store.claim_task(await rerun.names(), timeout=_CLAIM_WAIT)
            except DatabaseUnavailableError as problem:
                logger.warning("Cannot look for tasks to run again, trying later. %s", problem)
                await asyncio.sleep(_FIRST_RETRY.total_seconds())
            else:
                if claim is not None:
                    return claim

    async def _run_again(self, handle: TaskHandle, rerun: Rerun, claim: Claim) -> None:
        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            return await rerun.work(claim)(handle)

        await self._run(handle, work, claim.task.name or claim.task.method)

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
        if cancelled.done() and not handle.cancel_requested:
            # The work finished its task by its own hand; what it does after that is not to be cut short.
            ends.remove(cancelled)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            outcome: _Outcome = _unexpected(name) if working.cancelled() else working.result()
        else:
            await self._stop(working, handle, name)
            if handle.cancel_requested:
                return
            in_time = working.done() and not working.cancelled()
            outcome = working.result() if in_time else _HandOver()
        await self._report(handle, outcome, name)

    async def _stop(self, working: asyncio.Task[_Outcome], handle: TaskHandle, name: str) -> None:
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

    async def _report(self, handle: TaskHandle, outcome: _Outcome, name: str) -> None:
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


async def _outcome(work: Work, handle: TaskHandle, name: str) -> _Outcome:
    """Await the work and turn every way it can end into an outcome, but for its cancellation by the runner."""
    try:
        result = await work(handle)
        check_type(result, WorkResult | WorkParked, "what the work returns")
        return result
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


async def _write(handle: TaskHandle, outcome: _Outcome, name: str) -> None:
    try:
        match outcome:
            case WorkResult():
                await handle.complete(outcome.result, is_error=outcome.is_error)
            case WorkParked():
                await handle.park(outcome.requests, state=outcome.state)
            case WorkError():
                await handle.fail(outcome.message, code=outcome.code, data=outcome.data)
            case _HandOver():
                await handle.hand_over()
    except PayloadError as refusal:
        message = f"Tool {name} ended, but what it returned cannot be stored. {refusal}"
        await handle.fail(message, data={"reason": ReasonCode.UNSTORABLE_RESULT, "path": refusal.path})


def _unexpected(name: str) -> WorkError:
    return WorkError(INTERNAL_ERROR, f"Error executing tool {name}")


def _keep(kept: set[asyncio.Task[T]], task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Hold a task until it is done: the event loop alone holds it only weakly."""
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task
