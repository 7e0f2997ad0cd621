"""From tools/call to the task's id, on a FastMCP server: over this store, and over fastmcp-tasks with Redis.

``python -m benchmarks.fastmcp_calls`` serves the same tools with each, in the environment that fastmcp-tasks needs, and
calls them with the same client: over HTTP from another process, and in the server's own process, where little else than
FastMCP and the store takes time. Both acknowledge a task when it is on disk: SQLite with synchronous FULL, PostgreSQL
with fsync, Redis with ``appendfsync always``. A plain tool is called on the same server too: faster than that no task
can be. Needs ``redis-server`` on the path.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, PeerUnavailableError, python_of
from benchmarks.redis_server import redis_server
from taskstore.testing import PostgresServer

PEER = ("fastmcp==4.1.4", "fastmcp-tasks==4.1.4", "psycopg[binary]>=3.2,<4")
PEER_NAME = "fastmcp-tasks"


@dataclass
class Measured:
    """What one run showed: the milliseconds that each call took, and how many tasks a second were made."""

    plain_ms: list[float]
    task_ms: list[float]
    tasks_per_second: float


def server_on(url: str) -> Any:
    """Make a server with two tools that do nothing; one of them runs as a task."""
    from fastmcp import FastMCP

    mcp: FastMCP[object] = FastMCP("calls")
    if url.startswith("redis"):
        from fastmcp_tasks import TasksExtension as RedisTasks  # type: ignore[import-not-found]

        mcp.add_extension(RedisTasks(url=url))
    else:
        from taskstore import StoreOptions
        from taskstore.adapters.fastmcp import TasksExtension

        mcp.add_extension(TasksExtension(url, options=StoreOptions(migrate=True)))

    @mcp.tool
    async def plain(text: str) -> str:
        return text

    @mcp.tool(task=True)
    async def quick(text: str) -> str:
        return text

    return mcp


def serve(url: str) -> None:
    """Serve the tools over HTTP; print the port when it listens."""
    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    app = server_on(url).http_app(path="/mcp", stateless_http=True)
    Announced(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")).run()


async def measure(server: Any, calls: int, at_once: int) -> Measured:
    """Call each tool this often, so many at once.

    Args:
        server: The URL of a server, or the low-level server of one in this process.
    """
    from mcp import Client

    from taskstore.adapters.mcp_v2 import RemoteTask, TasksClient

    tasks, spans = TasksClient(), []
    taken: dict[str, list[float]] = {"plain": [], "quick": []}
    together = asyncio.Barrier(at_once)

    async def caller(number: int) -> None:
        async with Client(server, mode="2026-07-28", extensions=[tasks]) as client:
            for tool, times in taken.items():
                await tasks.start(client, tool, {"text": "warm"})
                await together.wait()
                first = time.perf_counter()
                for each in range(number, calls, at_once):
                    began = time.perf_counter()
                    started = await tasks.start(client, tool, {"text": str(each)})
                    times.append(1000 * (time.perf_counter() - began))
                    assert isinstance(started, RemoteTask) == (tool == "quick")
                if tool == "quick":
                    spans.append(time.perf_counter() - first)
            await together.wait()  # in process, FastMCP stops the server with the first client that leaves

    await asyncio.gather(*(caller(number) for number in range(at_once)))
    return Measured(taken["plain"], taken["quick"], len(taken["quick"]) / max(spans))


def measured_in_process(python: str, url: str, calls: int, at_once: int) -> Measured:
    """Measure in a process that has the server and its clients."""
    command = [python, "-m", "benchmarks.fastmcp_calls", "--in-process", url, "--calls", str(calls)]
    ran = subprocess.run([*command, "--clients", str(at_once)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(ran.stdout.splitlines()[-1]))


def measured_over_http(python: str, url: str, calls: int, at_once: int) -> Measured:
    """Measure from this process what another one serves."""
    with serving(python, url) as where:
        return asyncio.run(measure(where, calls, at_once))


TRANSPORTS = {"http": measured_over_http, "process": measured_in_process}


@contextmanager
def serving(python: str, url: str) -> Iterator[str]:
    """Run the server as a process of its own; yield its URL."""
    command = [python, "-m", "benchmarks.fastmcp_calls", "--serve", url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        finally:
            process.terminate()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fastmcp_calls", description=__doc__)
    add = parser.add_argument
    add("--serve", help=argparse.SUPPRESS)
    add("--in-process", help=argparse.SUPPRESS)
    add("--transport", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS), help="default: both")
    add("--calls", type=int, default=500, metavar="N", help="of each tool in a run (default: 500)")
    add("--clients", type=int, nargs="+", default=[1, 8], metavar="N", help="concurrent callers (default: 1 8)")
    add("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add("--folder", default=".", help="where databases and Redis write; on the disk that counts (default: here)")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    if asked.in_process:
        server = server_on(asked.in_process)._mcp_server
        print(json.dumps(asdict(asyncio.run(measure(server, asked.calls, asked.clients[0])))))
        return
    ours = [each for each in requires("taskstore") or () if "extra ==" not in each]
    python = python_of(PEER_NAME, (*PEER, *ours), install=True, say=print)
    print(
        f"{'transport':9} {'clients':>7} {'backend':14} {'plain ms':>9} {'task ms':>8} {'p95 ms':>8} {'above ms':>9} "
        f"{'tasks/s':>8} {'speed-up':>18}   (medians of {asked.repeat} rounds; speed-up over {PEER_NAME}, min-max)"
    )
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, ExitStack() as stack:
        urls = {
            "sqlite": f"sqlite:///{folder}/tasks.db",
            "postgres": stack.enter_context(PostgresServer()).create_database(),
            PEER_NAME: stack.enter_context(redis_server(Path(folder))),
        }
        for transport in asked.transport:
            for at_once in asked.clients:
                rounds: dict[str, list[Measured]] = {name: [] for name in urls}
                for _ in range(asked.repeat):  # in turn, so that a busy minute of the machine hits all alike
                    for name, url in urls.items():
                        rounds[name].append(TRANSPORTS[transport](python, url, asked.calls, at_once))
                for name, runs in rounds.items():
                    print(f"{transport:9} {at_once:7} {name:14} {_line(runs, rounds[PEER_NAME])}", flush=True)


def _line(runs: list[Measured], peer: list[Measured]) -> str:
    plain = statistics.median(each for run in runs for each in run.plain_ms)
    tasks = sorted(each for run in runs for each in run.task_ms)
    task, p95 = statistics.median(tasks), tasks[int(0.95 * len(tasks))]
    rate = statistics.median(run.tasks_per_second for run in runs)
    ratios = sorted(
        statistics.median(theirs.task_ms) / statistics.median(run.task_ms)
        for run, theirs in zip(runs, peer, strict=True)
    )
    ratio = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f})"
    return f"{plain:9.2f} {task:8.2f} {p95:8.2f} {task - plain:9.2f} {rate:8.0f} {ratio:>18}"


if __name__ == "__main__":
    try:
        main()
    except PeerUnavailableError as error:
        raise SystemExit(str(error)) from error
