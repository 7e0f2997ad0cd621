"""What can be measured, in words and as an order to a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One store in one setting.

    Attributes:
        driver: Module under ``benchmarks.drivers``; its docstring says what exactly a flow is there.
        durability: ``full`` or ``normal``, as the driver takes it.
        survives: What the durability means, for the table.
        needs_postgres: Whether its place is a PostgreSQL database; else it is the path of an SQLite file.
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
    needs_postgres: bool = False
    without: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


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
            needs_postgres=True,
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
            needs_postgres=True,
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
            needs_postgres=True,
            without=(*_ONLY_OURS, "list"),
            durability="full",
            survives="power loss (fsync, synchronous_commit on)",
        ),
    )
}
