"""Servers of the adapters as processes of their own, over HTTP; they end with the test."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

PATIENCE_SECONDS = 60
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server that prints its port when it listens: ``SCRIPT --port PORT --url URL``.

    Args:
        script: Name of a file in this folder.
        port: Where it listens; 0 leaves it to the system.
        environment: What it finds beside this process's own.
    """

    def __init__(self, script: str, database_url: str, *, port: int = 0, **environment: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A file, since nobody reads a pipe while the server runs.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), "--port", str(port), "--url", database_url],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert self.popen.stdout is not None
        listens_at = self.popen.stdout.readline().strip()
        assert listens_at, f"the server did not start: {self.end()}"
        self.port = int(listens_at)
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._errors, self.popen:
            self.popen.kill()

    @property
    def listens(self) -> bool:
        """Whether it still takes connections."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self, how: signal.Signals = signal.SIGKILL) -> str:
        """Send a signal, wait for the end, and return what it wrote to stderr."""
        self.popen.send_signal(how)
        return self.end()

    def end(self) -> str:
        """Wait for the end, and return what it wrote to stderr."""
        self.popen.wait(PATIENCE_SECONDS)
        self._errors.seek(0)
        return self._errors.read()
