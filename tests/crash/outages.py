"""The ground that the laboratory stands on: a database, and what can be done to it while processes work on it."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from taskstore.testing import PostgresServer

Cause = Callable[[random.Random], Awaitable[None]]


@dataclass(frozen=True)
class Outage:
    """Something that happens to the database; when ``cause`` returns it is over."""

    name: str
    cause: Cause


@dataclass(frozen=True)
class Ground:
    """A database, and its outages by name."""

    name: str
    url: str
    outages: dict[str, Outage] = field(default_factory=dict)


def _ground(name: str, url: str, **causes: Cause) -> Ground:
    outages = [Outage(name.replace("_", "-"), cause) for name, cause in causes.items()]
    return Ground(name, url, {outage.name: outage for outage in outages})


# Longer than the store waits for a lock.
_LOCK_SECONDS = 13.0


@contextmanager
def sqlite_ground(folder: Path) -> Iterator[Ground]:
    """A new database file."""
    path = folder / "tasks.db"

    async def lock_held(draw: random.Random) -> None:
        def hold() -> None:
            with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                time.sleep(_LOCK_SECONDS)
                connection.execute("ROLLBACK")

        await asyncio.to_thread(hold)

    yield _ground("sqlite", f"sqlite:///{path}", lock_held=lock_held)


@contextmanager
def postgres_ground() -> Iterator[Ground]:
    """A database on a server of its own, with fsync on, that can be killed."""
    with PostgresServer(settings={"max_connections": "300"}) as server:
        yield _ground("postgres", server.create_database())
