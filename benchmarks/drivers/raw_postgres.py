"""psycopg, as a yardstick: what the server, the disk and one connection allow to one writer in Python.

One connection in autocommit, so that every statement is a transaction of its own and one round trip; prepared
statements; the table, the indexes and the flow of ``raw_sqlite``. Nothing else is done: no checks, no history, no
owner, no thread. It blocks the event loop, which a server could not afford, so more clients make it no faster.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import psycopg
from sqlalchemy import make_url

from benchmarks.drivers import raw_sqlite
from benchmarks.work import PROGRESS_TEXT, RESULT_TEXT, Driver

_TABLE = """
CREATE TABLE tasks (
    task_id text COLLATE "C" PRIMARY KEY, owner text NOT NULL, name text, status text NOT NULL, status_message text,
    progress float8, created_at bigint NOT NULL, last_updated_at bigint NOT NULL, finished_at bigint,
    expires_at bigint, request bytea, result bytea
);
"""
_INSERT, _SELECT, _PROGRESS, _COMPLETE, _OUTCOME = (
    statement.replace("?", "%s")
    for statement in (
        raw_sqlite.INSERT,
        raw_sqlite.SELECT,
        raw_sqlite.PROGRESS,
        raw_sqlite.COMPLETE,
        raw_sqlite.OUTCOME,
    )
)


class _RawDriver(Driver[str]):
    def __init__(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        self._connection = connection

    async def create(self, client: int) -> str:
        row = raw_sqlite.new_row(client)
        self._connection.execute(_INSERT, row)
        return row[0]

    async def get(self, held: str) -> None:
        if self._connection.execute(_SELECT, (held,)).fetchone() is None:
            raise LookupError(held)

    async def progress(self, held: str) -> None:
        self._connection.execute(_PROGRESS, (0.3, PROGRESS_TEXT, raw_sqlite.now_ms(), held))

    async def complete(self, held: str) -> None:
        now = raw_sqlite.now_ms()
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
        connection.execute(_TABLE + raw_sqlite.INDEXES, prepare=False)  # it is several statements
        yield _RawDriver(connection)
