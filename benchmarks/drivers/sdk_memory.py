"""The peer: the in-memory task store of the official SDK 1.x, a dict. Runs in an environment of its own.

A flow is the fewest calls of its interface: ``create_task``, ``get_task``, ``update_task`` with a message (there is no
progress), ``store_result`` and ``update_task`` to completed, ``get_result``. It keeps no request and knows no owner.
``create_task``, ``get_task`` and ``list_tasks`` look through every task that is kept for those that are expired, so a
flow's time grows with their number. Tasks live an hour here.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcp.shared.experimental.tasks.in_memory_task_store import (  # type: ignore[import-not-found]
    InMemoryTaskStore,
    StoredTask,
)
from mcp.types import CallToolResult, TaskMetadata, TextContent

from benchmarks.work import PROGRESS_TEXT, RESULT_TEXT, Driver

_TTL = TaskMetadata(ttl=3_600_000)


class _SdkDriver(Driver[str]):
    def __init__(self) -> None:
        self._store = InMemoryTaskStore(page_size=50)

    async def create(self, client: int) -> str:
        task = await self._store.create_task(_TTL)
        return str(task.taskId)

    async def get(self, held: str) -> None:
        if await self._store.get_task(held) is None:
            raise LookupError(held)

    async def progress(self, held: str) -> None:
        await self._store.update_task(held, status_message=PROGRESS_TEXT)

    async def complete(self, held: str) -> None:
        await self._store.store_result(held, CallToolResult(content=[TextContent(type="text", text=RESULT_TEXT)]))
        await self._store.update_task(held, status="completed")

    async def outcome(self, held: str) -> str:
        result = await self._store.get_result(held)
        if result is None:
            raise LookupError(held)
        return str(result.content[0].text)

    async def keep(self, tasks: int) -> None:
        # Through create_task the time would grow with the square of the number.
        held = self._store._tasks[await self.create(client=0)]
        for number in range(tasks - 1):
            task_id = f"kept-{number}"
            task = held.task.model_copy(update={"taskId": task_id, "status": "completed"})
            self._store._tasks[task_id] = StoredTask(task, expires_at=held.expires_at)

    async def page(self) -> int:
        tasks, _ = await self._store.list_tasks()
        return len(tasks)


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[str]]:
    """Make an empty store; neither argument means anything to it."""
    yield _SdkDriver()
