"""The peer: pydocket on Redis, which fastmcp-tasks keeps its tasks in. Runs in an environment of its own.

There is no store to call: a task is a function that a worker runs. A flow is ``add``, ``get_execution``, the progress
that the running function reports (``increment`` and ``set_message``: there is no call for both), its return, and
``get_result``, which waits until the worker has stored the result; so completion is part of the last step. The worker
runs in this process, with room for every task, and starts with the first progress: where only creates or gets are
measured, tasks stay queued. Redis answers a command when it is on disk. Nobody owns a task here.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from docket import Docket, Execution, Progress, TaskKey, Worker  # type: ignore[import-not-found]

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver

_ROOM = 1000


@dataclass(slots=True)
class _Run:
    """The run of a task's function, as its caller steers it."""

    started: "asyncio.Future[Progress]" = field(default_factory=asyncio.Future)
    returns: "asyncio.Future[str]" = field(default_factory=asyncio.Future)


class _DocketDriver(Driver[Execution]):
    def __init__(self, docket: Docket, worker: Worker) -> None:
        self._docket, self._worker = docket, worker
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        self._working: asyncio.Task[None] | None = None

        async def report(topic: str, key: str = TaskKey(), progress: Progress = Progress()) -> str:
            run = self._runs[key]
            run.started.set_result(progress)
            return await run.returns

        docket.register(report)

    async def create(self, client: int) -> Execution:
        return await self._docket.add("report")(topic=REQUEST_TEXT)

    async def get(self, held: Execution) -> None:
        if await self._docket.get_execution(held.key) is None:
            raise LookupError(held.key)

    async def progress(self, held: Execution) -> None:
        if self._working is None:
            self._working = asyncio.create_task(self._worker.run_forever())
        progress = await self._runs[held.key].started
        await progress.increment(3)
        await progress.set_message(PROGRESS_TEXT)

    async def complete(self, held: Execution) -> None:
        self._runs[held.key].returns.set_result(RESULT_TEXT)

    async def outcome(self, held: Execution) -> str:
        text = str(await held.get_result())
        del self._runs[held.key]
        return text

    def abandon(self) -> None:
        """End the functions that still run, for which the worker would wait."""
        for run in self._runs.values():
            run.returns.cancel()


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[Execution]]:
    """Connect to Redis.

    Args:
        place: URL of the server.
        durability: ``full``, which the server was started with.
    """
    async with Docket(url=place) as docket, Worker(docket, concurrency=_ROOM) as worker:
        driver = _DocketDriver(docket, worker)
        try:
            yield driver
        finally:
            driver.abandon()
