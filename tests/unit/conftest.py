"""Fixtures of the unit tests: an open Database, and a URL for tests that concern SQLite alone."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from taskstore.database import Database


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
