"""taskstore itself, through its public API and with its default settings but for durability.

A flow is ``create_task``, ``get_task``, ``TaskHandle.progress``, ``TaskHandle.complete``, ``get_details``: three
transactions (each writes its event too, but for progress) and two reads. Every client has an auth context of its own.
Upkeep and heartbeat run as they do in a server. The handle is used bare: ``async with`` would add a watch for
cancellation by other processes, which no peer has.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver
from taskstore import AuthContext, StoreOptions, TaskHandle, TaskStore


@dataclass(frozen=True, slots=True)
class _Held:
    """A task's handle, and whose it is."""

    handle: TaskHandle
    auth: AuthContext


class _OursDriver(Driver[_Held]):
    def __init__(self, store: TaskStore) -> None:
        self._store = store

    async def create(self, client: int) -> _Held:
        auth = AuthContext(issuer="benchmarks", subject=f"client-{client}")
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


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[_Held]]:
    """Open a store.

    Args:
        place: Path of an SQLite file, or URL of a database.
        durability: ``full`` or ``normal``.
    """
    if durability not in ("full", "normal"):
        raise ValueError(f"durability must be 'full' or 'normal', not {durability!r}.")
    options = StoreOptions(durability="full" if durability == "full" else "normal", migrate=True)
    async with TaskStore.open(place if "://" in place else f"sqlite:///{place}", options=options) as store:
        yield _OursDriver(store)
