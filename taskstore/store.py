"""TaskStore: the public API, thin over ``operations``, and the composition of a store from its parts."""

import asyncio
import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Final, TypeVar

from pydantic import JsonValue

from taskstore import migrate, operations, payload, rows, statements
from taskstore.binding import AuthContext, Binding, shorten
from taskstore.clock import Clock
from taskstore.database import Database, WouldBlockError
from taskstore.errors import (
    BindingError,
    DatabaseUnavailableError,
    InvalidCursorError,
    LeaseLostError,
    LimitExceededError,
    NotFinishedError,
    TaskNotFoundError,
)
from taskstore.handle import TaskHandle
from taskstore.instances import Instance, Judge, Verdict, read_instances
from taskstore.operations import Call, Decided, Fence, Limits, Refused, Row, Transaction
from taskstore.options import StoreOptions
from taskstore.recovery import Recovery, UpkeepTurn
from taskstore.scheduler import MaintenanceScheduler
from taskstore.task import (
    Claim,
    Health,
    OnCrash,
    Outcome,
    OwnerKind,
    RecoveryReport,
    RotationReport,
    SweepReport,
    Task,
    TaskDetails,
    TaskEvent,
    TaskPage,
    TaskStatus,
)
from taskstore.waiting import Waiting

T = TypeVar("T")

logger = logging.getLogger("taskstore")
audit = logging.getLogger("taskstore.audit")


class Default(Enum):
    """The type of DEFAULT, which stands for the store's setting where None has a meaning of its own."""

    DEFAULT = "default"


DEFAULT: Final = Default.DEFAULT

_FINGERPRINT = "binding_fingerprint"
_QUEUE_PAGE = 100
_CLAIM_INTERVAL = timedelta(seconds=1)
_CANCELLED = "The task was cancelled by request."


