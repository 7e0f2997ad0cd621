"""Fixtures for every test are those that users get: databases and stores on each backend."""

from collections.abc import Iterator

import pytest

from taskstore.testing import PostgresServer

pytest_plugins = ["taskstore.testing.fixtures"]

# Needs the SDK 1.x; tests/adapters/test_mcp_v1.py runs the folder by name, in an environment that has it.
collect_ignore = ["mcp1"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests on asyncio alone, which is what the store supports."""
    return "asyncio"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    """URL of a migrated PostgreSQL database that no other test sees."""
    url = postgres_server.create_database(template=postgres_template)
    yield url
    postgres_server.drop_database(url)
