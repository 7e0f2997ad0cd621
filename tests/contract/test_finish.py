"""Progress and outcomes: what a handle may write, and what no handle can undo."""

import pytest

from taskstore import (
    EventKind,
    StoreOptions,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStatus,
)
from taskstore.store import open_observer

from .conftest import ALICE


async def test_the_operator_and_an_observer_cancel_and_leave_their_trace(store, database_url, clock):
    task, other = await store.create_task(auth=ALICE), await store.create_task(auth=None)

    await store.operator.cancel_task(task.task_id)
    async with open_observer(database_url, options=StoreOptions(clock=clock)) as observer:
        await observer.operator.cancel_task(other.task_id)
        with pytest.raises(TaskFinishedError):
            await observer.operator.cancel_task(task.task_id)
        details = await observer.operator.get_details(other.task_id)

    assert details.task.status is TaskStatus.CANCELLED
    assert (await store.operator.list_events(task.task_id))[-1].kind is EventKind.CANCELLED
    with pytest.raises(TaskNotFoundError):
        await store.operator.get_task("tsk_unknown")