class _Parts:
    """An open store's parts, and what every call does with them: run a unit, raise what it refused."""

    def __init__(self, database: Database, options: StoreOptions, *, observer: bool = False) -> None:
        self.database, self.options, self.clock = database, options, options.clock
        self.rules = options.rules()
        self.binding, self._former = _open_bindings(database, options, observer=observer)
        self.waiting = Waiting(database)
        self.recovery = Recovery(database, options, on_change=self.waiting.notify)
        self.turn = UpkeepTurn(database, options.clock)
        self.held: dict[str, Fence] = {}
        self.taken = Counter[str]()  # how many callers are about to hear whether they hold a task
        self.handles: dict[str, TaskHandle] = {}
        self.instance: Instance | None = None
        self.scheduler = MaintenanceScheduler(self.clock)
        self._unheld: set[Fence] = set()
        self.rate = _Rate(options.clock, options.limits.reads_per_minute)

    @property
    def writer(self) -> str:
        """Who stands in the events: this instance; an observer's changes stand under no instance."""
        return "" if self.instance is None else self.instance.instance_id

    def call(self, auth: AuthContext | None) -> Call:
        return Call(self.binding.auth_key(auth), self.clock.now(), self.writer, self.rules)

    async def requestor(self, auth: AuthContext | None) -> Call:
        """Return who calls, once whatever is bound to them under an earlier secret is bound under the present one."""
        call = self.call(auth)
        for former in self._former if auth is not None else ():
            former_key = former.auth_key(auth)
            if await self.read_unit(partial(operations.is_bound_formerly, former_auth_key=former_key)):
                await self.write_unit(partial(operations.rebind, former_auth_key=former_key, call=call))
        return call

    async def idempotency(self, auth: AuthContext, key: str, values: Row, call: Call) -> Row:
        """Make the columns of an idempotency key, once it is known by them if it was used under an earlier secret."""
        digests = _idempotency(self.binding, auth, key, values)
        for former in self._former:
            past = {f"former_{name}": digest for name, digest in _idempotency(former, auth, key, values).items()}
            await self.write_unit(partial(operations.rebind_key, digests=digests | past, call=call))
        return digests

    def operator_call(self) -> Call:
        return Call(None, self.clock.now(), self.writer, self.rules)

    async def write_unit(self, unit: Callable[[Transaction], T | Refused], call: Call | None = None) -> T:
        """Run a unit; raise what it refused. ``call`` is whose it is, for the audit log; None is a tool's."""
        return _value(await self.database.write_soon(unit), call)

    async def read_unit(
        self, unit: Callable[[Transaction], T | Refused], call: Call | None = None, *, snapshot: bool = False
    ) -> T:
        """Run a unit that only reads, on a reader."""
        return _value(await self.database.read_soon(unit, snapshot=snapshot), call)

    async def read_row(self, unit: Callable[[Transaction], T | Refused], call: Call, *, snapshot: bool = False) -> T:
        """Run a unit that reads a row or two: at once where that is possible, else like any other."""
        await asyncio.sleep(0)  # a coroutine that polls without a pause must not keep its loop from all others
        try:
            value = self.database.read_inline(unit, snapshot=snapshot)
        except WouldBlockError:
            return await self.read_unit(unit, call, snapshot=snapshot)
        return _value(value, call)

    async def beat_if_late(self) -> None:
        """Show that this process lives before it takes on a task: it may have been suspended, or cut off.

        Others may be about to take it for dead, and the new task with all that it holds, or have done so already.
        """
        if self.instance is not None and self.instance.is_late:
            await asyncio.to_thread(self.instance.beat)

    async def take(self, unit: Callable[[Transaction], T], *, undo: Callable[[T], None]) -> T:
        """Run a unit that gives this process a task; undo that if the caller is gone, as nobody will ever run it."""

        def undo_if_open(value: T) -> None:
            with suppress(DatabaseUnavailableError):  # closed: the hand-over has decided over it
                undo(value)

        return await self.database.write_soon(unit, undo=undo_if_open)

    def cancel_created(self, task: Task | Refused) -> None:
        if isinstance(task, Task) and not task.existing:
            message = self.rules.cipher.seal(payload.encode(_CANCELLED), "tasks", "status_message", task.task_id)
            call = self.operator_call()
            self.database.write(partial(operations.cancel_task, task_id=task.task_id, call=call, message=message))

    def unclaim(self, claim: Claim | None) -> None:
        if claim is not None:
            fence = Fence(claim.task.task_id, self.writer, claim.task.attempt)
            self.database.write(partial(operations.unclaim, fence=fence, call=self.operator_call()))

    def let_go(self, fence: Fence) -> None:
        # The loop's thread and the heartbeat's may both come here.
        if self.held.get(fence.task_id) == fence:
            self.held.pop(fence.task_id, None)
            self.handles.pop(fence.task_id, None)

    def start(self) -> None:
        """Become an instance, recover what dead ones left, and keep doing so."""
        options = self.options
        self.instance = Instance(
            self.database,
            self.clock,
            name=options.server,
            lease=options.lease,
            heartbeat=options.heartbeat,
            on_evicted=self._evicted,
        )
        self.instance.start()
        if options.upkeep:
            self.keep_recovering()
            self.scheduler.add("recover", self._in_turn(self.keep_recovering), options.recovery_interval)
            self.scheduler.add("sweep", self._in_turn(self.recovery.sweep), options.sweep_interval)
            self.scheduler.add("abandoned", self.fail_abandoned, options.recovery_interval)
            self.scheduler.start()

    def _in_turn(self, job: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            if self.turn.is_mine(self.writer):
                job()

        return run

    @contextmanager
    def taking(self, task_id: str) -> Iterator[None]:
        """Count as about to hold a task: a loop that is blocked may hear of its COMMIT long after the upkeep saw it."""
        self.taken[task_id] += 1
        try:
            yield
        finally:
            self.taken[task_id] -= 1
            if not self.taken[task_id]:
                del self.taken[task_id]

    def fail_abandoned(self) -> None:
        """Fail what this instance owns and nothing here holds or is about to, now and a pass ago."""
        owned = self.database.read(partial(operations.read_held, instance_id=self.writer)).result()
        unheld = {fence for fence in owned if fence.task_id not in self.held and fence.task_id not in self.taken}
        given_up, self._unheld = unheld & self._unheld, unheld
        if given_up:
            unit = partial(operations.fail_abandoned, fences=given_up, call=self.operator_call())
            for task_id in self.database.write(unit).result():
                logger.error("Task %s was failed: nothing in this process held it.", shorten(task_id))
                self.waiting.notify(task_id)

    def keep_recovering(self) -> None:
        """Recover as often as it is time; nobody asks which tasks, so none are kept."""

        def wake(batch: Sequence[Decided]) -> None:
            if any(each.owner_kind is OwnerKind.QUEUED for each in batch):
                self.waiting.notify_of_work()

        self.recovery.recover_in_batches(self.writer, wake)

    def recover(self) -> RecoveryReport:
        report = self.recovery.recover(self.writer)
        if report.queued:
            self.waiting.notify_of_work()
        return report

    def close(self) -> None:
        if self.database.is_foreign:
            return  # inherited by a fork: it is the parent's to close
        try:
            self.recovery.stop()
            self.scheduler.stop()
            if self.instance is not None:
                self.instance.stop()
                self.turn.leave(self.instance.instance_id)
                self.recovery.hand_over(self.instance.instance_id)
        except DatabaseUnavailableError as error:
            logger.warning("The store is closed without a last word to its database: %s", error)
        finally:
            if self.instance is not None:
                self.instance.unlock()
            self.waiting.close()
            self.database.close()

    def _evicted(self, instance_id: str) -> None:
        lost = [fence for fence in list(self.held.values()) if fence.instance_id == instance_id]
        for fence in lost:
            handle = self.handles.get(fence.task_id)
            if handle is not None:
                handle.stop_work()
            self.let_go(fence)


class _Rate:
    """Counts each auth context's reads, in this process, minute by minute."""

    def __init__(self, clock: Clock, allowed: int | None) -> None:
        self._clock, self._allowed = clock, allowed
        self._minute, self._reads = -1, dict[str, int]()

    def count(self, call: Call) -> None:
        """Count one read.

        Raises:
            LimitExceededError: There were as many as allowed in this minute.
        """
        if self._allowed is None or call.auth_key is None:
            return
        minute = int(self._clock.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._reads = minute, {}
        reads = self._reads.get(call.auth_key, 0)
        if reads >= self._allowed:
            raise LimitExceededError("reads_per_minute", self._allowed, "poll less often, or use wait_for_task()")
        self._reads[call.auth_key] = reads + 1


class TaskStore:
    """A durable store of MCP tasks; open one with ``TaskStore.open()``. For one event loop (asyncio).

    Whoever asks for a task says who asks: ``auth`` is an ``AuthContext``, or None for "no auth context". A task that
    is unknown, expired or somebody else's raises the same ``TaskNotFoundError``. Every method may raise
    ``DatabaseUnavailableError``.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self.operator = OperatorView(parts)

    @property
    def limits(self) -> Limits:
        """What one auth context may have and ask."""
        return self._parts.rules.limits

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, options: StoreOptions | None = None) -> AsyncIterator["TaskStore"]:
        """Open a store: check the schema, recover what dead processes left, start upkeep; close it at the end.

        Args:
            url: ``sqlite:///tasks.db``, ``sqlite://`` (in memory), ``postgresql+psycopg://user@host/name``.

        Raises:
            ValueError: The URL names a database or a driver that is not supported.
            DatabaseUnavailableError: The database cannot be opened or reached.
            SchemaError: The schema is missing or behind and may not be migrated here, or it is ahead of this code.
            BindingError: The database was first opened with another binding secret.
        """
        opening = asyncio.get_running_loop().run_in_executor(None, _open, url, options or StoreOptions())
        try:
            parts = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        try:
            yield cls(parts)
        finally:
            await asyncio.to_thread(parts.close)

    @property
    def seals(self) -> bool:
        """Whether payloads are sealed at rest (``StoreOptions.keys``)."""
        return bool(self._parts.options.keys)

    async def create_task(
        self,
        *,
        auth: AuthContext | None,
        ttl: timedelta | None | Default = DEFAULT,
        poll_interval: timedelta | None = None,
        method: str = "tools/call",
        name: str | None = None,
        request: JsonValue | Mapping[str, JsonValue] = None,
        session_id: str | None = None,
        idempotency_key: str | None = None,
        on_crash: OnCrash = OnCrash.FAIL,
        max_attempts: int | None = None,
        parent_task_id: str | None = None,
        caller: JsonValue | Mapping[str, JsonValue] = None,
    ) -> Task:
        """Create a task in status ``working``, held by this process; it is durable when this returns.

        Args:
            ttl: Lifetime from now; None is unlimited. Cut to ``max_ttl``; the task says what it got.
            poll_interval: How often a client should ask.
            method: The request that the task stands for.
            name: The tool's name.
            request: What a later run would need of the request.
            session_id: Narrows listings; never part of who may see the task.
            idempotency_key: Makes a create that is repeated return the first one's task, with ``existing`` set: for
                the same auth context, key, method, name and request, for as long as that task is kept.
            on_crash: What becomes of it when its process dies or stops: ``fail``; ``retry``: it is queued for a
                runner that knows its name; ``ask``: its requestor is asked whether to run it again, if
                ``caller["capabilities"]`` has ``elicitation``, else it fails; ``external``: no process of ours holds
                it, and its outcome comes by ``operator.handle()``.
            max_attempts: How many deaths ``retry`` and ``ask`` put up with before they fail it; None is 3.
            parent_task_id: The task that this one is a part of; kept for the application, and never shown to clients.
            caller: What a later run needs to know of who called and with what (protocol version, capabilities);
                never shown to clients, and dropped when the task is finished.

        Raises:
            ValueError: ``ttl`` or ``poll_interval`` is negative or beyond all measure, a key is given without an auth
                context, ``on_crash`` is unknown, or ``max_attempts`` is below 1.
            IdempotencyConflictError: The key was used for another request.
            LimitExceededError: The auth context has as many tasks as it may have.
            PayloadError: ``request``, ``caller``, ``method`` or ``name`` cannot be stored.
            LeaseLostError: This store is an observer, and runs nothing.
        """
        parts = self._parts
        await parts.beat_if_late()
        call = await parts.requestor(auth)
        values = rows.created(
            call,
            server=parts.options.server,
            session_digest=_session_digest(parts, session_id),
            ttl_ms=self._ttl_ms(ttl),
            poll_interval=poll_interval,
            method=method,
            name=name,
            request=request,
        )
        values.update(rows.policy(OnCrash(on_crash), max_attempts))
        if not parts.writer:
            raise LeaseLostError(values["task_id"])
        if parent_task_id is not None:
            values["parent_task_id"] = _checked(parent_task_id, "parent_task_id")
        if caller is not None:
            encoded = parts.rules.encode(caller, "$.caller")
            values["caller"] = parts.rules.cipher.seal(encoded, "tasks", "caller", values["task_id"])
        payload.check_type(idempotency_key, str | None, "idempotency_key")
        if idempotency_key is not None:
            if auth is None:
                raise ValueError("An idempotency_key needs an auth context: without one, anybody's key could be hit.")
            values.update(await parts.idempotency(auth, idempotency_key, values, call))
        if values["request"] is not None:
            values["request"] = parts.rules.cipher.seal(values["request"], "tasks", "request", values["task_id"])
        unit = partial(operations.create_task, values=values, call=call)
        with parts.taking(values["task_id"]):
            task = _value(await parts.take(unit, undo=parts.cancel_created), call)
            if task.existing:
                parts.waiting.notify(task.task_id)  # if it was due, this create has ended it
                return task
            if task.owner_kind is OwnerKind.INSTANCE:
                parts.held[task.task_id] = Fence(task.task_id, str(values["instance_id"]), task.attempt)
        audit.info("created %s for %s", shorten(task.task_id), _whose(call))
        return task

    async def get_task(self, task_id: str, *, auth: AuthContext | None) -> Task:
        """Read a task; no payload is read."""
        return await _get_task(self._parts, task_id, await self._parts.requestor(auth))

    async def get_details(self, task_id: str, *, auth: AuthContext | None) -> TaskDetails:
        """Read a task, its outcome if it is finished, and its open questions: one snapshot of the database."""
        return await _get_details(self._parts, task_id, await self._parts.requestor(auth))

    async def get_outcome(self, task_id: str, *, auth: AuthContext | None) -> Outcome:
        """Read what a finished task came to.

        Raises:
            NotFinishedError: The task is still live.
        """
        details = await self.get_details(task_id, auth=auth)
        if details.outcome is None:
            raise NotFinishedError(details.task)
        return details.outcome

    async def wait_for_task(
        self,
        task_id: str,
        *,
        auth: AuthContext | None,
        since_version: int | None = None,
        timeout: timedelta | None = None,
    ) -> Task:
        """Wait for a task to finish, or for its next change.

        Args:
            since_version: Return once the task's version is higher than this. None: once it is finished.
            timeout: How long to wait at most; None is for ever.

        Returns:
            The task as it is then; at the timeout, as it is.
        """
        payload.check_type(since_version, int | None, "since_version")
        payload.check_type(timeout, timedelta | None, "timeout")
        parts, loop = self._parts, asyncio.get_running_loop()
        ends = None if timeout is None else loop.time() + timeout.total_seconds()
        await parts.requestor(auth)
        with parts.waiting.waiter(_checked(task_id)) as waiter:
            while True:
                waiter.watch()
                call = parts.call(auth)
                task = await _read_task(parts, task_id, call)
                left = None if ends is None else ends - loop.time()
                changed = task.is_finished or (since_version is not None and task.version > since_version)
                if changed or (left is not None and left <= 0):
                    return task
                waiter.version = task.version
                pause = _sooner(left, operations.seconds_to_ttl(task, call))
                await waiter.wait(pause)

    async def list_tasks(
        self,
        *,
        auth: AuthContext | None,
        status: TaskStatus | None = None,
        cursor: str | None = None,
        limit: int = 100,
        session_id: str | None = None,
    ) -> TaskPage:
        """List an auth context's tasks, newest first; without an auth context there is nothing to list.

        Args:
            cursor: ``next_cursor`` of the page before; None is the first page.
            limit: Tasks a page, from 1 to ``Limits.page_size``.

        Raises:
            ValueError: ``limit`` is out of range, or ``status`` is none.
            InvalidCursorError: The cursor was issued for another auth context or filter, or not by this store.
        """
        filters = {
            "status": None if status is None else TaskStatus(status),
            "session_digest": _session_digest(self._parts, session_id),
        }
        if auth is None:
            _check_page(cursor, limit, self._parts.rules.limits)
            return TaskPage(tasks=(), next_cursor=None)
        return await _list_tasks(self._parts, await self._parts.requestor(auth), filters, cursor, limit)

    async def list_events(self, task_id: str, *, auth: AuthContext | None, after: int = 0) -> list[TaskEvent]:
        """List a task's state changes after a version, oldest first."""
        return await _list_events(self._parts, task_id, await self._parts.requestor(auth), after)

    async def cancel_task(self, task_id: str, *, auth: AuthContext | None) -> Task:
        """Cancel a live task: at once on the record; its work is told, and whatever it still says is refused.

        Raises:
            TaskFinishedError: The task is finished already; carries the record that stands.
        """
        return await _cancel_task(self._parts, task_id, await self._parts.requestor(auth))

    async def answer_inputs(
        self, task_id: str, responses: Mapping[str, JsonValue], *, auth: AuthContext | None
    ) -> Task:
        """Answer open questions; the last answer sets the task to ``working``.

        Responses under keys that are not open (never asked, answered already) are ignored unread.

        Raises:
            PayloadError: A response to an open question cannot be stored; none of them is.
        """
        parts = self._parts
        payload.check_type(responses, Mapping, "responses")
        for key in responses:
            payload.check_type(key, str, "a key of responses")
        details = await _read_details(parts, task_id, await parts.requestor(auth))
        encoded = {
            key: parts.rules.cipher.seal(parts.rules.encode(response, f"$.{key}"), "inputs", "response", task_id, key)
            for key, response in responses.items()
            if key in details.input_requests
        }
        if not encoded:
            return details.task
        call = parts.call(auth)
        unit = partial(operations.answer_inputs, task_id=task_id, responses=encoded, call=call)
        task = await parts.write_unit(unit, call)
        parts.waiting.notify(task_id)
        if task.owner_kind is OwnerKind.QUEUED:
            parts.waiting.notify_of_work()
        return task

    async def delete_task(self, task_id: str, *, auth: AuthContext | None) -> None:
        """Delete a finished task with its history.

        Raises:
            NotFinishedError: The task is still live; cancel it first.
        """
        call = await self._parts.requestor(auth)
        await self._parts.write_unit(partial(operations.delete_task, task_id=_checked(task_id), call=call), call)
        self._parts.waiting.notify(task_id)
        audit.info("deleted %s for %s", shorten(task_id), _whose(call))

    def handle(self, task: Task) -> TaskHandle:
        """Take a task in hand that this store created; at most one handle a task writes.

        Raises:
            ValueError: The task was found by a repeated create, so another call runs it; or it is external.
            LeaseLostError: This process does not hold the task: it is another's, finished, or was lost.
        """
        payload.check_type(task, Task, "task")
        parts = self._parts
        if task.existing:
            raise ValueError(f"Task {shorten(task.task_id)} existed before this create; whoever created it runs it.")
        if task.owner_kind is OwnerKind.EXTERNAL:
            raise ValueError(
                f"Task {shorten(task.task_id)} is external; use operator.handle() where its outcome is known."
            )
        fence = parts.held.get(task.task_id)
        if fence is None:
            raise LeaseLostError(task.task_id)
        handle = parts.handles.get(task.task_id)
        if handle is None:
            handle = parts.handles[task.task_id] = TaskHandle(parts, task, fence)
        return handle

    async def claim_task(self, names: Collection[str], *, timeout: timedelta = timedelta(0)) -> Claim | None:
        """Take a queued task in hand: one that was parked and is answered, or whose process died or stopped.

        Of the tasks of this store's ``server``, the one that was created first. Each is claimed once, whoever asks.

        Args:
            names: Which tools the caller can run; a task without a name goes by its method.
            timeout: How long to wait for one.

        Returns:
            The task and what its next run needs; take it in hand with ``handle(claim.task)``. None: there was none.

        Raises:
            RuntimeError: This store is an observer, and runs nothing.
        """
        payload.check_type(names, Collection, "names")
        if isinstance(names, str):  # a collection of strings too: its letters
            raise TypeError("names must be a collection of str, not str.")
        for name in names:
            payload.check_type(name, str, "each of names")
        payload.check_type(timeout, timedelta, "timeout")
        parts, loop = self._parts, asyncio.get_running_loop()
        if not parts.writer:
            raise RuntimeError("An observer runs nothing; claim tasks with a store from TaskStore.open().")
        ends = loop.time() + timeout.total_seconds()
        with parts.waiting.waiter_for_work() as waiter:
            while True:
                waiter.watch()
                claim = await _claim_one(parts, frozenset(names))
                left = ends - loop.time()
                if claim is not None or left <= 0:
                    return claim
                # What another process queues is found by asking again.
                await waiter.wait(min(left, _CLAIM_INTERVAL.total_seconds()))

    async def recover(self) -> RecoveryReport:
        """Decide over the live tasks of dead processes; opening did it, and the upkeep goes on doing it."""
        return await asyncio.to_thread(self._parts.recover)

    async def sweep(self) -> SweepReport:
        """Delete expired tasks; the upkeep does it too, and no read depends on it."""
        return await asyncio.to_thread(self._parts.recovery.sweep)

    def _ttl_ms(self, ttl: timedelta | Default | None) -> int | None:
        options = self._parts.options
        payload.check_type(ttl, timedelta | Default | None, "ttl")
        asked = options.default_ttl if isinstance(ttl, Default) else ttl
        if options.max_ttl is not None:
            asked = options.max_ttl if asked is None else min(asked, options.max_ttl)
        return None if asked is None else rows.span_ms("ttl", asked)


class OperatorView:
    """What the operator of a server may see and do: every task, whoever's it is. No adapter reaches it."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    async def get_task(self, task_id: str) -> Task:
        """Read any task."""
        return await _get_task(self._parts, task_id, self._parts.operator_call())

    async def get_details(self, task_id: str) -> TaskDetails:
        """Read any task, its outcome and its open questions, in one snapshot."""
        return await _get_details(self._parts, task_id, self._parts.operator_call())

    async def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        name: str | None = None,
        server: str | None = None,
        session_id: str | None = None,
        owner: AuthContext | None | Default = DEFAULT,
        cursor: str | None = None,
        limit: int = 100,
    ) -> TaskPage:
        """List every task, newest first; arguments and errors are those of ``TaskStore.list_tasks``.

        Args:
            owner: Only the tasks of this auth context; None: only those that have none.
        """
        payload.check_type(owner, AuthContext | Default | None, "owner")
        filters = {
            "owner": None if isinstance(owner, Default) else self._parts.binding.auth_key(owner),
            "status": None if status is None else TaskStatus(status),
            "name": None if name is None else payload.check_text(name, "$.name"),
            "server": None if server is None else payload.check_text(server, "$.server"),
            "session_digest": _session_digest(self._parts, session_id),
        }
        return await _list_tasks(self._parts, self._parts.operator_call(), filters, cursor, limit)

    async def list_events(self, task_id: str, *, after: int = 0) -> list[TaskEvent]:
        """List any task's state changes after a version, oldest first."""
        return await _list_events(self._parts, task_id, self._parts.operator_call(), after)

    async def handle(self, task_id: str) -> TaskHandle:
        """Take an external task in hand, in whatever process its outcome is known.

        Raises:
            ValueError: The task is not external; its own process holds it.
        """
        parts = self._parts
        task = await _get_task(parts, task_id, parts.operator_call())
        if task.owner_kind is not OwnerKind.EXTERNAL:
            raise ValueError(f"Task {shorten(task_id)} is not external; the server that runs it reports its outcome.")
        return TaskHandle(parts, task, Fence(task_id, "", task.attempt))

    async def cancel_task(self, task_id: str) -> Task:
        """Cancel any live task.

        Raises:
            TaskFinishedError: The task is finished already; carries the record that stands.
        """
        return await _cancel_task(self._parts, task_id, self._parts.operator_call())

    async def import_task(self, details: TaskDetails, *, owner: AuthContext | None) -> Task:
        """Take over a task that was kept elsewhere, with its id, its times, its status and its outcome.

        One that is still live fails with CRASH_RECOVERY: no process runs it, and its record lacks what another run
        would need; open questions are left behind with it.

        Args:
            owner: Whose it is from now on.

        Returns:
            The task as it is stored; ``existing`` when it was there already, which can be repeated.

        Raises:
            ValueError: The record contradicts itself, or its id can be none of ours.
            TaskExistsError: The id is that of another task.
            PayloadError: The outcome or a text cannot be stored.
        """
        payload.check_type(details, TaskDetails, "details")
        payload.check_type(owner, AuthContext | None, "owner")
        parts = self._parts
        call = parts.operator_call()
        values = rows.imported(details, call) | {"auth_key": parts.binding.auth_key(owner)}
        unit = partial(operations.import_task, values=values, outcome=details.outcome, call=call)
        task = await parts.write_unit(unit, call)
        if not task.existing:
            audit.info("imported %s for %s", shorten(task.task_id), values["auth_key"][:12] or "no auth context")
        return task

    async def rotate_keys(self) -> RotationReport:
        """Seal every payload under the first of ``StoreOptions.keys``; servers may work on meanwhile.

        Once every server has the new key first, and this has run, an old key can go.

        Raises:
            CipherError: A payload opens with none of the keys; what came before it is done, and a second run goes on.
        """
        return await asyncio.to_thread(self._parts.recovery.rotate_keys)

    async def health(self) -> Health:
        """Count the store's tasks and instances; reads every row, so it is for people and slow probes."""
        parts = self._parts

        def look(transaction: Transaction) -> tuple[Row, list[Row], list[Row]]:
            counts = transaction.row(statements.COUNTS, {"now": parts.clock.now()})
            assert counts is not None, "an aggregate without GROUP BY has one row"
            return counts, transaction.rows(statements.HELD_BY, {}), read_instances(transaction)

        revision = await parts.database.read_soon(parts.database.read_revision)
        counts, held_by, instances = await parts.read_unit(look, snapshot=True)
        verdicts = Judge(parts.clock, parts.database.lock_path).judge(instances)
        return Health(
            database=parts.database.label,
            revision=revision or "",
            orphans=sum(
                row["held"] for row in held_by if verdicts.get(row["instance_id"], Verdict.DEAD) is Verdict.DEAD
            ),
            instances=sum(verdict is not Verdict.DEAD for verdict in verdicts.values()),
            failing=parts.scheduler.failing,
            **counts,
        )


# --- what TaskStore and OperatorView share; they differ in who reads


async def _get_task(parts: _Parts, task_id: str, call: Call) -> Task:
    parts.rate.count(call)
    return await _read_task(parts, task_id, call)


async def _read_task(parts: _Parts, task_id: str, call: Call) -> Task:
    unit = partial(operations.get_task, task_id=_checked(task_id), call=call)
    task = await parts.read_row(unit, call)
    return await parts.read_row(unit, call) if await _end_due(parts, call, task) else task


async def _read_details(parts: _Parts, task_id: str, call: Call) -> TaskDetails:
    unit = partial(operations.get_details, task_id=_checked(task_id), call=call)

    async def read() -> TaskDetails:
        details = await parts.read_row(unit, call)
        # One statement is a snapshot by itself; the questions of a task that waits for input take a second one.
        if details.task.status is TaskStatus.INPUT_REQUIRED:
            details = await parts.read_row(unit, call, snapshot=True)
        return details

    details = await read()
    return await read() if await _end_due(parts, call, details.task) else details


async def _end_due(parts: _Parts, call: Call, *tasks: Task) -> bool:
    """End those of the tasks whose ttl has passed and that nothing keeps; tell whether there were any."""
    due = [task.task_id for task in tasks if operations.is_due(task, call)]
    for task_id in due:
        await parts.write_unit(partial(operations.end_if_due, task_id=task_id, call=call), call)
        parts.waiting.notify(task_id)
    return bool(due)


async def _claim_one(parts: _Parts, names: frozenset[str]) -> Claim | None:
    call, after = parts.operator_call(), None
    while True:
        unit = partial(operations.list_queued, server=parts.options.server, after=after, limit=_QUEUE_PAGE, call=call)
        page = await parts.read_unit(unit)
        for queued in page:
            if queued.name in names and (claim := await _claim(parts, queued.task_id)) is not None:
                return claim
        if len(page) < _QUEUE_PAGE:
            return None
        after = page[-1]


async def _claim(parts: _Parts, task_id: str) -> Claim | None:
    await parts.beat_if_late()
    instance_id, call = parts.writer, parts.operator_call()
    unit = partial(operations.claim_task, task_id=task_id, instance_id=instance_id, call=call)
    with parts.taking(task_id):
        claim = await parts.take(unit, undo=parts.unclaim)
        if claim is not None:
            parts.held[task_id] = Fence(task_id, instance_id, claim.task.attempt)
    if claim is not None:
        parts.waiting.notify(task_id)
        audit.info("claimed %s", shorten(task_id))
    return claim


async def _get_details(parts: _Parts, task_id: str, call: Call) -> TaskDetails:
    parts.rate.count(call)
    details = await _read_details(parts, task_id, call)
    if details.outcome is not None:
        audit.info("outcome of %s read by %s", shorten(task_id), _whose(call))
    return details


async def _list_events(parts: _Parts, task_id: str, call: Call, after: int) -> list[TaskEvent]:
    payload.check_type(after, int, "after")
    await _read_task(parts, task_id, call)
    # PostgreSQL and SQLite have no integer beyond; before and after all versions everything is the same.
    within = max(0, min(after, rows.LAST_VERSION))
    unit = partial(operations.list_events, task_id=task_id, call=call, after=within)
    return await parts.read_unit(unit, call, snapshot=True)


async def _cancel_task(parts: _Parts, task_id: str, call: Call) -> Task:
    unit = partial(
        operations.cancel_task,
        task_id=_checked(task_id),
        call=call,
        message=parts.rules.cipher.seal(payload.encode(_CANCELLED), "tasks", "status_message", task_id),
    )
    task = await parts.write_unit(unit, call)
    handle = parts.handles.get(task_id)
    if handle is not None:
        handle.stop_work()
    parts.held.pop(task_id, None)
    parts.waiting.notify(task_id)
    audit.info("cancelled %s for %s", shorten(task_id), _whose(call))
    return task


async def _list_tasks(
    parts: _Parts, call: Call, filters: Mapping[str, str | None], cursor: str | None, limit: int
) -> TaskPage:
    _check_page(cursor, limit, parts.rules.limits)
    parts.rate.count(call)
    scope = json.dumps([call.auth_key, filters])
    unit = partial(
        operations.list_tasks,
        call=call,
        filters=filters,
        before=None if cursor is None else _position(parts.binding, cursor, scope),
        limit=limit + 1,  # one more than the page tells whether there is another one
    )
    found = await parts.read_unit(unit, call)
    while await _end_due(parts, call, *found):  # those that come up in their place may be due too
        found = await parts.read_unit(unit, call)
    tasks = tuple(found[:limit])
    if len(found) <= limit:
        return TaskPage(tasks=tasks, next_cursor=None)
    position = f"{operations.milliseconds(tasks[-1].created_at)} {tasks[-1].task_id}"
    return TaskPage(tasks=tasks, next_cursor=parts.binding.seal_cursor(position, scope))


def _position(binding: Binding, cursor: str, scope: str) -> tuple[int, str]:
    position = binding.open_cursor(cursor, scope)
    if position is None:
        raise InvalidCursorError()
    created_at, task_id = position.split(" ")
    return int(created_at), task_id


def _idempotency(binding: Binding, auth: AuthContext, key: str, values: Row) -> Row:
    # By the value, not by its bytes: the order of the keys makes no other request.
    request = payload.canonical(values["request"])
    return {
        "idempotency_digest": binding.idempotency_digest(binding.auth_key(auth), key),
        "request_digest": binding.request_digest(values["method"], values["name"], request),
    }


def _check_page(cursor: str | None, limit: int, limits: Limits) -> None:
    payload.check_type(cursor, str | None, "cursor")
    payload.check_type(limit, int, "limit")
    if not 1 <= limit <= limits.page_size:
        raise ValueError(f"limit must be 1 to {limits.page_size}, not {limit}.")


def _checked(task_id: str, what: str = "task_id") -> str:
    """Let nothing through to the database that cannot be an id of ours, such as text with a NUL."""
    payload.check_type(task_id, str, what)
    if not (task_id.isascii() and task_id.isprintable() and len(task_id) <= rows.LONGEST_ID):
        raise TaskNotFoundError(task_id)
    return task_id


def _session_digest(parts: _Parts, session_id: str | None) -> str | None:
    payload.check_type(session_id, str | None, "session_id")
    return None if session_id is None else parts.binding.session_digest(session_id)


def _value(value: T | Refused, call: Call | None) -> T:
    if isinstance(value, Refused):
        audit.info("refused %s: %s", "a tool" if call is None else _whose(call), value.error)
        raise value.error
    return value


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _whose(call: Call) -> str:
    return "the operator" if call.auth_key is None else call.auth_key[:12] or "no auth context"


# --- opening


def _open(url: str, options: StoreOptions, *, observer: bool = False, binds: bool = False) -> _Parts:
    """Compose a store. An observer reads and decides, but is no instance: it runs nothing and migrates nothing."""
    payload.check_type(options, StoreOptions, "options")
    database = Database(
        url,
        durability=options.durability,
        journal=options.journal,
        prefix=options.table_prefix,
        schema=options.schema,
        observer=observer,
    )
    parts = None
    try:
        may_migrate = database.name == "sqlite" if options.migrate is None else options.migrate
        if may_migrate and not observer and migrate.needs_upgrade(database):
            migrate.upgrade_database(database)
        migrate.check(database)
        parts = _Parts(database, options, observer=observer and not binds)
        if not observer:
            parts.start()
    except BaseException:
        database.close() if parts is None else parts.close()
        raise
    return parts


def _close_unwanted(opening: "asyncio.Future[_Parts]") -> None:
    """Close a store whose opener was cancelled; on a thread, since the loop may be about to end."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="taskstore-close").start()


@asynccontextmanager
async def open_observer(
    url: str, *, options: StoreOptions | None = None, binds: bool = False
) -> AsyncIterator[TaskStore]:
    """Open a store to look at it and to operate it, beside the servers that use it; it leaves no trace.

    Args:
        binds: Whether tasks will be bound, for which the secret must be settled if no server has done it yet.
    """
    parts = await asyncio.to_thread(partial(_open, url, options or StoreOptions(), observer=True, binds=binds))
    try:
        yield TaskStore(parts)
    finally:
        await asyncio.to_thread(parts.close)


def _open_bindings(database: Database, options: StoreOptions, *, observer: bool) -> tuple[Binding, list[Binding]]:
    """Bind the store under its secret; the first store to open decides which one that is, and never an observer.

    Returns:
        The binding under the present secret, and those under the earlier ones that the options list.
    """

    def settled(name: str, proposed: bytes) -> bytes:
        known = database.read(partial(_meta, name=name)).result()
        if known is None and not observer:
            known = database.write(partial(_settled, name=name, value=proposed)).result()
        return proposed if known is None else known

    store_secret = settled("store_secret", secrets.token_bytes(32))
    secret = options.binding_secret
    binding, *former = (
        Binding(store_secret if each is None else each) for each in (secret, *options.old_binding_secrets)
    )
    fingerprint = binding.fingerprint.encode()
    known = settled(_FINGERPRINT, fingerprint)
    if known == fingerprint:
        return binding, former
    if known not in [each.fingerprint.encode() for each in former]:
        raise BindingError(database.label, has_secret=secret is not None)
    if not observer:
        # From here on nobody can open the store under the old secret alone, and miss what is bound under the new one.
        params = {"name": _FINGERPRINT, "known": known, "value": fingerprint}
        database.write(lambda transaction: transaction.execute(statements.CHANGE_META, params)).result()
    return binding, former


def _meta(transaction: Transaction, name: str) -> bytes | None:
    row = transaction.row(statements.META, {"name": name})
    return None if row is None else bytes(row["value"])


def _settled(transaction: Transaction, name: str, value: bytes) -> bytes:
    """Write a value unless there is one; return the one that stands."""
    transaction.execute(statements.SET_META_ONCE, {"name": name, "value": value})
    settled = _meta(transaction, name)
    assert settled is not None, "it was there, or has just been written"
    return settled
