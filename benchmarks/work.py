"""What is measured: a task's life in five steps, the same for every backend, and the scenarios made of them.

Standard library only: peers run it in environments of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from itertools import cycle
from time import perf_counter
from typing import Generic, Protocol, TypeVar

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

    def __call__(self, driver: Driver[Held]) -> Awaitable[Operation]:
        """Prepare a database that is empty."""


async def prepare_flow(driver: Driver[Held]) -> Operation:
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


async def prepare_create(driver: Driver[Held]) -> Operation:
    """Measure creates alone."""

    async def create(client: int) -> list[float]:
        start = perf_counter()
        await driver.create(client)
        return [start, perf_counter()]

    return create


async def prepare_get(driver: Driver[Held]) -> Operation:
    """Measure gets by id, of 100 working tasks in turn."""
    tasks = cycle([await driver.create(client=0) for _ in range(100)])

    async def get(_client: int) -> list[float]:
        held = next(tasks)
        start = perf_counter()
        await driver.get(held)
        return [start, perf_counter()]

    return get


async def prepare_wait(driver: Driver[Held]) -> Operation:
    """Measure how soon a waiter hears of what another process did, the write itself included.

    The pauses between are as long as they need to be for chance, so operations a second mean nothing here.
    """

    async def wait(_client: int) -> list[float]:
        return await driver.completed_elsewhere()

    return wait


async def prepare_adapter(driver: Driver[Held]) -> Operation:
    """Measure what tools cost their client: a plain call, a call answered with a task's handle, and a poll."""
    await driver.tools_called()  # connects, here: an SDK's client is closed by the asyncio task that opened it

    async def call(_client: int) -> list[float]:
        return await driver.tools_called()

    return call


# By name: how to prepare a scenario on an empty database, and the names of its steps.
SCENARIOS: dict[str, tuple[Prepare, tuple[str, ...]]] = {
    "flow": (prepare_flow, ("create", "get", "progress", "complete", "outcome")),
    "create": (prepare_create, ("create",)),
    "get": (prepare_get, ("get",)),
    "wait": (prepare_wait, ("wake",)),
    "adapter": (prepare_adapter, ("plain", "handle", "poll")),
}
