"""What the operator brings in from elsewhere, and finds by whose it is."""

from datetime import timedelta

import pytest

from taskstore import EventKind, OwnerKind, TaskExistsError, TaskNotFoundError, TaskStatus
from taskstore.testing import ManualClock

from .conftest import ALICE, BOB, MINUTE


async def test_an_imported_task_is_its_new_owners(store, peer, finish):
    """The record says all but whose it is; from then on it is like any other of theirs."""
    task = await finish(store, {"pages": 3})
    details = await store.operator.get_details(task.task_id)
    await store.delete_task(task.task_id, auth=ALICE)

    imported = await peer.operator.import_task(details, owner=BOB)
    again = await peer.operator.import_task(details, owner=BOB)

    assert imported == task
    assert (imported.existing, again.existing) == (False, True)
    assert await store.get_details(task.task_id, auth=BOB) == details
    with pytest.raises(TaskNotFoundError):
        await store.get_task(task.task_id, auth=ALICE)
    with pytest.raises(TaskExistsError):
        await store.operator.import_task(details, owner=ALICE)


async def test_an_id_that_came_to_something_else_is_another_tasks(store, finish):
    """An import that is repeated must find what it brought; to say so of another outcome would lose one of the two."""
    task = await finish(store, {"pages": 3})
    details = await store.operator.get_details(task.task_id)
    other = details.outcome.model_copy(update={"result": {"pages": 4}})
    cancelled = details.task.model_copy(update={"status": TaskStatus.CANCELLED})
    nothing = details.outcome.model_copy(update={"result": None})

    for changed in ({"outcome": other}, {"task": cancelled, "outcome": nothing}):
        with pytest.raises(TaskExistsError):
            await store.operator.import_task(details.model_copy(update=changed), owner=ALICE)

    assert (await store.operator.import_task(details, owner=ALICE)).existing
    assert (await store.get_outcome(task.task_id, auth=ALICE)).result == {"pages": 3}


@pytest.mark.parametrize("owner_kind", list(OwnerKind))
async def test_an_imported_live_task_fails_and_is_kept_for_a_while(store, clock: ManualClock, owner_kind):
    """Whoever held it, nobody here does; its requestor has the time to hear so, however old it is."""
    task = await store.create_task(auth=ALICE, ttl=MINUTE)
    details = await store.operator.get_details(task.task_id)
    await store.cancel_task(task.task_id, auth=ALICE)
    await store.delete_task(task.task_id, auth=ALICE)
    held = details.model_copy(update={"task": details.task.model_copy(update={"owner_kind": owner_kind})})
    clock.advance(2 * MINUTE)

    failed = await store.operator.import_task(held, owner=ALICE)
    clock.advance(14 * MINUTE)

    outcome = await store.get_outcome(task.task_id, auth=ALICE)
    (event,) = await store.list_events(task.task_id, auth=ALICE)
    assert (failed.status, failed.attempt, failed.crashes) == (TaskStatus.FAILED, 2, 1)
    assert (failed.version, event.version) == (details.task.version + 1,) * 2
    assert (event.kind, event.from_status, event.to_status) == (
        EventKind.IMPORTED,
        TaskStatus.WORKING,
        TaskStatus.FAILED,
    )
    assert failed.ttl == timedelta(minutes=17)
    assert outcome.error["data"]["reason"] == "CRASH_RECOVERY"
    assert outcome.error["message"] == (
        "CRASH_RECOVERY: it was live where it was imported from, and no process runs it any more."
    )
    assert failed.last_updated_at == failed.finished_at == event.at
    clock.advance(MINUTE)
    with pytest.raises(TaskNotFoundError):
        await store.get_task(task.task_id, auth=ALICE)


async def test_the_operator_lists_the_tasks_of_one_owner(store, finish):
    """Also those of nobody, which no requestor can list."""
    of_alice, of_nobody = await finish(store), await finish(store, auth=None)
    await finish(store, auth=BOB)

    listed = [(await store.operator.list_tasks(owner=owner)).tasks for owner in (ALICE, None)]

    assert listed == [(of_alice,), (of_nobody,)]
    assert len((await store.operator.list_tasks()).tasks) == 3
