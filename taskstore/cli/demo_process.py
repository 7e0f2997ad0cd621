"""The server process of ``taskstore demo``: started, waited for, killed; it never outlives the demo."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from taskstore.cli.demo_server import Configuration
from taskstore.errors import TaskStoreError

START_TIMEOUT = timedelta(seconds=20)
STOP_TIMEOUT = timedelta(seconds=5)

_PAUSE_SECONDS = 0.02
_TAIL_LINES = 20


class DemoError(TaskStoreError):
    """The demo could not be played to its end; what its server last logged is in the message."""

    def __init__(self, problem: str, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        super().__init__("\n".join((problem, "The server's log ends with:", *lines[-_TAIL_LINES:])))


class ServerProcess:
    """One run of the demo's server. Leaving the block ends it, if need be by force.

    Args:
        log: File that gets what the server prints, after what is in it.
    """

    def __init__(self, configuration: Configuration, log: Path) -> None:
        self._configuration, self._log = configuration, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "taskstore.cli.demo_server"],
                # The server ends when this pipe does, so it outlives no way in which this process may die.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the demo, which then ends its server
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        assert self._process.stdin is not None, "asked for"
        try:
            self._process.stdin.write(self._configuration.to_json().encode())
            self._process.stdin.flush()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT.total_seconds())
        self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL, which no process can catch; it is gone when this returns."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def wait_until_ready(self) -> None:
        """Poll the server's endpoint until it answers, whatever it answers.

        Raises:
            DemoError: The process ended, or does not answer in time.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT.total_seconds()), httpx2.AsyncClient(trust_env=False) as http:
                while not await self._answers(http):
                    if self._process.poll() is not None:
                        raise self._failure(f"ended with code {self._process.returncode} instead of serving")
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as late:
            raise self._failure(f"did not answer within {START_TIMEOUT.total_seconds():g} s") from late

    async def _answers(self, http: httpx2.AsyncClient) -> bool:
        try:
            await http.get(self._configuration.url)
        except httpx2.TransportError:
            return False
        return True

    def _failure(self, problem: str) -> DemoError:
        return DemoError(f"The demo's server {problem}.", self._log)
