"""What is measured: a task's life in five steps, the same for every backend, and the scenarios made of them.

Standard library only: peers run it in environments of their own.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from benchmarks.machine import resident_mib

_SENTENCE = "Render the quarterly report, page by page, and say how far you are. "


def text_of(length: int) -> str:
    """Write readable ASCII text of ``length`` characters."""
    return (_SENTENCE * (length // len(_SENTENCE) + 1))[:length]


# With the few bytes of JSON around them: a request of 600 bytes and a result of 1 KiB.
REQUEST_TEXT = text_of(600 - len('{"topic":""}'))
RESULT_TEXT = text_of(1024 - len('{"text":""}'))
PROGRESS_TEXT = "rendering page 3 of 10"

Held = TypeVar("Held")


class Driver(ABC, Generic[Held]):
    """One open database of one backend, and the steps of a task's life in it.

    ``Held`` is what a caller holds of its task from one step to the next. Each step is durable when it returns, in
    the sense that the backend's description gives.

    """

    @cached_property
    def figures(self) -> dict[str, float]:
        """What a run showed beside times, by a name with its unit."""
        return {}

    @abstractmethod
    async def create(self, client: int) -> Held:
        """Store a new task with REQUEST_TEXT, which belongs to this client."""

    @abstractmethod
    async def get(self, held: Held) -> None:
        """Read the task as its owner would poll it.

        Raises:
            LookupError: It is not there.
        """

    @abstractmethod
    async def progress(self, held: Held) -> None:
        """Store that 3 of 10 parts are done, with PROGRESS_TEXT."""

    @abstractmethod
    async def complete(self, held: Held) -> None:
        """Store RESULT_TEXT and that the task is completed."""

    @abstractmethod
    async def outcome(self, held: Held) -> str:
        """Read the task with its result as its owner would, and return the result's text.

        Raises:
            LookupError: It is not there, or not completed.
        """

    async def completed_elsewhere(self) -> list[float]:
        """Wait for a task that another process completes; return the instants of its call and of the wake-up here.

        Raises:
            NotImplementedError: This store has no call that waits for another process.
        """
        raise NotImplementedError

    async def cancel(self, held: Held) -> None:
        """Store that the task is cancelled, as its owner.

        Raises:
            NotImplementedError: Tasks of this store are not cancelled.
        """
        raise NotImplementedError

    async def keep(self, tasks: int) -> None:
        """Have so many completed tasks kept; every tenth belongs to client 0.

        Raises:
            NotImplementedError: This backend is not measured with a size.
        """
        raise NotImplementedError

    async def get_kept(self) -> None:
        """Read one of client 0's kept tasks, drawn at random, as its owner would poll it.

        Raises:
            LookupError: It is not there.
        """
        raise NotImplementedError

    async def page(self) -> int:
        """List the 50 newest tasks of client 0; return how many there were."""
        raise NotImplementedError

    async def file_mib(self) -> float:
        """Tell how much the database takes on the disk."""
        raise NotImplementedError

    async def expire(self, tasks: int) -> None:
        """Have so many more completed tasks kept that have expired."""
        raise NotImplementedError

    async def sweep(self) -> int:
        """Delete what has expired; return how many tasks that were."""
        raise NotImplementedError

    async def recover(self) -> None:
        """Look for orphans, of which there are none."""
        raise NotImplementedError

    async def orphan(self, tasks: int) -> None:
        """Leave so many live tasks of a process that is dead.

        Raises:
            NotImplementedError: This store recovers nothing.
        """
        raise NotImplementedError

    async def restarted(self) -> list[float]:
        """Open the store in a new process; return the instants before that and when every orphan has its verdict.

        Raises:
            NotImplementedError: This store recovers nothing.
        """
        raise NotImplementedError

    async def tools_called(self) -> list[float]:
        """Call a plain tool, the same one as a task, and poll the task; return the instants around the three.

        Raises:
            NotImplementedError: This store serves no tools.
        """
        raise NotImplementedError


# One operation of a client; returns the instants (perf_counter) before, between and after its steps.
Operation = Callable[[int], Awaitable[list[float]]]


class Prepare(Protocol):
    """Makes a scenario's operation, and what it needs to find in the database."""

    def __call__(self, driver: Driver[Held], tasks: int, /) -> Awaitable[Operation]:
        """Prepare a database that is empty; ``tasks`` says of how many it shall hold the scenario's kind."""


