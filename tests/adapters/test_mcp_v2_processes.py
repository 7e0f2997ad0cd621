"""Servers on the SDK 2.x that are killed and told to stop, and what their clients see of it over HTTP."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED

from taskstore import StoreOptions
from tests.adapters.processes import PATIENCE_SECONDS, ServerProcess
from tests.unit.outside import query, wait_until

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start a server process; what a test leaves running is killed."""
    with ExitStack() as stack:

        def start_one(*, port: int = 0, drain: float = 0) -> ServerProcess:
            environment = {"FOLDER": str(tmp_path), "DRAIN": str(drain)}
            return stack.enter_context(ServerProcess("mcp_v2_process.py", database_url, port=port, **environment))

        yield start_one


class Poller:
    """A client that asks for one task again and again, and connects anew when its connection is gone.

    Attributes:
        seen: Each answer, and None for each loss of the connection.
    """

    def __init__(self, connect: Any, url: str, task_id: str) -> None:
        self._connect, self._url, self._task_id = connect, url, task_id
        self._news = asyncio.Event()
        self.seen: list[dict[str, Any] | None] = []

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [each for each in self.seen if each is not None]

    @property
    def last(self) -> dict[str, Any]:
        return self.answers[-1] if self.answers else {}

    async def run(self) -> None:
        while True:
            try:
                async with self._connect(self._url) as peer:
                    while True:
                        self._see(await peer.get(self._task_id))
            except* httpx2.TransportError:
                pass
            except* MCPError as errors:
                if errors.subgroup(lambda each: isinstance(each, MCPError) and each.code != CONNECTION_CLOSED):
                    raise  # an answer, and not the one that the task deserves
            self._see(None)
            await asyncio.sleep(0.02)  # a client that polls

    def _see(self, answer: dict[str, Any] | None) -> None:
        self.seen.append(answer)
        self._news.set()

    async def until(self, due: Callable[["Poller"], bool]) -> None:
        """Return when what has been seen so far says so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not due(self):
                self._news.clear()
                await self._news.wait()

    async def more(self, count: int) -> None:
        """Return when so many more answers have come."""
        enough = len(self.answers) + count
        await self.until(lambda poller: len(poller.answers) >= enough)

    async def lost(self) -> None:
        """Return when the connection has been lost twice from now on: the server is gone for sure."""
        enough = self.seen.count(None) + 2
        await self.until(lambda poller: poller.seen.count(None) >= enough)


@asynccontextmanager
async def polling(connect: Any, url: str, task_id: str) -> AsyncIterator[Poller]:
    """Poll beside the block; an answer that is an error fails the test."""
    poller = Poller(connect, url, task_id)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(poller.run())
        yield poller
        running.cancel()


def assert_nothing_was_taken_back(answers: list[dict[str, Any]]) -> None:
    """Each answer is at least as new as the one before, and the first that says how the task ended is the last word."""
    live = [answer for answer in answers if answer["status"] == "working"]
    over = answers[len(live) :]
    assert answers[: len(live)] == live, "a task went back to working"
    assert all(later == over[0] for later in over)
    assert all(earlier["lastUpdatedAt"] <= later["lastUpdatedAt"] for earlier, later in pairwise(answers))


async def begin(connect: Any, url: str, tool: str) -> str:
    async with connect(url) as peer:
        return str(await peer.start(tool))


@pytest.mark.parametrize("tool", ["fail", "retry"])
async def test_a_client_that_polls_across_a_crash_sees_no_lie(
    start: Start, connect: Any, tmp_path: Path, tool: str
) -> None:
    """It sees work, then nobody, then the honest word: never "not found", and never what is older than it saw."""
    first = await asyncio.to_thread(start)
    task_id = await begin(connect, first.url, tool)

    async with polling(connect, first.url, task_id) as poller:
        await poller.until(lambda poller: "step" in poller.last.get("statusMessage", ""))
        first.stop(signal.SIGKILL)
        await poller.lost()
        seen_of_the_first = len(poller.answers)
        second = await asyncio.to_thread(start, port=first.port)
        await poller.more(5)
        (tmp_path / "finish").touch()
        await poller.until(lambda poller: poller.last["status"] != "working")
        second.stop(signal.SIGKILL)
        await poller.lost()
        await asyncio.to_thread(start, port=first.port)
        await poller.more(5)

    assert_nothing_was_taken_back(poller.answers)
    verdict = poller.last
    if tool == "fail":
        assert poller.answers[seen_of_the_first] == verdict  # the first answer after the crash is the verdict
        assert (verdict["status"], verdict["error"]["data"]["reason"]) == ("failed", "CRASH_RECOVERY")
    else:
        assert poller.answers[seen_of_the_first]["status"] == "working"
        assert (verdict["status"], verdict["result"]["content"][0]["text"]) == ("completed", "done")


async def test_a_client_of_one_replica_sees_the_crash_of_another_as_its_verdict(start: Start, connect: Any) -> None:
    """Behind a load balancer the connection lives on while the process that did the work is gone."""
    working, answering = await asyncio.to_thread(start), await asyncio.to_thread(start)
    task_id = await begin(connect, working.url, "fail")

    async with polling(connect, answering.url, task_id) as poller:
        await poller.until(lambda poller: "step" in poller.last.get("statusMessage", ""))
        working.stop(signal.SIGKILL)
        await poller.until(lambda poller: poller.last["status"] != "working")
        await poller.more(5)

    assert None not in poller.seen
    assert_nothing_was_taken_back(poller.answers)
    assert poller.last["error"]["data"]["reason"] == "CRASH_RECOVERY"


# --- told to stop


async def test_a_server_that_is_told_to_stop_hands_its_tasks_over_at_once(
    start: Start, connect: Any, can_be_asked: Any, database_url: str
) -> None:
    """Nobody waits for a lease of a server that had the time to say what becomes of its work; each policy decides."""
    drain = 0.5
    server = await asyncio.to_thread(start, drain=drain)
    async with connect(server.url, **can_be_asked) as peer:
        for tool in ("fail", "retry", "ask"):
            await peer.start(tool)
        external = await peer.call("outsource")

    told = time.monotonic()
    said = await asyncio.to_thread(server.stop, signal.SIGTERM)
    took = time.monotonic() - told

    left = query(database_url, "SELECT name, status, owner_kind, crashes FROM taskstore_tasks ORDER BY name")
    reasons = query(database_url, "SELECT DISTINCT reason FROM taskstore_events WHERE kind <> 'created'")
    assert external["resultType"] == "complete"
    assert drain <= took < StoreOptions().lease.total_seconds()
    assert left == [
        ("ask", "input_required", "parked", 0),
        ("external", "working", "external", 0),
        ("fail", "failed", "instance", 0),
        ("retry", "working", "queued", 0),
    ]
    assert reasons == [("SERVER_STOPPED",)]
    assert query(database_url, "SELECT * FROM taskstore_instances") == []
    assert "Traceback" not in said


async def test_a_server_that_is_told_to_stop_lets_its_work_finish(
    start: Start, connect: Any, database_url: str, tmp_path: Path
) -> None:
    """What needs a moment more gets the drain time; and the server goes as soon as nothing is left."""
    server = await asyncio.to_thread(start, drain=2 * PATIENCE_SECONDS)
    await begin(connect, server.url, "fail")

    server.popen.send_signal(signal.SIGTERM)
    await asyncio.to_thread(wait_until, lambda: not server.listens, "the end of its listening")
    (tmp_path / "finish").touch()
    said = await asyncio.to_thread(server.end)

    assert query(database_url, "SELECT status, attempt FROM taskstore_tasks") == [("completed", 1)]
    assert query(database_url, "SELECT * FROM taskstore_instances") == []
    assert "Traceback" not in said


async def test_a_deployment_is_a_stop_and_a_start_to_a_client_that_polls(
    start: Start, connect: Any, tmp_path: Path
) -> None:
    """The next server goes on with what the stopped one handed over; the client sees it at work all the time."""
    first = await asyncio.to_thread(start)
    task_id = await begin(connect, first.url, "retry")

    async with polling(connect, first.url, task_id) as poller:
        await poller.until(lambda poller: "step" in poller.last.get("statusMessage", ""))
        first.popen.send_signal(signal.SIGTERM)
        await poller.lost()
        await asyncio.to_thread(first.end)
        await asyncio.to_thread(start, port=first.port)
        await poller.more(5)
        (tmp_path / "finish").touch()
        await poller.until(lambda poller: poller.last["status"] != "working")

    assert_nothing_was_taken_back(poller.answers)
    assert (poller.last["status"], poller.last["result"]["content"][0]["text"]) == ("completed", "done")
