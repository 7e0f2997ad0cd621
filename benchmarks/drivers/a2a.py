"""The peer: ``DatabaseTaskStore`` of a2a-sdk, on SQLite through aiosqlite or on PostgreSQL through asyncpg.

Runs in an environment of its own.

A flow is what a2a's request handler does with the store in a task's life: ``save`` a new task whose history holds the
request, ``get`` it, ``save`` it as working with a progress message, ``save`` it as completed with the result as an
artifact, ``get`` it. Its ``save`` writes the whole task, reading the row first. Every client is a user of its own,
which a2a checks on ``get``. Set for it as for ours: on SQLite WAL, synchronous as asked, a busy timeout of 10 s; on
PostgreSQL synchronous_commit as asked, and asyncpg's prepared statements, which it has by default.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from a2a.auth.user import User  # type: ignore[import-not-found]
from a2a.server.context import ServerCallContext  # type: ignore[import-not-found]
from a2a.server.tasks.database_task_store import DatabaseTaskStore  # type: ignore[import-not-found]
from a2a.types.a2a_pb2 import (  # type: ignore[import-not-found]
    ROLE_AGENT,
    ROLE_USER,
    TASK_STATE_COMPLETED,
    TASK_STATE_SUBMITTED,
    TASK_STATE_WORKING,
    Artifact,
    ListTasksRequest,
    Message,
    Part,
    Task,
    TaskStatus,
)
from sqlalchemy import event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, Driver


class _Client(User):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        self._name = f"client-{number}"

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


# A million saves would take longer than what is measured on them; every tenth copy keeps its owner.
_NUMBERS = (
    "WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < CAST(:copies AS BIGINT))"
)
_OF_COPIES = {
    "id": "substr(id, 1, 28) || substr(CAST(100000000 + i AS TEXT), 2)",
    "owner": "CASE i % 10 WHEN 0 THEN owner ELSE owner || (i % 10) END",
}


@dataclass(frozen=True, slots=True)
class _Held:
    """The task as the agent has it in memory, and whose it is."""

    task: Task
    context: ServerCallContext


class _A2ADriver(Driver[_Held]):
    def __init__(self, store: DatabaseTaskStore) -> None:
        self._store = store

    async def create(self, client: int) -> _Held:
        task_id, context_id = str(uuid4()), str(uuid4())
        task = Task(id=task_id, context_id=context_id, status=_status(TASK_STATE_SUBMITTED))
        task.history.append(_message(ROLE_USER, REQUEST_TEXT, task))
        held = _Held(task, ServerCallContext(user=_Client(client)))
        await self._store.save(task, held.context)
        return held

    async def get(self, held: _Held) -> None:
        if await self._store.get(held.task.id, held.context) is None:
            raise LookupError(held.task.id)

    async def progress(self, held: _Held) -> None:
        status = _status(TASK_STATE_WORKING)
        status.message.CopyFrom(_message(ROLE_AGENT, PROGRESS_TEXT, held.task))
        held.task.status.CopyFrom(status)
        await self._store.save(held.task, held.context)

    async def complete(self, held: _Held) -> None:
        held.task.status.CopyFrom(_status(TASK_STATE_COMPLETED))
        held.task.artifacts.append(Artifact(artifact_id=str(uuid4()), parts=[Part(text=RESULT_TEXT)]))
        await self._store.save(held.task, held.context)

    async def outcome(self, held: _Held) -> str:
        task = await self._store.get(held.task.id, held.context)
        if task is None or task.status.state != TASK_STATE_COMPLETED:
            raise LookupError(held.task.id)
        return str(task.artifacts[0].parts[0].text)

    async def keep(self, tasks: int) -> None:
        held = await self.create(client=0)
        await self.complete(held)
        names = self._store.task_model.__table__.columns.keys()
        values = ", ".join(_OF_COPIES.get(name, name) for name in names)
        copied = f"{_NUMBERS} INSERT INTO tasks ({', '.join(names)}) SELECT {values} FROM tasks, numbers WHERE id = :id"
        async with self._store.engine.begin() as connection:
            await connection.execute(text(copied), {"copies": tasks - 1, "id": held.task.id})

    async def page(self) -> int:
        found = await self._store.list(ListTasksRequest(page_size=50), ServerCallContext(user=_Client(0)))
        return len(found.tasks)


@asynccontextmanager
async def open_driver(place: str, durability: str) -> AsyncIterator[Driver[_Held]]:
    """Create the tables.

    Args:
        place: Path of an SQLite file, or URL of a PostgreSQL database.
        durability: ``full`` or ``normal``.
    """
    engine = _on_postgres(place, durability) if "://" in place else _on_sqlite(place, durability)
    store = DatabaseTaskStore(engine)
    try:
        await store.initialize()
        yield _A2ADriver(store)
    finally:
        await engine.dispose()


def _on_sqlite(path: str, durability: str) -> AsyncEngine:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 10})

    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={durability}")
        cursor.close()

    return engine


def _on_postgres(url: str, durability: str) -> AsyncEngine:
    settings = {"synchronous_commit": "on" if durability == "full" else "off"}
    return create_async_engine(
        make_url(url).set(drivername="postgresql+asyncpg"), connect_args={"server_settings": settings}
    )


def _status(state: int) -> TaskStatus:
    status = TaskStatus(state=state)
    status.timestamp.GetCurrentTime()
    return status


def _message(role: int, text: str, task: Task) -> Message:
    return Message(
        message_id=str(uuid4()), role=role, parts=[Part(text=text)], task_id=task.id, context_id=task.context_id
    )
