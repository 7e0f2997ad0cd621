"""psycopg, as a yardstick: what the server, the disk and one connection allow to one writer in Python.

One connection in autocommit, so that every statement is a transaction of its own and one round trip; prepared
statements; the table, the indexes and the flow of ``raw_sqlite``. Nothing else is done: no checks, no history, no
owner, no thread. It blocks the event loop, which a server could not afford, so more clients make it no faster.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from secrets import token_hex
from time import time_ns

import psycopg
from sqlalchemy import make_url

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver

_SCHEMA = """
CREATE TABLE tasks (
    task_id text COLLATE "C" PRIMARY KEY, owner text NOT NULL, name text, status text NOT NULL, status_message text,
    progress float8, created_at bigint NOT NULL, last_updated_at bigint NOT NULL, finished_at bigint,
    expires_at bigint, request bytea, result bytea
);
CREATE INDEX by_owner ON tasks (owner, created_at, task_id);
CREATE INDEX by_expiry ON tasks (expires_at) WHERE finished_at IS NOT NULL;
CREATE INDEX live ON tasks (owner) WHERE finished_at IS NULL;
"""
_INSERT = (
    "INSERT INTO tasks (task_id, owner, name, status, created_at, last_updated_at, expires_at, request)"
    " VALUES (%s, %s, 'report', 'working', %s, %s, %s, %s)"
)
_SELECT = (
    "SELECT task_id, owner, name, status, status_message, progress, created_at, last_updated_at, finished_at,"
    " expires_at FROM tasks WHERE task_id = %s"
)
_PROGRESS = "UPDATE tasks SET progress = %s, status_message = %s, last_updated_at = %s WHERE task_id = %s"
_COMPLETE = (
    "UPDATE tasks SET status = 'completed', result = %s, finished_at = %s, last_updated_at = %s WHERE task_id = %s"
)
_OUTCOME = "SELECT status, result FROM tasks WHERE task_id = %s"
_HOUR_MS = 3_600_000


class _RawDriver(Driver[str]):
    def __init__(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        self._connection = connection

    async def create(self, client: int) -> str:
        now = _now_ms()
        task_id = f"{now:012x}{token_hex(16)}"
        request = json.dumps({"topic": REQUEST_TEXT}).encode()
        self._connection.execute(_INSERT, (task_id, f"client-{client}", now, now, now + _HOUR_MS, request))
        return task_id

    async def get(self, held: str) -> None:
        if self._connection.execute(_SELECT, (held,)).fetchone() is None:
            raise LookupError(held)

    async def progress(self, held: str) -> None:
        self._connection.execute(_PROGRESS, (0.3, PROGRESS_TEXT, _now_ms(), held))

    async def complete(self, held: str) -> None:
        now = _now_ms()
        self._connection.execute(_COMPLETE, (json.dumps({"text": RESULT_TEXT}).encode(), now, now, held))

    async def outcome(self, held: str) -> str:
        row = self._connection.execute(_OUTCOME, (held,)).fetchone()
        status, result = row or (None, None)
        if status != "completed" or not isinstance(result, bytes):
            raise LookupError(f"The task is {status}.")
        return str(json.loads(result)["text"])


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[str]]:
    """Create the table in a database; ``durability`` is ``full`` or ``normal``."""
    url = make_url(place).set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(url, autocommit=True, prepare_threshold=0)) as connection:
        connection.execute(f"SET synchronous_commit TO {'on' if durability == 'full' else 'off'}")
        connection.execute(_SCHEMA, prepare=False)  # it is several statements
        yield _RawDriver(connection)


def _now_ms() -> int:
    return time_ns() // 1_000_000
