"""One JSON file a task, as a durable store is often begun: what the disk allows without a database.

Each write makes the whole file anew beside the old one, flushes it, renames it over the old one and flushes the folder;
without the last, a power loss could undo the rename. A flow is write, read, read and write, read and write, read. It
runs in threads, so that no client waits for another one's disk. Nothing else is done: no checks, no history, no list,
no expiry, and two processes that change one task would overwrite each other.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from time import time_ns

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver


class _FilesystemDriver(Driver[str]):
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    async def create(self, client: int) -> str:
        task_id, now = token_hex(16), _now_ms()
        task = {
            "task_id": task_id,
            "owner": f"client-{client}",
            "name": "report",
            "status": "working",
            "created_at": now,
            "last_updated_at": now,
            "request": {"topic": REQUEST_TEXT},
        }
        await asyncio.to_thread(self._write, task_id, task)
        return task_id

    async def get(self, held: str) -> None:
        await asyncio.to_thread(self._read, held)

    async def progress(self, held: str) -> None:
        await asyncio.to_thread(self._update, held, progress=0.3, status_message=PROGRESS_TEXT)

    async def complete(self, held: str) -> None:
        await asyncio.to_thread(self._update, held, status="completed", result={"text": RESULT_TEXT})

    async def outcome(self, held: str) -> str:
        task = await asyncio.to_thread(self._read, held)
        if task["status"] != "completed" or not isinstance(task["result"], dict):
            raise LookupError(f"The task is {task['status']}.")
        return str(task["result"]["text"])

    def _update(self, task_id: str, **changes: object) -> None:
        self._write(task_id, {**self._read(task_id), **changes, "last_updated_at": _now_ms()})

    def _read(self, task_id: str) -> dict[str, object]:
        try:
            task: dict[str, object] = json.loads((self._folder / f"{task_id}.json").read_bytes())
        except FileNotFoundError as error:
            raise LookupError(task_id) from error
        return task

    def _write(self, task_id: str, task: dict[str, object]) -> None:
        path = self._folder / f"{task_id}.json"
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(json.dumps(task).encode())
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[str]]:
    """Make the folder ``place``; ``durability`` is always ``full`` here."""
    yield _FilesystemDriver(Path(place))


def _now_ms() -> int:
    return time_ns() // 1_000_000
