"""A store of one's own, with the contract of every store as its tests.

    pip install 'taskstore[postgres,testing]' && pytest examples/test_counting_store.py

PostgreSQL comes from where ``taskstore.testing.postgres`` says; ``-k sqlite`` does without.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest

from taskstore import AuthContext, StoreOptions, Task, TaskStore
from taskstore.testing import StoreContract, StoreOpener

pytest_plugins = ["taskstore.testing.fixtures"]  # in a project of your own: in the conftest.py at the root of the tests


class CountingStore(TaskStore):
    """Counts the tasks that each tool was asked for, as for a page of metrics."""

    created: Counter[str]

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, options: StoreOptions | None = None) -> AsyncIterator["CountingStore"]:
        """Open a store that has counted nothing yet."""
        async with super().open(url, options=options) as opened:
            store = cast(CountingStore, opened)
            store.created = Counter()
            yield store

    async def create_task(self, **arguments: Any) -> Task:
        """Create a task, and count it unless it existed."""
        task = await super().create_task(**arguments)
        if not task.existing:
            self.created[task.name or task.method] += 1
        return task


class TestCountingStore(StoreContract):
    """All that a store promises, and what this one adds."""

    @pytest.fixture
    def store_opener(self, database_url: str) -> StoreOpener:
        """Open the store that is tested; without this, it would be TaskStore itself."""
        return partial(CountingStore.open, database_url)

    async def test_a_repeated_create_counts_once(self, store: CountingStore) -> None:
        """A client that asks again after a lost answer gets the task that is there."""
        for _ in range(2):
            await store.create_task(auth=AuthContext(subject="alice"), name="report", idempotency_key="k")

        assert store.created == {"report": 1}
