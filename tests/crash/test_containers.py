"""Containers that share a SQLite file under one kernel: a lock proves a death that no process table shows."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest

from taskstore import AuthContext, StoreOptions, TaskStatus, TaskStore
from taskstore.database import Database
from taskstore.testing import ManualClock

ALICE = AuthContext(subject="alice")
# A process in another pid namespace cannot be had everywhere; to the judge it is its machine id that says so.
NEIGHBOUR = """
import asyncio, sys
from taskstore import AuthContext, TaskStore, instances
boot, _, _ = instances.machine_id().partition("/")
instances.machine_id = lambda: f"{sys.argv[2] or boot}/pid:[1]"
async def main():
    async with TaskStore.open(sys.argv[1]) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"))
        print(task.task_id, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await store.handle(task).complete({"ok": True})
asyncio.run(main())
"""

Neighbour = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture
def neighbour(url: str) -> Iterator[Neighbour]:
    """Start a server in a container beside this one; returns the process and the id of the task that it works on."""
    with ExitStack() as stack:

        def start(boot: str = "") -> tuple["subprocess.Popen[str]", str]:
            process = subprocess.Popen(
                [sys.executable, "-c", NEIGHBOUR, url, boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield start


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def locks(folder: Path) -> list[Path]:
    return list(folder.glob("*.lock"))


async def test_a_container_that_was_restarted_gives_the_verdict_at_once(neighbour, url, tmp_path):
    """A restart has a new pid namespace on the same volume; a lease of 30 s would pass before anybody is told."""
    process, task_id = neighbour()
    kill(process)

    async with TaskStore.open(url) as store:
        task = await store.get_task(task_id, auth=ALICE)
        kept = locks(tmp_path)

    assert task.status is TaskStatus.FAILED
    assert len(kept) == 1  # its own; that of the dead is gone with its row
    assert locks(tmp_path) == []


async def test_a_container_that_lives_keeps_its_tasks(neighbour, url):
    """Others open, look and stop beside it, again and again."""
    process, task_id = neighbour()

    for _ in range(20):
        async with TaskStore.open(url) as store:
            assert (await store.recover()).recovered == ()
    process.communicate("go on\n", timeout=60)

    async with TaskStore.open(url) as store:
        assert (await store.get_task(task_id, auth=ALICE)).status is TaskStatus.COMPLETED


@pytest.mark.parametrize("missing", ["the file", "the kernel"])
async def test_without_the_proof_a_whole_lease_must_pass(neighbour, url, tmp_path, missing):
    """Nobody may be declared dead because somebody tidied up, or because a lock means nothing from another machine."""
    process, task_id = neighbour("another-boot" if missing == "the kernel" else "")
    if missing == "the file":
        for path in locks(tmp_path):
            path.unlink()
    kill(process)
    clock = ManualClock()

    async with TaskStore.open(url, options=StoreOptions(clock=clock, upkeep=False)) as store:
        seen = []
        for _ in range(5):
            await store.recover()
            seen.append((await store.get_task(task_id, auth=ALICE)).status)
            clock.advance(timedelta(seconds=10))

    assert seen == [TaskStatus.WORKING] * 3 + [TaskStatus.FAILED] * 2


async def test_a_database_whose_files_nobody_shares_has_no_lock_files(tmp_path):
    """Nor has one in memory: there is nobody who could look."""
    async with TaskStore.open("sqlite://") as store:
        await store.create_task(auth=ALICE)
        with closing(Database("sqlite://")) as database:
            assert database.lock_path("ins_x") is None

    assert locks(tmp_path) == []
