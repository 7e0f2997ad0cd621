"""Fixtures of the unit tests: an open Database, and URLs for tests that concern one backend alone."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from taskstore.database import Database
from taskstore.testing import PostgresServer


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An open, migrated database, on each backend."""
    with closing(Database(database_url)) as opened:
        yield opened


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """URL of a migrated SQLite file that no other test sees."""
    shutil.copyfile(sqlite_template, tmp_path / "tasks.db")
    return f"sqlite:///{tmp_path / 'tasks.db'}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    """URL of a migrated PostgreSQL database that no other test sees."""
    url = postgres_server.create_database(template=postgres_template)
    yield url
    postgres_server.drop_database(url)
