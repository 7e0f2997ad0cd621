"""A Redis server that has on disk what it acknowledges, for the peers that need one."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environments import PeerUnavailableError

_PATIENCE_SECONDS = 30.0

# The server ends when the pipe does, which it does too when this process is killed.
_UNTIL_END_OF_INPUT = '"$@" & read -r _; kill $!; wait'


def redis_version() -> str:
    """Return the version of the server on the path.

    Raises:
        PeerUnavailableError: There is none.
    """
    told = subprocess.run([_program(), "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return next((word.removeprefix("v=") for word in told.split() if word.startswith("v=")), "unknown")


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a server on a free port of 127.0.0.1, with its data in a folder; yield its URL.

    It has ``appendfsync always``: a command is answered when it is on disk.

    Raises:
        PeerUnavailableError: There is none on the path, or it did not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = ["--bind", "127.0.0.1", "--port", str(port)]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(folder)]
    command = ["/bin/sh", "-c", _UNTIL_END_OF_INPUT, "sh", _program(), *listening, *durable]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.communicate()


def _program() -> str:
    program = shutil.which("redis-server")
    if program is None:
        raise PeerUnavailableError("redis-server is not on the path. Install it: apt-get install redis-server")
    return program


def _wait_until_it_listens(port: int) -> None:
    ends = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError as error:
            if time.monotonic() > ends:
                raise PeerUnavailableError(f"redis-server did not listen after {_PATIENCE_SECONDS:.0f} s.") from error
            time.sleep(0.01)
        else:
            return
