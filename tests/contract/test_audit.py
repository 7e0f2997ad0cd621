"""The audit log: who did what to which task, without a word that could be used to get at one."""

import logging

import pytest

from taskstore import LeaseLostError, TaskFinishedError, TaskNotFoundError

from .conftest import ALICE, BOB


@pytest.fixture
def audit(caplog):
    caplog.set_level(logging.INFO, "taskstore.audit")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "taskstore.audit"]


async def test_creation_retrieval_refusal_and_recovery_are_logged(store, peer, crash, finish, audit):
    """MCP 2025-11-25: receivers should log creation, completion and retrieval, with the auth context."""
    alice, bob = (store._parts.binding.auth_key(auth)[:12] for auth in (ALICE, BOB))
    task = await finish(store)
    await store.get_outcome(task.task_id, auth=ALICE)
    with pytest.raises(TaskNotFoundError):
        await store.get_task(task.task_id, auth=BOB)
    with pytest.raises(TaskFinishedError):
        await store.cancel_task(task.task_id, auth=ALICE)
    await store.delete_task(task.task_id, auth=ALICE)
    orphan = await store.create_task(auth=None)
    crash(store)
    await peer.recover()

    short, orphan_short = task.task_id[:18], orphan.task_id[:18]
    assert [line for line in audit() if "TaskStore" not in line] == [
        f"created {short}… for {alice}",
        f"outcome of {short}… read by {alice}",
        f"refused {bob}: Task {short}… not found.",
        f"refused {alice}: Task {short}… is completed; it cannot become cancelled.",
        f"deleted {short}… for {alice}",
        f"created {orphan_short}… for no auth context",
        f"recovered {orphan_short}… of no auth context, held by {store._parts.writer}",
    ]


async def test_what_a_process_that_was_taken_for_dead_still_says_is_logged_as_refused(store, peer, crash, audit):
    """Whoever looks into a result that never came finds that it came, too late, and was refused."""
    handle = store.handle(await store.create_task(auth=ALICE))
    crash(store)
    await peer.recover()

    with pytest.raises(LeaseLostError) as refused:
        await handle.complete("done")

    assert audit()[-1] == f"refused a tool: {refused.value}"
    assert handle.task_id[:18] in audit()[-1]
    assert handle.task_id not in audit()[-1]


async def test_no_whole_id_and_no_auth_context_is_logged(store, finish, audit, caplog):
    """An id of an unbound task is all that protects it, and logs are read by many."""
    caplog.set_level(logging.DEBUG)
    task = await finish(store, auth=None)
    mine = await store.create_task(auth=ALICE)
    await store.get_outcome(task.task_id, auth=None)
    await store.cancel_task(mine.task_id, auth=ALICE)
    with pytest.raises(TaskNotFoundError):
        await store.get_task(mine.task_id, auth=BOB)

    assert audit()
    for secret in (task.task_id, mine.task_id, "alice", "bob"):
        assert secret not in caplog.text
