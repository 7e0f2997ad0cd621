"""A machine of the laboratory: a process that has imported the store, and forks workers that open it.

Forking takes a fraction of what a new interpreter takes, so that many more workers can be killed in the same time. Each
worker is a process of its own all the same, with its own connections and threads. A machine may have a pid namespace
of its own: then its workers are on another machine as far as the store can tell.
"""

import asyncio
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
_PR_SET_PDEATHSIG = 1


def can_have_another() -> bool:
    """Tell whether this system lets a machine have a pid namespace of its own."""
    return shutil.which("unshare") is not None and subprocess.run([*_NAMESPACE, "true"], check=False).returncode == 0


class Machine:
    """The laboratory's side: starts workers, signals them, and hears of their ends.

    Args:
        heard: Called with each message: ``started`` (a life and its pid), ``ended`` (pid and code), ``stopped`` (pid).
    """

    def __init__(
        self, *, own_namespace: bool, errors: Path, heard: "Callable[[Machine, dict[str, Any]], None]"
    ) -> None:
        self.is_elsewhere = own_namespace
        self._errors, self._heard = errors, heard
        self._process: asyncio.subprocess.Process | None = None
        self._hearing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "tests.crash.machine"]
        with self._errors.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(_NAMESPACE if self.is_elsewhere else ()),
                *command,
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal is for the laboratory
            )
        self._hearing = asyncio.create_task(self._hear(self._process))

    def fork(self, spec: dict[str, object]) -> None:
        """Start a worker; see ``workload.main``."""
        self._tell(start=spec)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Signal a worker, unless it has ended."""
        self._tell(signal=int(number), pid=pid)

    async def stop(self) -> None:
        """End the machine; workers that are left are killed."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._hearing is not None
        self._process.stdin.close()
        await self._hearing
        await self._process.wait()

    def _tell(self, **order: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._heard(self, json.loads(line))


# --- the machine's side


def serve() -> None:
    """Do as told on standard input until it ends; then kill what is left."""
    from tests.crash import points

    points.install()
    from tests.crash import workload

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: set[int] = set()
    unread = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "start" in order:
                    pid = _fork(workload.main, order["start"])
                    children.add(pid)
                    _say(started=order["start"]["life"], pid=pid)
                elif order["pid"] in children:
                    os.kill(order["pid"], order["signal"])
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(work: Callable[..., None], spec: dict[str, object]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            work(**spec)
            code = 0
    except BaseException:  # noqa: BLE001  whatever it is, the child must not go on as the machine
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            _say(stopped=pid)
        else:
            children.discard(pid)
            _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(**facts: object) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    serve()
