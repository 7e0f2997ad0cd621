"""taskstore itself, through its public API and with its default settings but for durability.

A flow is ``create_task``, ``get_task``, ``TaskHandle.progress``, ``TaskHandle.complete``, ``get_details``: three
transactions (each writes its event too, but for progress) and two reads. Every client has an auth context of its own.
Upkeep and heartbeat run as they do in a server. The handle is used bare: ``async with`` would add a watch for
cancellation by other processes, which no peer has.
"""

import asyncio
import json
import random
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.drivers.filling import copy_task, id_of_copy, size_mib
from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver
from taskstore import AuthContext, StoreOptions, TaskHandle, TaskStore

if TYPE_CHECKING:
    from benchmarks.drivers.tools import Tools

WAITER = AuthContext(issuer="benchmarks", subject="waiter")


@dataclass(frozen=True, slots=True)
class _Held:
    """A task's handle, and whose it is."""

    handle: TaskHandle
    auth: AuthContext


class _Waker:
    """Another process with a store on the same database, which completes tasks when it is told to."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._talking = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def start(cls, place: str, durability: str) -> AsyncIterator["_Waker"]:
        command = (sys.executable, "-m", "benchmarks.waker", place, durability)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            yield cls(process)
        finally:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()  # the end of its input ends it
            await process.wait()

    def kill(self) -> None:
        """Let it die with SIGKILL, or what there is like it."""
        self._process.kill()

    async def tell(self, order: str) -> str:
        """Give an order and return the answer."""
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        async with self._talking:
            self._process.stdin.write(f"{order}\n".encode())
            return (await self._process.stdout.readline()).decode().strip()


class _OursDriver(Driver[_Held]):
    def __init__(self, store: TaskStore, place: str, durability: str, stack: AsyncExitStack) -> None:
        self._store, self._place, self._durability, self._stack = store, place, durability, stack
        self._kept, self._copies = "", 0
        # Made when a scenario first needs them.
        self._waker: asyncio.Task[_Waker] | None = None
        self._tools: Tools | None = None

    async def create(self, client: int) -> _Held:
        auth = _client(client)
        task = await self._store.create_task(auth=auth, name="report", request={"topic": REQUEST_TEXT})
        return _Held(self._store.handle(task), auth)

    async def get(self, held: _Held) -> None:
        await self._store.get_task(held.handle.task_id, auth=held.auth)

    async def progress(self, held: _Held) -> None:
        await held.handle.progress(3, total=10, message=PROGRESS_TEXT)

    async def complete(self, held: _Held) -> None:
        await held.handle.complete({"text": RESULT_TEXT})

    async def outcome(self, held: _Held) -> str:
        details = await self._store.get_details(held.handle.task_id, auth=held.auth)
        if details.outcome is None or not isinstance(details.outcome.result, dict):
            raise LookupError(f"The task is {details.task.status}.")
        return str(details.outcome.result["text"])

    async def completed_elsewhere(self) -> list[float]:
        if self._waker is None:
            started = self._stack.enter_async_context(_Waker.start(self._place, self._durability))
            self._waker = asyncio.ensure_future(started)
        waker = await asyncio.shield(self._waker)
        task_id = await waker.tell("create")
        waiter = asyncio.create_task(self._woken(task_id))
        # It waits by then, and the completion meets each moment between two looks of its equally often.
        await asyncio.sleep(random.uniform(0.05, 0.15))
        completing = float(await waker.tell(f"complete {task_id}"))
        return [completing, await waiter]

    async def cancel(self, held: _Held) -> None:
        await self._store.cancel_task(held.handle.task_id, auth=held.auth)

    async def keep(self, tasks: int) -> None:
        owners = "CASE i % 10 WHEN 0 THEN auth_key ELSE auth_key || (i % 10) END"
        self._kept, self._copies = await self._copy_completed(tasks - 1, {"auth_key": owners}), tasks - 1

    async def get_kept(self) -> None:
        number = 10 * random.randint(0, self._copies // 10)
        await self._store.get_task(id_of_copy(self._kept, number) if number else self._kept, auth=_client(0))

    async def page(self) -> int:
        return len((await self._store.list_tasks(auth=_client(0), limit=50)).tasks)

    async def file_mib(self) -> float:
        return await asyncio.to_thread(size_mib, url_of(self._place))

    async def expire(self, tasks: int) -> None:
        await self._copy_completed(tasks, {"expires_at": "created_at"})

    async def _copy_completed(self, copies: int, changes: dict[str, str]) -> str:
        held = await self.create(client=0)
        await self.complete(held)
        await asyncio.to_thread(copy_task, url_of(self._place), held.handle.task_id, copies, changes)
        return held.handle.task_id

    async def sweep(self) -> int:
        return (await self._store.sweep()).deleted

    async def recover(self) -> None:
        await self._store.recover()

    async def orphan(self, tasks: int) -> None:
        async with _Waker.start(self._place, self._durability) as process:
            task_id = await process.tell("create")
            process.kill()
        await asyncio.to_thread(copy_task, url_of(self._place), task_id, tasks - 1, {"progress": "i % 10"})

    async def restarted(self) -> list[float]:
        command = (sys.executable, "-m", "benchmarks.restart", self._place, self._durability)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        said, _ = await process.communicate()
        if process.returncode:
            raise ChildProcessError(f"The restarted process ended with {process.returncode}.")
        answer = json.loads(said)
        self.figures |= answer["figures"]
        return [float(instant) for instant in answer["instants"]]

    async def tools_called(self) -> list[float]:
        if self._tools is None:
            # The store's own requirements do not bring an SDK.
            from benchmarks.drivers.tools import Tools

            self._tools = await self._stack.enter_async_context(Tools.connect(self._store))
        return await self._tools.call()

    async def _woken(self, task_id: str) -> float:
        await self._store.wait_for_task(task_id, auth=WAITER)
        return perf_counter()


@asynccontextmanager
async def open_driver(place: str, durability: str, *, upkeep: bool = True) -> AsyncIterator[Driver[_Held]]:
    """Open a store.

    Args:
        place: Path of an SQLite file, or URL of a database.
        durability: ``full`` or ``normal``.
        upkeep: As in ``StoreOptions``.
    """
    options = replace(options_of(durability), upkeep=upkeep)
    async with TaskStore.open(url_of(place), options=options) as store, AsyncExitStack() as stack:
        yield _OursDriver(store, place, durability, stack)


def _client(number: int) -> AuthContext:
    return AuthContext(issuer="benchmarks", subject=f"client-{number}")


def url_of(place: str) -> str:
    """Give the URL of a database: the place of an SQLite file is its path."""
    return place if "://" in place else f"sqlite:///{place}"


def options_of(durability: str) -> StoreOptions:
    """Give the settings that are measured: all defaults but for durability."""
    if durability not in ("full", "normal"):
        raise ValueError(f"durability must be 'full' or 'normal', not {durability!r}.")
    return StoreOptions(durability="full" if durability == "full" else "normal", migrate=True)
