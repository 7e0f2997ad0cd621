"""The official MCP conformance suite's tasks scenarios against a real server process, on each database."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.npm import NodeUnavailableError, find_node, install

VERSION = "0.2.0-alpha.12"
TIMEOUT_SECONDS = 120
SERVERS = {"sdk": "server.py", "fastmcp": "fastmcp_server.py"}

# Per scenario how many checks it makes: 44 in all, in this version.
SCENARIOS = {
    "tasks-lifecycle": 9,
    "tasks-capability-negotiation": 5,
    "tasks-wire-fields": 4,
    "tasks-request-state-removal": 3,
    "tasks-mrtr-input": 4,
    "tasks-request-headers": 5,
    "tasks-dispatch-and-envelope": 9,
    "tasks-required-task-error": 3,
    "tasks-mrtr-composition": 2,
}
# The suite skips its only check, until its authors rewrite it for subscriptions/listen.
SKIPPED_BY_THE_SUITE = "tasks-status-notifications"


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("server", SERVERS)
def test_every_scenario_passes(suite: list[str], database_url: str, tmp_path: Path, server: str, scenario: str) -> None:
    """The suite is written by the authors of the specification and knows nothing of us."""
    checks = run_scenario(suite, server, database_url, tmp_path, scenario)

    assert [status for _, status in checks if status != "INFO"] == ["SUCCESS"] * SCENARIOS[scenario], checks


@pytest.mark.parametrize("server", SERVERS)
def test_status_notifications_are_skipped_by_the_suite(
    suite: list[str], database_url: str, tmp_path: Path, server: str
) -> None:
    """When a new version of the suite no longer skips it, this fails, and it belongs to the others."""
    checks = run_scenario(suite, server, database_url, tmp_path, SKIPPED_BY_THE_SUITE)

    assert checks == [(SKIPPED_BY_THE_SUITE, "SKIPPED")]


def run_scenario(
    suite: list[str], server: str, database_url: str, folder: Path, scenario: str
) -> list[tuple[str, str]]:
    """Run one scenario; return id and status of each of its checks."""
    with serving(SERVERS[server], database_url) as url:
        run = subprocess.run(
            [*suite, "server", "--url", url, "--scenario", scenario, "--output-dir", str(folder / "out")],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    (report,) = (folder / "out").glob("*/checks.json")
    return [(check["id"], check["status"]) for check in json.loads(report.read_text(encoding="utf-8"))]


@contextmanager
def serving(script: str, database_url: str) -> Iterator[str]:
    """Run the server as a process of its own; yield its URL."""
    server = Path(__file__).with_name(script)
    command = [sys.executable, str(server), "--port", "0", "--url", database_url]
    path = os.pathsep.join(filter(None, [str(server.parents[2]), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, "the server did not start; see its output"
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()
            try:
                process.wait(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session")
def suite() -> list[str]:
    """The command of the suite; without it a test is skipped at home and fails in CI."""
    try:
        modules = install("@modelcontextprotocol/conformance", VERSION)
        return [find_node()[0], str(modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js")]
    except NodeUnavailableError as problem:
        if os.environ.get("CI"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))
