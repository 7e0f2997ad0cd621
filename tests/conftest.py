"""Fixtures for every test are those that users get: databases and stores on each backend."""

import pytest

pytest_plugins = ["taskstore.testing.fixtures"]

# Needs the SDK 1.x; tests/adapters/test_mcp_v1.py runs the folder by name, in an environment that has it.
collect_ignore = ["mcp1"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests on asyncio alone, which is what the store supports."""
    return "asyncio"
