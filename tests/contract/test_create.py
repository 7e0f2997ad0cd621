"""Creating tasks: durable, bound, with the lifetime asked for."""

import pytest

from taskstore import LeaseLostError, StoreOptions, TaskStore
from taskstore.store import open_observer
from taskstore.testing import ManualClock

from .conftest import ALICE


async def test_an_observer_creates_nothing(store, database_url: str, clock: ManualClock):
    """A store that runs nothing must not own tasks: nobody could ever prove its death."""
    async with open_observer(database_url, options=StoreOptions(clock=clock)) as observer:
        with pytest.raises(LeaseLostError):
            await observer.create_task(auth=ALICE)

        assert (await observer.operator.health()).instances == 1


async def test_a_store_in_memory_serves_a_whole_task():
    """The quickest way to try the library, and what many test suites use."""
    async with TaskStore.open("sqlite://") as store:
        task = await store.create_task(auth=None)
        async with store.handle(task) as handle:
            await handle.progress(1, total=2, message="half")
            await handle.complete({"ok": True})

        outcome = await store.get_outcome(task.task_id, auth=None)

    assert outcome.result == {"ok": True}
