"""TaskHandle: what the running tool holds. It carries the fence, so it writes only while the task is still its own."""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydantic import JsonValue

from taskstore import operations, payload
from taskstore.binding import Binding, shorten
from taskstore.clock import Clock
from taskstore.errors import (
    DatabaseUnavailableError,
    LeaseLostError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.operations import Call, Fence, Progress, Refused, Rules, Transaction
from taskstore.task import Task, TaskStatus
from taskstore.waiting import Waiting

T = TypeVar("T")

logger = logging.getLogger("taskstore")

PROGRESS_INTERVAL = timedelta(milliseconds=250)
# Work that is over in a moment needs no eye on other processes, which costs more than such work does.
_WATCH_AFTER = timedelta(milliseconds=100)
_OUTAGE_PAUSE = timedelta(seconds=1)


class HandleHost(Protocol):
    """What a handle needs of its store."""

    binding: Binding
    clock: Clock
    waiting: Waiting
    rules: Rules

    def operator_call(self) -> Call:
        """Return who reads now without an auth context."""

    async def write_unit(self, unit: Callable[[Transaction], T | Refused]) -> T:
        """Run a unit; raise what it refused."""

    async def read_unit(
        self, unit: Callable[[Transaction], T | Refused], call: Call | None = None, *, snapshot: bool = False
    ) -> T:
        """Run a unit that only reads; raise what it refused."""

    def let_go(self, fence: Fence) -> None:
        """Forget a task that this process has no more say over."""


@dataclass(slots=True)
class _Said:
    """All that the tool has said about its progress so far; ``message`` is encoded."""

    value: float | None = None
    total: float | None = None
    message: bytes | None = None

    def sealed(self, rules: Rules, task_id: str, last_message: bytes | None = None) -> Progress:
        message = last_message or self.message
        if message is None:
            return Progress(self.value, self.total)
        return Progress(self.value, self.total, rules.cipher.seal(message, "tasks", "status_message", task_id))


class TaskHandle:
    """A task in the hands of its tool. As an async context manager it fails the task when the block raises.

    Every write may raise ``LeaseLostError`` (this process was taken for dead, or the task was taken over),
    ``TaskFinishedError`` (it was cancelled, say; carries the record that stands), ``TaskNotFoundError``, and
    ``DatabaseUnavailableError``. Use a handle on one event loop.
    """

    def __init__(self, host: HandleHost, task: Task, fence: Fence) -> None:
        self._host, self._fence = host, fence
        self._name = task.name or task.method
        self._version = task.version
        self._watch_from = host.clock.monotonic() + _WATCH_AFTER.total_seconds()
        self._said = _Said()
        self._unsaved = self._saving = False
        self._saved_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._last_words: set[asyncio.Task[None]] = set()
        self._finished = self._stop_work = False
        self._finishing: asyncio.Future[None] | None = None

    @property
    def task_id(self) -> str:
        """The task's id."""
        return self._fence.task_id

    @property
    def cancel_requested(self) -> bool:
        """Whether the work should stop: the task was cancelled, or this handle lost it.

        Inside ``async with``, and while ``wait_cancelled`` runs, it follows other processes; else only this one.
        """
        return self._stop_work

    async def wait_cancelled(self) -> None:
        """Return once nothing is left to work for: the task was cancelled or lost, here or elsewhere, or finished."""
        while not (self._stop_work or self._finished):
            try:
                await self._until_finished()
            except (LeaseLostError, TaskNotFoundError):
                if not self._finished:
                    self.stop_work()
            except TaskStoreError as error:
                if self._host.waiting.closed:
                    self.stop_work()
                    return
                logger.warning("Cannot see whether task %s was cancelled: %s", shorten(self.task_id), error)
                await asyncio.sleep(_OUTAGE_PAUSE.total_seconds())
            else:
                if self._finishing is not None:
                    # The finish that was seen may be our own, which has been written and not yet reported back.
                    await asyncio.wait({self._finishing})
                elif not self._finished:
                    self.stop_work()

    async def progress(self, value: float | None, total: float | None = None, message: str | None = None) -> None:
        """Report how far the work is.

        A value below an earlier one is ignored. Of reports in quick succession the newest is stored every quarter
        of a second, and the last one with the outcome at the latest.

        Args:
            value: Progress so far, in the tool's own unit; None when only the message is new.
            total: What ``value`` will be at the end, if known.
            message: What the requestor may read; stays until the next message.

        Raises:
            PayloadError: A number is not finite, or the message cannot be stored.
        """
        for name, number in (("progress", value), ("total", total)):
            if number is not None:
                payload.check_number(number, name)
        payload.check_type(message, str | None, "message")
        if message is not None:
            self._said.message = self._host.rules.encode(message, "$.message")
        if total is not None:
            self._said.total = float(total)
        if value is not None and (self._said.value is None or value > self._said.value):
            self._said.value = float(value)
        self._unsaved = True
        if self._finished or self._stop_work:
            await self._save_progress()  # which is refused, and says why; nothing will come back later to do so
        elif not self._saving and self._timer is None:
            wait = self._saved_at + PROGRESS_INTERVAL.total_seconds() - self._host.clock.monotonic()
            if wait <= 0:
                await self._save_progress()
            else:
                self._timer = asyncio.get_running_loop().call_later(wait, self._save_progress_later)

    async def complete(self, result: JsonValue | Mapping[str, JsonValue], *, is_error: bool = False) -> Task:
        """Store the result and finish the task, in one transaction.

        Args:
            is_error: The tool ran, and reports a failure of its own (MCP ``isError``).

        Raises:
            PayloadError: The result cannot be stored; the task is still live.
        """
        payload.check_type(is_error, bool, "is_error")
        encoded = self._host.rules.encode(result, "$.result")
        return await self._finish(
            partial(
                operations.complete,
                fence=self._fence,
                said=self._said.sealed(self._host.rules, self.task_id),
                result=self._host.rules.cipher.seal(encoded, "tasks", "result", self.task_id),
                is_error=is_error,
                outcome_digest=self._host.binding.outcome_digest("completed", encoded, bytes([is_error])),
                call=self._host.operator_call(),
            )
        )

    async def fail(self, message: str, *, code: int = -32603, data: JsonValue = None) -> Task:
        """Finish the task with a JSON-RPC error; ``message`` becomes the status message too.

        Raises:
            PayloadError: The message or the data cannot be stored; the task is still live.
        """
        payload.check_type(message, str, "message")
        payload.check_type(code, int, "code")
        error: dict[str, JsonValue] = {"code": code, "message": message}
        if data is not None:
            error["data"] = data
        encoded = self._host.rules.encode(error, "$.error")
        return await self._finish(
            partial(
                operations.fail,
                fence=self._fence,
                said=self._said.sealed(self._host.rules, self.task_id, self._host.rules.encode(message, "$.message")),
                error=self._host.rules.cipher.seal(encoded, "tasks", "error", self.task_id),
                outcome_digest=self._host.binding.outcome_digest("failed", encoded),
                call=self._host.operator_call(),
            )
        )

    async def ask(self, requests: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        """Ask the requestor, and wait for every answer; meanwhile the task is ``input_required``.

        Args:
            requests: Per key of the tool's own choice an input request ``{"method": ..., "params": ...}``.

        Returns:
            The responses under the same keys.

        Raises:
            ValueError: There is no request.
            PayloadError: A request cannot be stored.
        """
        questions = self._questions(requests)
        keys = frozenset(question["key"] for question in questions)
        call = self._host.operator_call()
        asking = asyncio.create_task(
            self._write(partial(operations.ask, fence=self._fence, questions=questions, call=call))
        )
        try:
            await asyncio.shield(asking)
            return await self._answers(keys)
        except asyncio.CancelledError:
            await self._insist(self._withdraw(keys, asking))
            raise

    async def park(self, requests: Mapping[str, JsonValue], *, state: JsonValue = None) -> Task:
        """Ask the requestor, and let go of the task: it has no process to lose, and survives restarts.

        The last answer queues it for a runner that knows its tool, which finds ``state`` and the answers in its
        ``Claim``. Nothing that this handle says after that is stored.

        Args:
            requests: As for ``ask()``.
            state: What the next run needs to go on.

        Raises:
            ValueError: There is no request; or the task is external, and no runner of ours can enter it again.
            PayloadError: A request or the state cannot be stored; the task is still held.
        """
        self._check_held("ask() its requestor, and wait for the answer")
        questions, rules = self._questions(requests), self._host.rules
        left: JsonValue = {"state": state, "asked": [question["key"] for question in questions]}
        encoded = rules.encode(left, "$")
        return await self._finish(
            partial(
                operations.park,
                fence=self._fence,
                said=self._said.sealed(rules, self.task_id),
                questions=questions,
                parked=rules.cipher.seal(encoded, "tasks", "parked", self.task_id),
                call=self._host.operator_call(),
            )
        )

    async def hand_over(self) -> Task:
        """Give the task up before it is finished, as a server does that stops in good order.

        Its ``on_crash`` decides: it fails with SERVER_STOPPED, or waits to be run again, which counts as no crash.

        Raises:
            ValueError: The task is external; no process of ours holds it.
        """
        self._check_held("there is nothing to hand over")
        if self._unsaved:
            await self._save_progress()  # the next attempt, or the verdict, tells how far this one came
        return await self._finish(partial(operations.hand_over, fence=self._fence, call=self._host.operator_call()))

    def _check_held(self, remedy: str) -> None:
        if not self._fence.instance_id:
            raise ValueError(f"Task {shorten(self.task_id)} is external: {remedy}.")

    def _questions(self, requests: Mapping[str, JsonValue]) -> list[dict[str, Any]]:
        payload.check_type(requests, Mapping, "requests")
        for name in requests:
            payload.check_type(name, str, "a key of requests")
        if not requests:
            raise ValueError("A question to the requestor needs at least one request.")
        # On the wire a key is never used twice in a task's life, so the tool's own gets a random tail.
        keys = {f"{payload.check_text(name, '$.key')}-{secrets.token_hex(4)}": name for name in requests}
        rules = self._host.rules
        questions = []
        for key, name in keys.items():
            encoded = rules.encode(requests[name], f"$.{name}")
            sealed = rules.cipher.seal(encoded, "inputs", "request", self.task_id, key)
            questions.append({"key": key, "name": name, "request": sealed})
        return questions

    async def _answers(self, keys: frozenset[str]) -> Mapping[str, JsonValue]:
        """Wait until every one of some questions is answered, however many others are open."""
        unit = partial(operations.read_answers, fence=self._fence, keys=keys)
        with self._host.waiting.waiter(self.task_id) as waiter:
            while True:
                waiter.watch()
                call = self._host.operator_call()
                # What stops the work during the look may not be in it; that wakes this waiter, to look again.
                lost = self._stop_work
                try:
                    task, answers = await self._host.read_unit(partial(unit, call=call), snapshot=True)
                except (LeaseLostError, TaskNotFoundError):
                    self.stop_work()
                    raise
                if len(answers) == len(keys):
                    return answers
                if task.is_finished:
                    self.stop_work()
                    raise TaskFinishedError(task, TaskStatus.WORKING)
                if lost:
                    raise LeaseLostError(self.task_id)
                if operations.is_due(task, call):
                    await self._end_due(call)
                    continue
                waiter.version = task.version
                await waiter.wait(operations.seconds_to_ttl(task, call))

    async def _withdraw(self, keys: frozenset[str], asking: "asyncio.Task[Task]") -> None:
        with suppress(TaskStoreError):  # never asked, or finished meanwhile, or lost
            await asking
            call = self._host.operator_call()
            await self._write(partial(operations.withdraw, fence=self._fence, keys=keys, call=call))

    async def __aenter__(self) -> Self:
        self._watch = asyncio.get_running_loop().call_later(
            _WATCH_AFTER.total_seconds(), lambda: self._keep(self.wait_cancelled())
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for task in self._background:
            task.cancel()
        if self._finished or self._stop_work:
            return
        if error is None:
            message = f"The tool {self._name} ended without a result"
        elif isinstance(error, Exception):
            # What the exception says may be for nobody outside; it goes to the log.
            message = f"Error executing tool {self._name}"
            logger.error("Task %s: %s", shorten(self.task_id), message, exc_info=error)
        else:
            message = f"The tool {self._name} was stopped before it finished"
        try:
            await self._insist(self._fail_at_exit(message))
        except DatabaseUnavailableError as unavailable:
            # What ended the block is what its caller must hear, a cancellation above all.
            logger.warning("The end of task %s was not stored: %s", shorten(self.task_id), unavailable)

    async def _fail_at_exit(self, message: str) -> None:
        try:
            with suppress(TaskFinishedError, LeaseLostError, TaskNotFoundError):
                await self.fail(message)
        finally:
            # If that was not stored, upkeep sees that nobody holds the task.
            self._host.let_go(self._fence)

    async def _insist(self, write: Coroutine[None, None, None]) -> None:
        """Bring a write to its end though the caller is cancelled: a scope of anyio's cancels each await again."""
        task = asyncio.create_task(write)
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)
        await asyncio.shield(task)

    def stop_work(self) -> None:
        """Let the work know that it should stop; wakes whoever waits in ``wait_cancelled``."""
        self._stop_work = True
        self._host.let_go(self._fence)
        self._host.waiting.notify(self.task_id)

    async def _finish(self, unit: Callable[[Transaction], Task | Refused]) -> Task:
        finishing = self._finishing = asyncio.get_running_loop().create_future()
        try:
            task = await self._write(unit)
            # fail point: outcome-stored
            self._finished = True
        finally:
            finishing.set_result(None)
            self._finishing = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._host.let_go(self._fence)
        return task

    async def _write(self, unit: Callable[[Transaction], T | Refused]) -> T:
        try:
            value = await self._host.write_unit(unit)
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError):
            self.stop_work()
            raise
        self._host.waiting.notify(self.task_id)
        return value

    async def _save_progress(self) -> None:
        self._saving, self._unsaved = True, False
        said, call = self._said.sealed(self._host.rules, self.task_id), self._host.operator_call()
        try:
            await self._write(partial(operations.report_progress, fence=self._fence, said=said, call=call))
        except DatabaseUnavailableError as error:
            # No reason to stop the work: the next report, or the outcome, carries what is lost here.
            logger.warning("Progress of task %s was not stored: %s", shorten(self.task_id), error)
        finally:
            self._saving, self._saved_at = False, self._host.clock.monotonic()
        if self._unsaved and not self._finished and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PROGRESS_INTERVAL.total_seconds(), self._save_progress_later)

    def _save_progress_later(self) -> None:
        async def save() -> None:
            # The tool is not here to hear a refusal; its next write is.
            with suppress(LeaseLostError, TaskFinishedError, TaskNotFoundError):
                await self._save_progress()

        self._timer = None
        if not (self._finished or self._stop_work):
            self._keep(save())

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _until_finished(self) -> None:
        """Wait until the task is finished, or this process knows that the work should stop.

        Raises:
            LeaseLostError: This handle lost the task meanwhile.
        """
        unit = partial(operations.check_fence, fence=self._fence)
        with self._host.waiting.waiter(self.task_id) as waiter:
            waiter.version = self._version
            blind = self._watch_from - self._host.clock.monotonic()
            if blind > 0:
                waiter.watch()
                await waiter.wait(blind)
            while not (self._finished or self._stop_work):
                waiter.watch()
                call = self._host.operator_call()
                task = await self._host.read_unit(partial(unit, call=call))
                if task.is_finished or self._stop_work:
                    return
                if operations.is_due(task, call):
                    await self._end_due(call)
                    continue
                waiter.version = task.version
                # Nobody may write anything at the ttl, and so nobody would wake this.
                await waiter.wait(operations.seconds_to_ttl(task, call))

    async def _end_due(self, call: Call) -> None:
        """Fail the task, whose ttl has passed; the next look finds it finished."""
        await self._host.write_unit(partial(operations.end_if_due, task_id=self.task_id, call=call))
        self._host.waiting.notify(self.task_id)