async def prepare_flow(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure a task's life: create, get, progress, complete, get with the result."""

    async def flow(client: int) -> list[float]:
        at = [perf_counter()]
        held = await driver.create(client)
        at.append(perf_counter())
        await driver.get(held)
        at.append(perf_counter())
        await driver.progress(held)
        at.append(perf_counter())
        await driver.complete(held)
        at.append(perf_counter())
        text = await driver.outcome(held)
        at.append(perf_counter())
        if text != RESULT_TEXT:
            raise LookupError("The result that was read is not the one that was stored.")
        return at

    return flow


async def prepare_create(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure creates alone."""

    async def create(client: int) -> list[float]:
        start = perf_counter()
        await driver.create(client)
        return [start, perf_counter()]

    return create


async def prepare_get(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure gets by id, of 100 working tasks in turn."""
    tasks = cycle([await driver.create(client=0) for _ in range(100)])

    async def get(_client: int) -> list[float]:
        held = next(tasks)
        start = perf_counter()
        await driver.get(held)
        return [start, perf_counter()]

    return get


async def prepare_wait(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure how soon a waiter hears of what another process did, the write itself included.

    The pauses between are as long as they need to be for chance, so operations a second mean nothing here.
    """

    async def wait(_client: int) -> list[float]:
        return await driver.completed_elsewhere()

    return wait


async def prepare_adapter(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure what tools cost their client: a plain call, a call answered with a task's handle, and a poll."""
    await driver.tools_called()  # connects, here: an SDK's client is closed by the asyncio task that opened it

    async def call(_client: int) -> list[float]:
        return await driver.tools_called()

    return call


async def prepare_recover(driver: Driver[Held], tasks: int, /) -> Operation:
    """Measure a restart after a crash: from the opening of the store to an honest verdict for every orphan.

    The new process has imported everything by then. Its CPU time and its resident memory are told beside.
    """
    await driver.orphan(tasks)

    async def restart(_client: int) -> list[float]:
        return await driver.restarted()

    return restart


async def prepare_list(driver: Driver[Held], tasks: int, /) -> Operation:
    """Measure the first page of one owner's tasks, of whom a tenth of all tasks are."""
    await driver.keep(tasks)

    async def page(_client: int) -> list[float]:
        start = perf_counter()
        found = await driver.page()
        end = perf_counter()
        if not found:
            raise LookupError("The page is empty.")
        return [start, end]

    return page


async def prepare_cancel(driver: Driver[Held], _tasks: int, /) -> Operation:
    """Measure cancels, each of a task that was created just before."""

    async def cancel(client: int) -> list[float]:
        held = await driver.create(client)
        start = perf_counter()
        await driver.cancel(held)
        return [start, perf_counter()]

    return cancel


async def prepare_growth(driver: Driver[Held], tasks: int, /) -> Operation:
    """Measure what a server does all the time, beside so many kept tasks; recovery and sweep find nothing to do."""
    await driver.keep(tasks)
    driver.figures["database, MiB"] = await driver.file_mib()

    async def live(client: int) -> list[float]:
        at = [perf_counter()]
        await driver.get_kept()
        at.append(perf_counter())
        await driver.page()
        at.append(perf_counter())
        held = await driver.create(client)
        at.append(perf_counter())
        await driver.complete(held)
        at.append(perf_counter())
        await driver.recover()
        at.append(perf_counter())
        await driver.sweep()
        at.append(perf_counter())
        resident = resident_mib()
        if resident is not None:
            driver.figures["resident, MiB"] = resident
        return at

    return live


async def prepare_sweep(driver: Driver[Held], tasks: int, /) -> Operation:
    """Measure the deletion of so many expired tasks while four clients create others.

    Told beside: how fast a tenth of them is swept when nobody writes, and what the clients wait when nobody sweeps.
    """
    await driver.expire(tasks // 10)
    start = perf_counter()
    swept = await driver.sweep()
    driver.figures["swept with no writers, tasks/s"] = swept / (perf_counter() - start)
    await driver.expire(tasks)
    _tell_waits(driver, "no sweep", await _write_until(driver, asyncio.create_task(asyncio.sleep(1))))

    async def sweep(_client: int) -> list[float]:
        start = perf_counter()
        sweeping = asyncio.create_task(driver.sweep())
        spans = await _write_until(driver, sweeping)
        end = perf_counter()
        if await sweeping < tasks:
            raise LookupError("The sweep left expired tasks.")
        driver.figures["swept beside writers, tasks/s"] = tasks / (end - start)
        _tell_waits(driver, "a sweep", spans)
        return [start, end]

    return sweep


async def _write_until(driver: Driver[Held], over: "asyncio.Task[int] | asyncio.Task[None]") -> list[float]:
    """Have four clients create tasks until something else is done; return how long each create took, in order."""
    spans = []

    async def write(client: int) -> None:
        while not over.done():
            start = perf_counter()
            await driver.create(client)
            spans.append(perf_counter() - start)

    await asyncio.gather(*(write(client) for client in range(4)))
    return sorted(spans)


def _tell_waits(driver: Driver[Held], beside: str, spans: list[float]) -> None:
    for name, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
        found = spans[min(int(len(spans) * share), len(spans) - 1)]
        driver.figures[f"create beside {beside}, {name}, ms"] = found * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a run does.

    Attributes:
        steps: Names of an operation's steps.
        sizes: How many tasks the database holds before, unless others are asked for; 0 is for scenarios that have no
            use for any.
        once: Whether a run is one operation, by one client: it takes long, or leaves nothing to repeat it with.
        upkeep: Whether the store does its upkeep by itself meanwhile, as in a server; else the scenario does it.
    """

    prepare: Prepare
    steps: tuple[str, ...]
    sizes: tuple[int, ...] = (0,)
    once: bool = False
    upkeep: bool = True


SCENARIOS = {
    "flow": Scenario(prepare=prepare_flow, steps=("create", "get", "progress", "complete", "outcome")),
    "create": Scenario(prepare=prepare_create, steps=("create",)),
    "get": Scenario(prepare=prepare_get, steps=("get",)),
    "list": Scenario(prepare=prepare_list, steps=("page",), sizes=(10_000, 100_000)),
    "cancel": Scenario(prepare=prepare_cancel, steps=("cancel",)),
    "wait": Scenario(prepare=prepare_wait, steps=("wake",)),
    "adapter": Scenario(prepare=prepare_adapter, steps=("plain", "handle", "poll")),
    "recover": Scenario(
        prepare=prepare_recover, steps=("verdict",), sizes=(1, 10_000, 100_000), once=True, upkeep=False
    ),
    "sweep": Scenario(prepare=prepare_sweep, steps=("sweep",), sizes=(500_000,), once=True, upkeep=False),
    "growth": Scenario(
        prepare=prepare_growth,
        steps=("get", "list", "create", "complete", "recover", "sweep"),
        sizes=(1_000, 100_000, 1_000_000),
        upkeep=False,
    ),
}
