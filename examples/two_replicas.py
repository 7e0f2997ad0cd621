"""Two processes of the report server over one PostgreSQL: what one starts, the other shows, and stops.

    python examples/two_replicas.py postgresql+psycopg://user@host/name

Without a URL it starts a PostgreSQL of its own for as long as it runs (pip install 'taskstore[test]').
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
from mcp import Client

from taskstore.adapters.mcp_v2 import RemoteTask, TaskCancelledError, TasksClient
from taskstore.migrate import upgrade
from taskstore.testing import PostgresServer

REPORT_SERVER = Path(__file__).with_name("report_server.py")


@contextmanager
def replica(database: str) -> Iterator[str]:
    """Run one report server; yield its URL when it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "REPORTS_DATABASE": database, "PORT": str(port)}
    command = [sys.executable, str(REPORT_SERVER), "--http"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not listens(port):
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


def listens(port: int) -> bool:
    """Tell whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def show(database: str) -> None:
    """Start tasks at one replica, and use them at the other."""
    tasks = TasksClient()
    with replica(database) as first_url, replica(database) as second_url:
        async with (
            Client(first_url, mode="2026-07-28", extensions=[tasks]) as first,
            Client(second_url, mode="2026-07-28", extensions=[tasks]) as second,
        ):
            started = await tasks.start(first, "generate_report", {"topic": "tides", "pages": 2})
            assert isinstance(started, RemoteTask)
            print(f"started at {first_url}")
            result = await tasks.resume(second, started.task_id).result()
            print(f"finished at {second_url}: {(result.structured_content or {})['result']}")

            endless = await tasks.start(first, "generate_report", {"topic": "winds", "pages": 10_000})
            assert isinstance(endless, RemoteTask)
            await tasks.resume(second, endless.task_id).cancel()
            try:
                await endless.result()
            except TaskCancelledError as cancelled:
                print(f"cancelled at {second_url}, and so at {first_url}: {cancelled}")


def main() -> None:
    """Run on the database that was given, or on one of its own."""
    with ExitStack() as stack:
        database = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(PostgresServer()).create_database()
        upgrade(database)
        anyio.run(show, database)


if __name__ == "__main__":
    main()
