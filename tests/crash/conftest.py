"""Start workers, and kill them."""

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

WORKER = Path(__file__).with_name("worker.py")

# How many times as long or as often processes shall be let loose on each other.
THOROUGH = int(os.environ.get("TASKSTORE_TEST_THOROUGH", "1"))


class Worker:
    """A process at work on a store."""

    def __init__(self, url: str, job: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), url, job, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """Wait for what it tells next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended without a word, exit code {self.process.wait()}"
        told: dict[str, Any] = json.loads(line)
        return told

    def go_on(self) -> None:
        """Let it go on that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait for its end; return its exit code, and all that it told since it was heard last."""
        told, _ = self.process.communicate(timeout=300 * THOROUGH)
        return self.process.returncode, [json.loads(line) for line in told.splitlines()]


@pytest.fixture
def start(database_url: str) -> Iterator[Callable[..., Worker]]:
    """Start a worker on the test's database; none outlives the test."""
    with ExitStack() as stack:

        def start_one(job: str, *arguments: str) -> Worker:
            worker = Worker(database_url, job, *arguments)
            stack.callback(worker.process.communicate)
            stack.callback(worker.process.kill)
            return worker

        yield start_one
