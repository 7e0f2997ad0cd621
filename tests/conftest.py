"""Fixtures for every test: a database on each backend, PostgreSQL started at most once and only when asked for."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskstore.migrate import upgrade
from taskstore.testing import PostgresServer, PostgresUnavailableError

BACKENDS = ("sqlite", "postgres")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests on asyncio alone, which is what the store supports."""
    return "asyncio"


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
