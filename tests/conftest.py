"""Fixtures for every test are those that users get: databases and stores on each backend."""

import pytest

pytest_plugins = ["taskstore.testing.fixtures"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests on asyncio alone, which is what the store supports."""
    return "asyncio"
