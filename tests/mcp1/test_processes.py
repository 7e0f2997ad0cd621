"""Durable tasks in real processes: the example, killed and started again; and a loop that ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import McpError
from mcp.types import CallToolResult

from taskstore import AuthContext, TaskStatus, TaskStore
from taskstore.instances import read_instances
from taskstore.store import open_observer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "report_server_mcp1.py"

ONE_LOOP = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.mcp1.conftest import Reports, connect_to, enable_durable_tasks

async def main():
    reports = Reports()
    enable_durable_tasks(reports.server, sys.argv[2])
    async with connect_to(reports.server) as peer:
        left, read = await peer.start("wait"), await peer.start("quick")
    async with connect_to(reports.server) as peer:
        print((await peer.result(read)).content[0].text, (await peer.get(left)).status, left)

asyncio.run(main())
"""


def environment(database_url: str) -> dict[str, str]:
    return {**os.environ, "REPORTS_DATABASE": database_url, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


@asynccontextmanager
async def stdio(database_url: str) -> AsyncIterator[ClientSession]:
    """Start the example, and connect to it."""
    command = StdioServerParameters(command=sys.executable, args=[str(EXAMPLE)], env=environment(database_url))
    async with stdio_client(command) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def servers(database_url: str) -> list[int]:
    """List the pids of the servers that have the database open."""
    async with open_observer(database_url) as observer:
        return [int(row["pid"]) for row in await observer._parts.read_unit(read_instances)]


async def test_the_report_server_writes_a_report(database_url: str, local: AuthContext) -> None:
    """Users copy it; it must work as it stands, on any database."""
    async with stdio(database_url) as session:
        tasks = session.experimental
        created = await tasks.call_tool_as_task("generate_report", {"topic": "tides", "pages": 1})
        with anyio.fail_after(60):
            result: Any = await tasks.get_task_result(created.task.taskId, CallToolResult)
        async with TaskStore.open(database_url) as store:
            task = await store.get_task(created.task.taskId, auth=local)

    assert (task.progress, task.progress_total) == (1, 1)
    assert result.content[0].text == "A report on tides, 1 pages long."


async def test_a_killed_server_gives_an_honest_answer_when_it_is_back(database_url: str) -> None:
    """The client starts it again and asks for the task it was promised; and the server goes on working."""
    async with stdio(database_url) as session:
        tasks = session.experimental
        done = await tasks.call_tool_as_task("generate_report", {"topic": "tides", "pages": 0})
        before: Any = await tasks.get_task_result(done.task.taskId, CallToolResult)
        lost = await tasks.call_tool_as_task("generate_report", {"topic": "tides", "pages": 1000})
        with anyio.fail_after(60):
            while (await tasks.get_task(lost.task.taskId)).statusMessage is None:  # noqa: ASYNC110  clients poll
                await anyio.sleep(0.01)
        (pid,) = await servers(database_url)
        os.kill(pid, signal.SIGKILL)

    async with stdio(database_url) as session:
        tasks = session.experimental
        after: Any = await tasks.get_task_result(done.task.taskId, CallToolResult)
        polled = await tasks.get_task(lost.task.taskId)
        listed = {task.taskId for task in (await tasks.list_tasks()).tasks}
        with pytest.raises(McpError) as refused:
            await tasks.get_task_result(lost.task.taskId, CallToolResult)
        error = refused.value.error

    assert after == before
    assert polled.status == "failed"
    assert polled.statusMessage is not None
    assert polled.statusMessage.startswith("CRASH_RECOVERY")
    assert (error.code, error.data["reason"]) == (-32603, "CRASH_RECOVERY")
    assert listed == {done.task.taskId, lost.task.taskId}


async def test_the_report_server_serves_http(database_url: str, connect: Any) -> None:
    """The other half of the example, and the end that every server comes to: a signal."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "--http"]
    environ = {**environment(database_url), "PORT": str(port)}
    async with await anyio.open_process(command, env=environ, stdout=None, stderr=subprocess.DEVNULL) as server:
        try:
            with anyio.fail_after(60):
                while not _listens(port):
                    assert server.returncode is None, "the server did not start"
                    await anyio.sleep(0.05)
            async with connect(f"http://127.0.0.1:{port}/mcp/") as peer:
                task_id = await peer.start("generate_report", {"topic": "tides", "pages": 1000})
            server.send_signal(signal.SIGTERM)
            with anyio.fail_after(60):
                assert await server.wait() in {0, -signal.SIGTERM}
        finally:
            if server.returncode is None:
                server.kill()

    async with open_observer(database_url) as observer:
        task = await observer.operator.get_task(task_id)
    assert task.status is TaskStatus.FAILED
    assert task.status_message is not None
    assert task.status_message.startswith("SERVER_STOPPED")


async def test_the_tasks_stay_open_between_sessions_and_close_with_the_loop(
    database_url: str, local: AuthContext
) -> None:
    """One call enables them: without `async with`, no session's end may stop what another one started."""
    with anyio.fail_after(120):
        command = [sys.executable, "-c", ONE_LOOP, str(ROOT), database_url]
        ran = await anyio.run_process(command, env=environment(database_url), stderr=None)
    said, status, task_id = ran.stdout.decode().split()

    async with open_observer(database_url) as observer:
        task = await observer.get_task(task_id, auth=local)

    assert (said, status) == ("done", "working")
    assert task.status_message is not None
    assert task.status_message.startswith("SERVER_STOPPED")
    assert not await servers(database_url)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
