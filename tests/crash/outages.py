"""The ground that the laboratory stands on: a database, and what can be done to it while processes work on it."""

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import make_url

from taskstore.migrate import upgrade
from taskstore.testing import PostgresServer

from .workload import LEASE

Outage = Callable[[random.Random], Awaitable[None]]
"""Does something to the database, and returns when it is over."""

# Longer than the store waits for a lock, and than a lease of the laboratory.
_LOCK_SECONDS = 13.0
_ROOM = 64 * 1024


@dataclass(frozen=True)
class Ground:
    """A database, and its outages by name.

    Attributes:
        path: The file of a SQLite database.
        missing: Outages that this machine or this database does not allow, and why.
    """

    name: str
    url: str
    outages: Mapping[str, Outage] = field(default_factory=dict)
    path: Path | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def sqlite_ground(folder: Path, *, small_disk: bool = False) -> Iterator[Ground]:
    """A new database file; on a file system of its own that can be made full, if wanted."""
    with ExitStack() as stack:
        disk = stack.enter_context(_small_disk(folder)) if small_disk else None
        path = (folder if disk is None else disk.folder) / "tasks.db"
        outages: dict[str, Outage] = {"lock-held": lambda draw: asyncio.to_thread(_hold_sqlite, path)}
        if disk is not None:
            outages["disk-full"] = disk.fill
        yield Ground("sqlite", f"sqlite:///{path}", outages, path)


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _replace(path: Path) -> None:
    other = path.with_name("other.db")
    upgrade(f"sqlite:///{other}")
    _delete(path)
    other.replace(path)


LOSSES: Mapping[str, Callable[[Path], None]] = {"file-deleted": _delete, "file-replaced": _replace}
"""Ways to lose a SQLite database while stores have it open, and all that it held."""


def _hold_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(_LOCK_SECONDS)
        connection.execute("ROLLBACK")


@contextmanager
def postgres_ground(folder: Path, *, small_disk: bool = False) -> Iterator[Ground]:
    """A database on a server of its own, with fsync on."""
    with ExitStack() as stack:
        disk = stack.enter_context(_small_disk(folder)) if small_disk else None
        before, tempfile.tempdir = tempfile.tempdir, str(folder if disk is None else disk.folder)
        try:
            server = stack.enter_context(PostgresServer(settings={"max_connections": "300"}))
        finally:
            tempfile.tempdir = before
        url = server.create_database()

        async def server_killed(draw: random.Random) -> None:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(draw.uniform(0.1, 3))
            await asyncio.to_thread(server.restart)

        outages: dict[str, Outage] = {
            "server-killed": server_killed,
            "connections-cut": lambda draw: _cut_connections(server.url, url),
            "lock-held": lambda draw: asyncio.to_thread(_hold_postgres, url),
        }
        if disk is not None:

            async def disk_full(draw: random.Random) -> None:
                await disk.fill(draw)
                # What cannot write its log may have ended altogether.
                if not await asyncio.to_thread(_answers, server.url):
                    await asyncio.to_thread(server.restart)

            outages["disk-full"] = disk_full
        yield Ground("postgres", url, outages)


async def _cut_connections(maintenance_url: str, url: str) -> None:
    import psycopg

    async with await psycopg.AsyncConnection.connect(_plain(maintenance_url), autocommit=True) as connection:
        for _ in range(20):
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (make_url(url).database,)
            )
            await asyncio.sleep(0.1)


def _hold_postgres(url: str) -> None:
    import psycopg

    with psycopg.connect(_plain(url)) as connection:
        connection.execute("LOCK TABLE taskstore_tasks, taskstore_instances IN EXCLUSIVE MODE")
        time.sleep(_LOCK_SECONDS)
        connection.rollback()


def _answers(url: str) -> bool:
    import psycopg

    with suppress(psycopg.OperationalError), psycopg.connect(_plain(url), connect_timeout=10):
        return True
    return False


def _plain(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def can_mount() -> bool:
    """Tell whether this user may mount a file system, as a disk that gets full takes."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@dataclass(frozen=True)
class _SmallDisk:
    """A file system in memory that can be made as small as what it holds."""

    folder: Path

    async def fill(self, draw: random.Random) -> None:
        # Others write meanwhile, so it may be fuller than it was when it was measured.
        for attempt in range(20):
            used = shutil.disk_usage(self.folder).used + _ROOM * (1 + attempt)
            if self._resize(f"{used // 1024}k"):
                break
        else:
            raise RuntimeError(f"{self.folder} cannot be made smaller")
        await asyncio.sleep(draw.choice([2.0, 3 * LEASE.total_seconds()]))
        assert self._resize("75%")

    def _resize(self, size: str) -> bool:
        command = ["mount", "-o", f"remount,size={size}", str(self.folder)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextmanager
def _small_disk(parent: Path) -> Iterator[_SmallDisk]:
    folder = parent / "disk"
    folder.mkdir()
    parent.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=75%,mode=1777", "taskstore-crash", str(folder)], check=True)
    try:
        yield _SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
