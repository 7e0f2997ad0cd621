"""The ttl of tasks that no process holds."""

import pytest
from sqlalchemy import text

from taskstore import OwnerKind, ReasonCode, TaskFinishedError
from taskstore.database import Database
from taskstore.testing.contract.strict_ttl import check_ended

from .conftest import ALICE, MINUTE


@pytest.mark.parametrize("kind", [OwnerKind.PARKED, OwnerKind.QUEUED, OwnerKind.EXTERNAL])
async def test_a_task_that_no_process_holds_ends_at_its_ttl_under_either_policy(store, clock, kind):
    """Nobody is working on it, so nothing would ever end it."""
    task = await store.create_task(auth=ALICE, ttl=MINUTE)
    let_go = text("UPDATE taskstore_tasks SET owner_kind = :kind, instance_id = NULL WHERE task_id = :id")
    database: Database = store._parts.database
    database.write(lambda t: t.execute(let_go, {"kind": kind.value, "id": task.task_id})).result()

    clock.advance(MINUTE)

    with pytest.raises(TaskFinishedError):
        await store.cancel_task(task.task_id, auth=ALICE)
    if kind is OwnerKind.QUEUED:
        await check_ended(store, task, ReasonCode.NO_RUNNER, "a server ran it again")
    else:
        await check_ended(store, task)
