"""The examples run as they stand, as programs of their own."""

import os
import sys
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters

from taskstore import AuthContext, TaskStore

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_the_report_server_writes_a_report(database_url: str, connect: Any, local: AuthContext) -> None:
    """Users copy it; it must work, on stdio and on any database."""
    command = StdioServerParameters(
        command=sys.executable,
        args=[str(EXAMPLES / "report_server.py")],
        env={**os.environ, "REPORTS_DATABASE": database_url, "PYTHONPATH": str(EXAMPLES.parent)},
    )

    async with connect(command) as peer, TaskStore.open(database_url) as store:
        task_id = await peer.start("generate_report", topic="tides", pages=1)
        finished = await store.wait_for_task(task_id, auth=local)
        polled = await peer.get(task_id)

    assert (finished.progress, finished.progress_total) == (1, 1)
    assert polled["status"] == "completed"
    assert polled["result"]["content"][0]["text"] == "A report on tides, 1 pages long."
