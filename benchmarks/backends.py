"""What can be measured, in words and as an order to a worker."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One store in one setting.

    Attributes:
        driver: Module under ``benchmarks.drivers``; its docstring says what exactly a flow is there.
        durability: ``full`` or ``normal``, as the driver takes it.
        survives: What the durability means, and in parentheses how.
        place: Where its data is: at a path on the disk that is measured, in ``memory``, on a ``postgres`` or ``redis``
            server that the session starts, or at the ``url`` of a user's own database.
        kept: Tasks that are in the store before each run.
        packages: Distributions whose versions the report names.
        without: Scenarios that it has no counterpart of.
        requirements: Of a peer that gets an environment of its own, pinned; empty for what runs in ours.
    """

    name: str
    driver: str
    what: str
    durability: str
    survives: str
    packages: tuple[str, ...] = ()
    place: Literal["disk", "memory", "postgres", "redis", "url"] = "disk"
    kept: int = 0
    without: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


def survives(backend: Backend) -> str:
    """Say what a store survives in words that backends share, without the how."""
    return backend.survives.partition(" (")[0]


_OURS = ("taskstore", "SQLAlchemy", "pydantic")

_ONLY_OURS = ("adapter", "wait", "cancel", "recover", "sweep", "growth")

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            name="sqlite",
            driver="ours",
            what="taskstore on SQLite",
            packages=_OURS,
            durability="full",
            survives="power loss (WAL, synchronous FULL)",
        ),
        Backend(
            name="sqlite-normal",
            driver="ours",
            what="taskstore on SQLite",
            packages=_OURS,
            durability="normal",
            survives="death of the process (WAL, synchronous NORMAL)",
        ),
        Backend(
            name="postgres",
            driver="ours",
            what="taskstore on PostgreSQL",
            durability="full",
            survives="power loss (fsync, synchronous_commit on)",
            packages=(*_OURS, "psycopg"),
            place="postgres",
        ),
        Backend(
            name="url",
            driver="ours",
            what="taskstore on the database of --url",
            durability="full",
            survives="power loss (if the disk flushes, and the server is set to)",
            packages=_OURS,
            place="url",
        ),
        Backend(
            name="memory",
            driver="ours",
            what="taskstore on SQLite in memory",
            packages=_OURS,
            durability="normal",
            survives="nothing",
            place="memory",
            without=("wait", "list", "recover", "sweep", "growth"),
        ),
        Backend(
            name="docket-redis",
            driver="docket",
            what="pydocket on Redis, as under fastmcp-tasks",
            durability="full",
            survives="power loss (appendfsync always)",
            packages=("pydocket", "redis"),
            place="redis",
            without=(*_ONLY_OURS, "list"),
            requirements=("pydocket==0.27.0",),
        ),
        *(
            Backend(
                name=name,
                driver="sdk_memory",
                what=f"the in-memory task store of the SDK 1.x, {kept:,} tasks kept",
                durability="none",
                survives="nothing",
                packages=("mcp", "pydantic"),
                place="memory",
                kept=kept,
                without=_ONLY_OURS,
                requirements=("mcp==1.30.0",),
            )
            for name, kept in (("sdk-memory", 0), ("sdk-memory-1k", 1_000), ("sdk-memory-10k", 10_000))
        ),
        Backend(
            name="filesystem",
            driver="filesystem",
            what="one JSON file a task, without a store",
            durability="full",
            survives="power loss (fsync of file and folder)",
            without=(*_ONLY_OURS, "list"),
        ),
        Backend(
            name="a2a-sqlite",
            driver="a2a",
            what="DatabaseTaskStore of a2a-sdk on SQLite",
            durability="full",
            survives="power loss (WAL, synchronous FULL)",
            packages=("a2a-sdk", "SQLAlchemy", "aiosqlite", "protobuf"),
            without=_ONLY_OURS,
            requirements=("a2a-sdk[sqlite]==1.3.0", "aiosqlite==0.22.1"),
        ),
        Backend(
            name="a2a-postgres",
            driver="a2a",
            what="DatabaseTaskStore of a2a-sdk on PostgreSQL",
            durability="full",
            survives="power loss (fsync, synchronous_commit on)",
            packages=("a2a-sdk", "SQLAlchemy", "asyncpg", "protobuf"),
            place="postgres",
            without=_ONLY_OURS,
            requirements=("a2a-sdk[postgresql]==1.3.0", "asyncpg==0.32.0"),
        ),
        Backend(
            name="raw-sqlite",
            driver="raw_sqlite",
            what="sqlite3 without a store, one writer",
            without=_ONLY_OURS,
            durability="full",
            survives="power loss (WAL, synchronous FULL)",
        ),
        Backend(
            name="raw-postgres",
            driver="raw_postgres",
            what="psycopg without a store, one connection",
            packages=("psycopg",),
            place="postgres",
            without=(*_ONLY_OURS, "list"),
            durability="full",
            survives="power loss (fsync, synchronous_commit on)",
        ),
    )
}
