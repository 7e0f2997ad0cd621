"""Progress and outcomes: what a handle may write, and what no handle can undo."""

import asyncio

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


async def test_its_own_finish_does_not_look_like_a_cancellation_to_the_work(store, monkeypatch):
    """Between the commit and its report the row is finished already; whoever looks then must not stop the work."""
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    parts = store._parts
    write_unit, read_unit, report, seen = parts.write_unit, parts.read_unit, asyncio.Event(), asyncio.Event()

    async def write_and_report_late(unit):
        value = await write_unit(unit)
        await report.wait()
        return value

    async def read_and_tell(unit):
        value = await read_unit(unit)
        seen.set()
        return value

    monkeypatch.setattr(parts, "write_unit", write_and_report_late)
    completing = asyncio.create_task(handle.complete("done"))
    await store.wait_for_task(task.task_id, auth=ALICE)
    monkeypatch.setattr(parts, "read_unit", read_and_tell)
    watching = asyncio.create_task(handle.wait_cancelled())
    await seen.wait()
    report.set()

    await asyncio.wait_for(asyncio.gather(completing, watching), 30)

    assert not handle.cancel_requested
