"""Two stores on one database, a clock moved by hand, and processes that die."""

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
from sqlalchemy import bindparam, text

from taskstore import AuthContext, StoreOptions, Task, TaskStore
from taskstore.testing import ManualClock

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")

OpenStore = Callable[..., Awaitable[TaskStore]]
Crash = Callable[[TaskStore], None]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def open_store(database_url: str, clock: ManualClock) -> AsyncIterator[OpenStore]:
    """Open as many stores on one database as a test wants; without upkeep, unless it asks for it."""
    async with AsyncExitStack() as stack:

        async def open_one(**settings: object) -> TaskStore:
            options = StoreOptions(**{"clock": clock, "upkeep": False, **settings})  # type: ignore[arg-type]
            return await stack.enter_async_context(TaskStore.open(database_url, options=options))

        yield open_one


@pytest.fixture
async def store(open_store: OpenStore) -> TaskStore:
    return await open_store()


@pytest.fixture
async def peer(open_store: OpenStore, store: TaskStore) -> TaskStore:
    """A second store on the same database, opened after ``store``."""
    return await open_store()


@pytest.fixture(scope="session")
def dead_pid() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def crash(dead_pid: int) -> Crash:
    """Make a store's process look dead to all others, while its coroutines run on."""
    died = text("UPDATE taskstore_instances SET pid = :pid, process_start = 1 WHERE instance_id = :id").bindparams(
        bindparam("pid"), bindparam("id")
    )

    def crash_one(store: TaskStore) -> None:
        parts = store._parts
        touched = parts.database.write(
            lambda transaction: transaction.execute(died, {"pid": dead_pid, "id": parts.writer})
        ).result()
        assert touched == 1

    return crash_one


@pytest.fixture
def finish() -> Callable[..., Awaitable[Task]]:
    """Create a task and complete it."""

    async def finish_one(store: TaskStore, result: object = None, **create: object) -> Task:
        task = await store.create_task(**{"auth": ALICE, **create})  # type: ignore[arg-type]
        return await store.handle(task).complete(result or {"ok": True})  # type: ignore[arg-type]

    return finish_one


MINUTE = timedelta(minutes=1)
