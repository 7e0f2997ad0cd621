"""Servers on stdio whose client goes, and who are told to stop: what becomes of the tasks that they run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from taskstore import EventKind, ReasonCode, TaskStatus, TaskStore
from tests.adapters.processes import PATIENCE_SECONDS, ROOT
from tests.unit.outside import query

PEERS = Path(__file__).parent / "legacy" / "peers"


class StdioServer:
    """A server on stdio, and its client: a pipe, as a desktop program that starts a server is one."""

    def __init__(self, script: str, database_url: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.popen = subprocess.Popen(
            [sys.executable, str(PEERS / script), database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def start_task(self, tool: str) -> str:
        """Shake hands, and call a tool as a task."""
        client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "pipe", "version": "1"}}
        self._send(id=1, method="initialize", params=client)
        self._answer(1)
        self._send(method="notifications/initialized")
        self._send(id=2, method="tools/call", params={"name": tool, "arguments": {}, "task": {"ttl": 60_000}})
        return str(self._answer(2)["task"]["taskId"])

    def _send(self, **message: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.popen.stdin.flush()

    def _answer(self, number: int) -> dict[str, Any]:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            message = json.loads(line)
            if message.get("id") == number:
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError(f"the server ended, exit code {self.popen.wait()}")

    def close_input(self) -> int:
        """Go away, as a client does that is quit; return the server's exit code."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        return self.popen.wait(PATIENCE_SECONDS)

    def terminate(self) -> int:
        """Tell the server to stop, its input still open; return its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(PATIENCE_SECONDS)


Start = Callable[[], StdioServer]


@pytest.fixture(params=["server.py", "fastmcp_server.py"], ids=["sdk", "fastmcp"])
def start(request: pytest.FixtureRequest, database_url: str) -> Iterator[Start]:
    """Start a server on stdio, on the SDK 2.x and on FastMCP; what a test leaves running is killed."""
    with ExitStack() as stack:

        def start_one() -> StdioServer:
            server = StdioServer(request.param, database_url)
            stack.enter_context(server.popen)
            stack.callback(server.popen.kill)
            return server

        yield start_one


async def verdict(url: str) -> tuple[TaskStatus, int, list[tuple[EventKind, ReasonCode | None]]]:
    """Open the store as the next server does, and return what it says about the only task there is."""
    async with TaskStore.open(url) as store:
        (task,) = (await store.operator.list_tasks()).tasks
        events = await store.operator.list_events(task.task_id)
    return task.status, task.crashes, [(event.kind, event.reason) for event in events[1:]]


async def test_a_server_on_stdio_whose_client_goes_hands_its_tasks_over_at_once(
    start: Start, database_url: str
) -> None:
    """The end of its input is how a client tells it to stop; its lifespan ends then, as over HTTP at SIGTERM."""
    server = await asyncio.to_thread(start)
    await asyncio.to_thread(server.start_task, "hold")

    code = await asyncio.to_thread(server.close_input)

    assert code == 0
    assert query(database_url, "SELECT status, owner_kind, crashes FROM taskstore_tasks") == [("failed", "instance", 0)]
    assert query(database_url, "SELECT reason FROM taskstore_events WHERE kind <> 'created'") == [("SERVER_STOPPED",)]
    assert query(database_url, "SELECT * FROM taskstore_instances") == []


async def test_a_server_on_stdio_that_is_terminated_leaves_its_tasks_to_the_next_start(
    start: Start, database_url: str
) -> None:
    """Neither SDK handles SIGTERM on stdio: it ends the process as a crash does, and is answered as honestly."""
    server = await asyncio.to_thread(start)
    await asyncio.to_thread(server.start_task, "hold")

    code = await asyncio.to_thread(server.terminate)
    left = query(database_url, "SELECT status FROM taskstore_tasks")
    found = await verdict(database_url)

    assert code == -signal.SIGTERM
    assert left == [("working",)]
    assert found == (TaskStatus.FAILED, 1, [(EventKind.RECOVERED, ReasonCode.CRASH_RECOVERY)])
