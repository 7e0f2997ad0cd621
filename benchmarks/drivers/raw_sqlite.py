"""sqlite3 of the standard library, as a yardstick: what the disk and SQLite allow to one writer in Python.

One connection, WAL, synchronous FULL, a table of twelve columns with time-ordered ids and three indexes; every write
is a transaction of its own. A flow is INSERT, SELECT, UPDATE, UPDATE, SELECT by primary key. Nothing else is done: no
checks, no history, no owner, no thread. It blocks the event loop, which a server could not afford, so more clients
make it no faster.
"""

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from secrets import token_hex
from time import time_ns

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver

_TABLE = """
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, status TEXT NOT NULL, status_message TEXT,
    progress REAL, created_at INTEGER NOT NULL, last_updated_at INTEGER NOT NULL, finished_at INTEGER,
    expires_at INTEGER, request BLOB, result BLOB
);
"""
INDEXES = """
CREATE INDEX by_owner ON tasks (owner, created_at, task_id);
CREATE INDEX by_expiry ON tasks (expires_at) WHERE finished_at IS NOT NULL;
CREATE INDEX live ON tasks (owner) WHERE finished_at IS NULL;
"""
INSERT = (
    "INSERT INTO tasks (task_id, owner, name, status, created_at, last_updated_at, expires_at, request)"
    " VALUES (?, ?, 'report', 'working', ?, ?, ?, ?)"
)
SELECT = (
    "SELECT task_id, owner, name, status, status_message, progress, created_at, last_updated_at, finished_at,"
    " expires_at FROM tasks WHERE task_id = ?"
)
PROGRESS = "UPDATE tasks SET progress = ?, status_message = ?, last_updated_at = ? WHERE task_id = ?"
COMPLETE = "UPDATE tasks SET status = 'completed', result = ?, finished_at = ?, last_updated_at = ? WHERE task_id = ?"
OUTCOME = "SELECT status, result FROM tasks WHERE task_id = ?"
_PAGE = SELECT.replace("WHERE task_id = ?", "WHERE owner = 'client-0' ORDER BY created_at DESC, task_id DESC LIMIT 50")
_COPY = """
    WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)
    INSERT INTO tasks SELECT
        substr(task_id, 1, 36) || printf('%08d', i), CASE i % 10 WHEN 0 THEN owner ELSE owner || (i % 10) END,
        name, status, status_message, progress, created_at - i, last_updated_at, finished_at, expires_at, request,
        result
    FROM tasks, numbers WHERE task_id = ?
"""
_HOUR_MS = 3_600_000


class _RawDriver(Driver[str]):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def create(self, client: int) -> str:
        row = new_row(client)
        with self._transaction():
            self._connection.execute(INSERT, row)
        return row[0]

    async def get(self, held: str) -> None:
        if self._connection.execute(SELECT, (held,)).fetchone() is None:
            raise LookupError(held)

    async def progress(self, held: str) -> None:
        with self._transaction():
            self._connection.execute(PROGRESS, (0.3, PROGRESS_TEXT, now_ms(), held))

    async def complete(self, held: str) -> None:
        now = now_ms()
        with self._transaction():
            self._connection.execute(COMPLETE, (json.dumps({"text": RESULT_TEXT}).encode(), now, now, held))

    async def outcome(self, held: str) -> str:
        status, result = self._connection.execute(OUTCOME, (held,)).fetchone()
        if status != "completed":
            raise LookupError(f"The task is {status}.")
        return str(json.loads(result)["text"])

    async def keep(self, tasks: int) -> None:
        held = await self.create(client=0)
        await self.complete(held)
        with self._transaction():
            self._connection.execute(_COPY, (tasks - 1, held))

    async def page(self) -> int:
        return len(self._connection.execute(_PAGE).fetchall())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        yield
        self._connection.execute("COMMIT")


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[str]]:
    """Create a database file; ``durability`` is the synchronous mode, ``full`` or ``normal``."""
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={durability}")
        connection.executescript(_TABLE + INDEXES)
        yield _RawDriver(connection)


def new_row(client: int) -> tuple[str, str, int, int, int, bytes]:
    """Make the values that INSERT takes."""
    now = now_ms()
    request = json.dumps({"topic": REQUEST_TEXT}).encode()
    return f"{now:012x}{token_hex(16)}", f"client-{client}", now, now, now + _HOUR_MS, request


def now_ms() -> int:
    """Return the present, in milliseconds UTC."""
    return time_ns() // 1_000_000
