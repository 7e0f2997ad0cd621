"""SyncTaskStore: the same store, blocking, for plain scripts and for threads.

Every call is the call of the same name on a ``TaskStore`` that lives on an event loop in a thread of its own; so no
rule stands here, and arguments, results and errors are those written there.
"""

import asyncio
import sys
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

from pydantic import JsonValue

from taskstore.binding import AuthContext
from taskstore.errors import DatabaseUnavailableError
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.store import DEFAULT, Default, OperatorView, TaskStore
from taskstore.task import (
    Claim,
    Health,
    OnCrash,
    Outcome,
    RecoveryReport,
    RotationReport,
    SweepReport,
    Task,
    TaskDetails,
    TaskEvent,
    TaskPage,
    TaskStatus,
)

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own, to which any thread may hand coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a script that ends without closing its store must not hang.
        self._thread = threading.Thread(target=self._loop.run_forever, name="taskstore-sync", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine there and wait for it.

        Raises:
            RuntimeError: This thread runs an event loop, which would stand still meanwhile.
            DatabaseUnavailableError: The store is closed.
        """
        if _runs_a_loop():
            work.close()
            raise RuntimeError(
                "SyncTaskStore blocks, and was called inside a coroutine; use TaskStore there, "
                "or call it through asyncio.to_thread()."
            )
        if self._loop.is_closed() or sys.is_finalizing():  # at interpreter exit the loop's thread runs no more
            work.close()
            raise DatabaseUnavailableError("The store is closed; open it again with SyncTaskStore.open().")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if sys.is_finalizing():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class SyncTaskHandle:
    """See ``TaskHandle``. As a context manager it fails the task when the block raises."""

    def __init__(self, loop: _Loop, handle: TaskHandle) -> None:
        self._loop, self._handle = loop, handle

    @property
    def task_id(self) -> str:
        """The task's id."""
        return self._handle.task_id

    @property
    def cancel_requested(self) -> bool:
        """See ``TaskHandle.cancel_requested``."""
        return self._handle.cancel_requested

    def wait_cancelled(self) -> None:
        """See ``TaskHandle.wait_cancelled``."""
        self._loop.run(self._handle.wait_cancelled())

    def progress(self, value: float | None, total: float | None = None, message: str | None = None) -> None:
        """See ``TaskHandle.progress``."""
        self._loop.run(self._handle.progress(value, total, message))

    def ask(self, requests: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        """See ``TaskHandle.ask``."""
        return self._loop.run(self._handle.ask(requests))

    def park(self, requests: Mapping[str, JsonValue], *, state: JsonValue = None) -> Task:
        """See ``TaskHandle.park``."""
        return self._loop.run(self._handle.park(requests, state=state))

    def hand_over(self) -> Task:
        """See ``TaskHandle.hand_over``."""
        return self._loop.run(self._handle.hand_over())

    def complete(self, result: JsonValue | Mapping[str, JsonValue], *, is_error: bool = False) -> Task:
        """See ``TaskHandle.complete``."""
        return self._loop.run(self._handle.complete(result, is_error=is_error))

    def fail(self, message: str, *, code: int = -32603, data: JsonValue = None) -> Task:
        """See ``TaskHandle.fail``."""
        return self._loop.run(self._handle.fail(message, code=code, data=data))

    def __enter__(self) -> Self:
        self._loop.run(self._handle.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._handle.__aexit__(kind, error, trace))


class SyncTaskStore:
    """See ``TaskStore``; safe to share between threads."""

    def __init__(self, loop: _Loop, store: TaskStore) -> None:
        self._loop, self._store = loop, store
        self.operator = SyncOperatorView(loop, store.operator)

    @classmethod
    @contextmanager
    def open(cls, url: str, *, options: StoreOptions | None = None) -> Iterator["SyncTaskStore"]:
        """See ``TaskStore.open``."""
        loop = _Loop()
        try:
            opened = TaskStore.open(url, options=options)
            store = loop.run(opened.__aenter__())
            try:
                yield cls(loop, store)
            finally:
                with suppress(DatabaseUnavailableError):
                    loop.run(opened.__aexit__(None, None, None))
        finally:
            loop.close()

    def create_task(
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
        """See ``TaskStore.create_task``."""
        return self._loop.run(
            self._store.create_task(
                auth=auth,
                ttl=ttl,
                poll_interval=poll_interval,
                method=method,
                name=name,
                request=request,
                session_id=session_id,
                idempotency_key=idempotency_key,
                on_crash=on_crash,
                max_attempts=max_attempts,
                parent_task_id=parent_task_id,
                caller=caller,
            )
        )

    def get_task(self, task_id: str, *, auth: AuthContext | None) -> Task:
        """See ``TaskStore.get_task``."""
        return self._loop.run(self._store.get_task(task_id, auth=auth))

    def get_details(self, task_id: str, *, auth: AuthContext | None) -> TaskDetails:
        """See ``TaskStore.get_details``."""
        return self._loop.run(self._store.get_details(task_id, auth=auth))

    def get_outcome(self, task_id: str, *, auth: AuthContext | None) -> Outcome:
        """See ``TaskStore.get_outcome``."""
        return self._loop.run(self._store.get_outcome(task_id, auth=auth))

    def wait_for_task(
        self,
        task_id: str,
        *,
        auth: AuthContext | None,
        since_version: int | None = None,
        timeout: timedelta | None = None,
    ) -> Task:
        """See ``TaskStore.wait_for_task``."""
        waiting = self._store.wait_for_task(task_id, auth=auth, since_version=since_version, timeout=timeout)
        return self._loop.run(waiting)

    def list_tasks(
        self,
        *,
        auth: AuthContext | None,
        status: TaskStatus | None = None,
        cursor: str | None = None,
        limit: int = 100,
        session_id: str | None = None,
    ) -> TaskPage:
        """See ``TaskStore.list_tasks``."""
        listing = self._store.list_tasks(auth=auth, status=status, cursor=cursor, limit=limit, session_id=session_id)
        return self._loop.run(listing)

    def list_events(self, task_id: str, *, auth: AuthContext | None, after: int = 0) -> list[TaskEvent]:
        """See ``TaskStore.list_events``."""
        return self._loop.run(self._store.list_events(task_id, auth=auth, after=after))

    def cancel_task(self, task_id: str, *, auth: AuthContext | None) -> Task:
        """See ``TaskStore.cancel_task``."""
        return self._loop.run(self._store.cancel_task(task_id, auth=auth))

    def answer_inputs(self, task_id: str, responses: Mapping[str, JsonValue], *, auth: AuthContext | None) -> Task:
        """See ``TaskStore.answer_inputs``."""
        return self._loop.run(self._store.answer_inputs(task_id, responses, auth=auth))

    def delete_task(self, task_id: str, *, auth: AuthContext | None) -> None:
        """See ``TaskStore.delete_task``."""
        self._loop.run(self._store.delete_task(task_id, auth=auth))

    def handle(self, task: Task) -> SyncTaskHandle:
        """See ``TaskStore.handle``."""
        return SyncTaskHandle(self._loop, self._store.handle(task))

    def claim_task(self, names: Collection[str], *, timeout: timedelta = timedelta(0)) -> Claim | None:
        """See ``TaskStore.claim_task``."""
        return self._loop.run(self._store.claim_task(names, timeout=timeout))

    def recover(self) -> RecoveryReport:
        """See ``TaskStore.recover``."""
        return self._loop.run(self._store.recover())

    def sweep(self) -> SweepReport:
        """See ``TaskStore.sweep``."""
        return self._loop.run(self._store.sweep())


class SyncOperatorView:
    """See ``OperatorView``."""

    def __init__(self, loop: _Loop, operator: OperatorView) -> None:
        self._loop, self._operator = loop, operator

    def get_task(self, task_id: str) -> Task:
        """See ``OperatorView.get_task``."""
        return self._loop.run(self._operator.get_task(task_id))

    def get_details(self, task_id: str) -> TaskDetails:
        """See ``OperatorView.get_details``."""
        return self._loop.run(self._operator.get_details(task_id))

    def list_tasks(
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
        """See ``OperatorView.list_tasks``."""
        listing = self._operator.list_tasks(
            status=status, name=name, server=server, session_id=session_id, owner=owner, cursor=cursor, limit=limit
        )
        return self._loop.run(listing)

    def list_events(self, task_id: str, *, after: int = 0) -> list[TaskEvent]:
        """See ``OperatorView.list_events``."""
        return self._loop.run(self._operator.list_events(task_id, after=after))

    def handle(self, task_id: str) -> SyncTaskHandle:
        """See ``OperatorView.handle``."""
        return SyncTaskHandle(self._loop, self._loop.run(self._operator.handle(task_id)))

    def cancel_task(self, task_id: str) -> Task:
        """See ``OperatorView.cancel_task``."""
        return self._loop.run(self._operator.cancel_task(task_id))

    def import_task(self, details: TaskDetails, *, owner: AuthContext | None) -> Task:
        """See ``OperatorView.import_task``."""
        return self._loop.run(self._operator.import_task(details, owner=owner))

    def rotate_keys(self) -> RotationReport:
        """See ``OperatorView.rotate_keys``."""
        return self._loop.run(self._operator.rotate_keys())

    def health(self) -> Health:
        """See ``OperatorView.health``."""
        return self._loop.run(self._operator.health())
