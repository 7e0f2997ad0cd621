"""pytest fixtures: databases on both backends, stores on them, a clock moved by hand, processes that die.

In the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["taskstore.testing.fixtures"]

``store`` is an open store and ``peer`` another one on the same database, as a second server process would be; a test
that takes one runs on SQLite and on PostgreSQL. Override ``store_opener`` to have another store opened, and
``database_url`` to have it on other databases. Time stands still until a test moves ``clock``. Tests and fixtures run
as coroutines by anyio's plugin for pytest.
"""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from taskstore import StoreOptions, Task, TaskStore
from taskstore.migrate import upgrade
from taskstore.testing.clock import ManualClock
from taskstore.testing.crashing import crash as crash_store
from taskstore.testing.postgres import PostgresServer, PostgresUnavailableError
from taskstore.testing.protocols import ALICE, Crash, Finish, OpenStore, StoreOpener

BACKENDS = ("sqlite", "postgres")

# --- databases


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for the whole session; without one a test is skipped at home and fails in CI."""
    try:
        with PostgresServer() as server:
            yield server
    except PostgresUnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> str:
    """URL of a migrated database, made to be copied: stay disconnected from it."""
    url = postgres_server.create_database()
    upgrade(url)
    return url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file, made to be copied."""
    path = tmp_path_factory.mktemp("template") / "tasks.db"
    upgrade(f"sqlite:///{path}")
    assert not path.with_name("tasks.db-wal").exists(), "upgrade() left a connection open; a copy would lack the log"
    return path


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated database that no other test sees, on each backend."""
    if request.param == "sqlite":
        path = tmp_path / "tasks.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create_database(template=request.getfixturevalue("postgres_template"))
        yield url
        server.drop_database(url)


@pytest.fixture(params=BACKENDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without any table that no other test sees, on each backend."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create_database()
        yield url
        server.drop_database(url)


# --- stores


@pytest.fixture
def clock() -> ManualClock:
    """The clock of every store that ``open_store`` opens."""
    return ManualClock()


@pytest.fixture
def store_opener(database_url: str) -> StoreOpener:
    """How a store is opened; override it to test another store."""
    return partial(TaskStore.open, database_url)


@pytest.fixture
async def open_store(store_opener: StoreOpener, clock: ManualClock) -> AsyncIterator[OpenStore]:
    """Open as many stores on one database as a test wants; without upkeep, unless it asks for it."""
    async with AsyncExitStack() as stack:

        async def open_one(**settings: Any) -> TaskStore:
            options = StoreOptions(**{"clock": clock, "upkeep": False, **settings})
            return await stack.enter_async_context(store_opener(options=options))

        yield open_one


@pytest.fixture
async def store(open_store: OpenStore) -> TaskStore:
    """An open store."""
    return await open_store()


@pytest.fixture
async def peer(open_store: OpenStore, store: TaskStore) -> TaskStore:
    """A second store on the same database, opened after ``store``."""
    return await open_store()


@pytest.fixture
def crash() -> Crash:
    """Make a store's process look dead to all others, while its coroutines run on."""
    return crash_store


@pytest.fixture
def finish() -> Finish:
    """Create a task and complete it."""

    async def finish_one(store: TaskStore, result: Any = None, **create: Any) -> Task:
        task = await store.create_task(**{"auth": ALICE, **create})
        return await store.handle(task).complete(result or {"ok": True})

    return finish_one
