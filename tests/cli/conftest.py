"""The command line as its users meet it: a process of its own, its output and its exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import pytest

# What would colour the output, or change its width or its database, depending on where the tests run.
UNWANTED = (
    "COLUMNS",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "PY_COLORS",
    "TASKSTORE_BINDING_SECRET",
    "TASKSTORE_KEYS",
    "TERMINAL_WIDTH",
)


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Standard error without line breaks and frames, which depend on the terminal's width."""
        return " ".join(word for word in self.err.split() if word != "│")


def environment(**added: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in UNWANTED}, **added}


def run_command(*arguments: str, program: tuple[str, ...] = ("-m", "taskstore"), **added: str) -> Ran:
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment(**added), check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run() -> Callable[..., Ran]:
    """Run a command: ``run("ls", url)``; keywords are environment variables."""
    return run_command


@pytest.fixture
def run_beside() -> Callable[..., Any]:
    """Run a command while this test's event loop goes on: ``await run_beside("ls", url)``."""

    async def run_in_thread(*arguments: str, **added: str) -> Ran:
        return await anyio.to_thread.run_sync(lambda: run_command(*arguments, **added))

    return run_in_thread
