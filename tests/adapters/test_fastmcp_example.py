"""A server that was written for fastmcp-tasks changes one import and one URL."""

import os
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import StdioServerParameters

from benchmarks.environments import PeerUnavailableError, python_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def beside_fastmcp_tasks() -> str:
    """The interpreter of an environment with fastmcp-tasks, which pins an older FastMCP than the newest."""
    ours = [each for each in requires("taskstore") or () if "extra ==" not in each]
    try:
        return python_of(
            "fastmcp-tasks",
            ("fastmcp==4.1.4", "fastmcp-tasks==4.1.4", "psycopg[binary]>=3.2,<4", *ours),
            install=True,
            say=print,
        )
    except PeerUnavailableError as problem:
        if os.environ.get("CI"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))


@pytest.mark.parametrize("library", ["taskstore", "fastmcp-tasks"])
async def test_a_fastmcp_server_changes_one_import_and_one_url(
    tmp_path: Path, connect: Any, can_be_asked: Any, beside_fastmcp_tasks: str, library: str
) -> None:
    """The same file, under the same FastMCP, with either library: what its client sees is the same."""
    url = f"sqlite:///{tmp_path / 'reports.db'}" if library == "taskstore" else "memory://"
    command = StdioServerParameters(
        command=beside_fastmcp_tasks,
        args=[str(EXAMPLES / "fastmcp_server.py")],
        env={**os.environ, "REPORTS_URL": url, "PYTHONPATH": str(EXAMPLES.parent)},
    )

    async with connect(command, **can_be_asked) as peer:
        report = await peer.start("generate_report", topic="tides", pages=1)
        delete = await peer.start("delete_report", topic="tides")
        (key,) = (await poll(peer, delete, "input_required"))["inputRequests"]
        await peer.update(delete, {key: {"action": "accept", "content": {"sure": True}}})
        polled = [await poll(peer, each, "completed", "failed") for each in (report, delete)]

    assert [each["result"]["content"][0]["text"] for each in polled] == [
        "A report on tides, 1 pages long.",
        "The report on tides is deleted.",
    ]
    assert polled[0]["pollIntervalMs"] == 5000


async def poll(peer: Any, task_id: str, *statuses: str) -> dict[str, Any]:
    """Poll until a task has one of these statuses."""
    with anyio.fail_after(60):
        while True:
            polled: dict[str, Any] = await peer.get(task_id)
            if polled["status"] in statuses:
                return polled
            await anyio.sleep(0.02)
