"""From tools/call to the task's id, on a FastMCP server: over this store, and over fastmcp-tasks with Redis.

``python -m benchmarks.fastmcp_calls`` serves the same tool over HTTP with each, in the environment that fastmcp-tasks
needs, and calls it with the same client. Both acknowledge a task when it is on disk: SQLite with synchronous FULL,
PostgreSQL with fsync, Redis with ``appendfsync always``. Needs ``redis-server`` on the path.
"""

import argparse
import asyncio
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import requires
from pathlib import Path

from benchmarks.environments import ROOT, python_of
from taskstore.testing import PostgresServer

PEER = ("fastmcp==4.1.4", "fastmcp-tasks==4.1.4", "psycopg[binary]>=3.2,<4")


def serve(url: str) -> None:
    """Serve a tool that does nothing; print the port when it listens."""
    import uvicorn
    from fastmcp import FastMCP

    mcp: FastMCP[object] = FastMCP("calls")
    if url.startswith("redis"):
        from fastmcp_tasks import TasksExtension as RedisTasks  # type: ignore[import-not-found]

        mcp.add_extension(RedisTasks(url=url))
    else:
        from taskstore import StoreOptions
        from taskstore.adapters.fastmcp import TasksExtension

        mcp.add_extension(TasksExtension(url, options=StoreOptions(migrate=True)))

    @mcp.tool(task=True)
    async def quick(text: str) -> str:
        return text

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    app = mcp.http_app(path="/mcp", stateless_http=True)
    Announced(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")).run()


async def measure(url: str, calls: int, at_once: int) -> tuple[float, list[float]]:
    """Call the tool this often, so many at once; return the calls a second, and the seconds that each call took."""
    from mcp import Client

    from taskstore.adapters.mcp_v2 import RemoteTask, TasksClient

    tasks, taken, left, spans = TasksClient(), [], iter(range(calls)), []
    connected = asyncio.Barrier(at_once)

    async def caller() -> None:
        async with Client(url, mode="2026-07-28", extensions=[tasks]) as client:
            await tasks.start(client, "quick", {"text": "warm"})
            await connected.wait()
            first = time.perf_counter()
            for each in left:
                began = time.perf_counter()
                started = await tasks.start(client, "quick", {"text": str(each)})
                taken.append(time.perf_counter() - began)
                assert isinstance(started, RemoteTask)
            spans.append(time.perf_counter() - first)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return len(taken) / max(spans), taken


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


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run a Redis that has on disk what it acknowledges; yield its URL."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on the path: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(folder)]
    with subprocess.Popen([program, "--port", str(port), *durable], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fastmcp_calls", description=__doc__)
    add = parser.add_argument
    add("--serve", help=argparse.SUPPRESS)
    add("--calls", type=int, default=500, metavar="N", help="of each run (default: 500)")
    add("--clients", type=int, nargs="+", default=[1, 16], metavar="N", help="concurrent callers (default: 1 16)")
    add("--repeat", type=int, default=3, metavar="N", help="rounds (default: 3)")
    add("--folder", default=".", help="where databases and Redis write; on the disk that counts (default: here)")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    ours = [each for each in requires("taskstore") or () if "extra ==" not in each]
    python = python_of("fastmcp-tasks", (*PEER, *ours), install=True, say=print)
    print(f"{'backend':14} {'clients':>7} {'calls/s':>9} {'median ms':>10} {'p95 ms':>8}   ({asked.repeat} rounds)")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, ExitStack() as stack:
        urls = {
            "sqlite": f"sqlite:///{folder}/tasks.db",
            "postgres": stack.enter_context(PostgresServer()).create_database(),
            "fastmcp-tasks": stack.enter_context(redis(Path(folder))),
        }
        for at_once in asked.clients:
            rounds: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in urls}
            for _ in range(asked.repeat):  # in turn, so that a busy minute of the machine hits all alike
                for name, url in urls.items():
                    with serving(python, url) as where:
                        rounds[name].append(asyncio.run(measure(where, asked.calls, at_once)))
            for name, measured in rounds.items():
                taken = sorted(1000 * each for _, run in measured for each in run)
                rate = statistics.median(each for each, _ in measured)
                p95 = taken[int(0.95 * len(taken))]
                print(f"{name:14} {at_once:7} {rate:9.0f} {statistics.median(taken):10.2f} {p95:8.2f}")


if __name__ == "__main__":
    main()
