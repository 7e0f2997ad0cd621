"""The peers' drivers against the real peers, in environments that tests of the adapters need too."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.backends import BACKENDS
from benchmarks.environments import ROOT, PeerUnavailableError, python_of
from benchmarks.redis_server import redis_server
from benchmarks.session import Worker
from benchmarks.work import SCENARIOS
from benchmarks.worker import Order

PATIENCE_SECONDS = 60


def interpreter(name: str, *requirements: str) -> str:
    """The interpreter of an environment; without it a test is skipped at home and fails in CI."""
    try:
        return python_of(name, requirements, install=True, say=print)
    except PeerUnavailableError as problem:
        return missing(str(problem))


def missing(what: str) -> str:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def order(scenario: str, place: str, kept: int = 0) -> Order:
    return Order(place=place, kept=kept, scenario=scenario, tasks=0, clients=2, operations=4, seconds=None)


def test_the_dict_of_the_sdk_is_measured_with_the_tasks_it_keeps() -> None:
    """Its flow ends with the result that was stored, and each of its gets looks through all that it keeps."""
    python = interpreter("mcp-1x", "mcp==1.30.0")

    with Worker.start(BACKENDS["sdk-memory-10k"], python) as worker:
        flow = worker.run(order("flow", "", kept=10_000))
        empty, full = (worker.run(order("get", "", kept=kept))["cpu_us"] for kept in (0, 10_000))

    assert worker.versions["mcp"] == "1.30.0"
    assert flow["operations"] == 4
    assert tuple(flow["steps"]) == SCENARIOS["flow"].steps
    assert full > 2 * empty


def test_docket_runs_its_flow_on_a_redis_of_its_own(tmp_path: Path) -> None:
    """The worker runs the function to its end, and where only creates are measured nothing waits for it."""
    ours = [each for each in requires("taskstore") or () if "extra ==" not in each]
    python = interpreter("fastmcp-tasks", "fastmcp==4.1.4", "fastmcp-tasks==4.1.4", "psycopg[binary]>=3.2,<4", *ours)
    if shutil.which("redis-server") is None:
        missing("redis-server is not on the path: apt-get install redis-server")

    with redis_server(tmp_path) as url, Worker.start(BACKENDS["docket-redis"], python) as worker:
        measured = [worker.run(order(scenario, url)) for scenario in ("flow", "create", "get")]

    assert [each["operations"] for each in measured] == [4, 4, 4]
    assert list((tmp_path / "appendonlydir").iterdir()), "what was acknowledged is on disk"


def test_a_redis_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    """A benchmark that is killed leaves no server behind."""
    if shutil.which("redis-server") is None:
        missing("redis-server is not on the path: apt-get install redis-server")
    program = (
        "import sys, time; from pathlib import Path; from benchmarks.redis_server import redis_server\n"
        "with redis_server(Path(sys.argv[1])) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = urlsplit(process.stdout.readline()).port or 0
        socket.create_connection(("127.0.0.1", port)).close()

        process.send_signal(signal.SIGKILL)

    ends = time.monotonic() + PATIENCE_SECONDS
    while answers(port):
        assert time.monotonic() < ends, "the server still answers"
        time.sleep(0.05)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
