"""Whoever goes away, by whatever door, leaves no task behind that says 'working' for ever."""

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial

import anyio
import pytest

from taskstore import EventKind, ReasonCode, TaskStatus, TaskStore, operations
from tests.unit.outside import wait_until

from .conftest import ALICE


async def test_a_block_under_a_cancel_scope_fails_its_task(store):
    """Anyio's scopes, in which every SDK runs, cancel each await of a block that is being left again."""
    task = await store.create_task(auth=ALICE)

    with anyio.CancelScope() as scope:
        async with store.handle(task):
            scope.cancel()
            await anyio.sleep_forever()

    seen = await store.wait_for_task(task.task_id, auth=ALICE)
    assert seen.status is TaskStatus.FAILED
    async with asyncio.timeout(10):  # the write is known here a moment after everybody can read it
        while store._parts.held:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_cancelled_create_leaves_no_live_task_and_no_used_key(store):
    """The caller cannot tell whether its task was made, so nobody will ever run it."""
    for number in range(20):
        creating = asyncio.create_task(store.create_task(auth=ALICE, idempotency_key=f"{number}"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    tasks = (await store.list_tasks(auth=ALICE)).tasks
    finished = [await store.wait_for_task(task.task_id, auth=ALICE) for task in tasks]
    assert {task.status for task in finished} <= {TaskStatus.CANCELLED}
    assert not store._parts.held  # which is set only when a create is heard of


async def test_a_create_that_is_cancelled_before_its_turn_makes_no_task(store):
    """Behind a slow writer callers give up by the hundred; their tasks would be made only to be cancelled."""
    reached, go_on = threading.Event(), threading.Event()

    def occupy(transaction):
        reached.set()
        go_on.wait(10)

    occupied = store._parts.database.write_soon(occupy)
    await asyncio.to_thread(reached.wait, 10)
    creating = asyncio.create_task(store.create_task(auth=ALICE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    go_on.set()
    await occupied
    await store.create_task(auth=ALICE)  # whatever was handed over before it has been decided

    assert len((await store.list_tasks(auth=ALICE)).tasks) == 1
    assert not store._parts.taken


async def test_a_task_that_its_process_holds_no_more_is_failed_as_abandoned(store):
    """An outage may swallow a last write; the process lives on, so no other one would ever judge the task."""
    kept, lost = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
    parts = store._parts
    parts.let_go(parts.held[lost.task_id])

    await asyncio.to_thread(parts.fail_abandoned)
    after_one = await store.get_task(lost.task_id, auth=ALICE)
    await asyncio.to_thread(parts.fail_abandoned)

    seen = await store.get_details(lost.task_id, auth=ALICE)
    last = (await store.list_events(lost.task_id, auth=ALICE))[-1]
    assert after_one.status is TaskStatus.WORKING  # a create may be between its COMMIT and its caller
    assert (seen.task.status, seen.task.crashes) == (TaskStatus.FAILED, 0)  # the process lives: this was no crash
    assert seen.outcome.error["data"]["reason"] == "ABANDONED"
    assert seen.task.status_message == "ABANDONED: the server lost hold of this task."
    assert (last.kind, last.reason) == (EventKind.RECOVERED, ReasonCode.ABANDONED)
    assert (await store.get_task(kept.task_id, auth=ALICE)).status is TaskStatus.WORKING


@pytest.mark.parametrize("way", ["create", "claim"])
async def test_a_task_is_not_abandoned_while_a_blocked_loop_has_yet_to_hear_of_it(store, way):
    """Seen in the crash laboratory: what was created before a pause was failed before its caller heard of it."""
    parts = store._parts
    create = {"auth": ALICE, "name": "report", "on_crash": "retry"}
    if way == "claim":
        await store.handle(await store.create_task(**create)).hand_over()
    taking = asyncio.create_task(store.create_task(**create) if way == "create" else store.claim_task(["report"]))
    while not parts.taken:  # noqa: ASYNC110  nothing tells of it but the loop going on
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the unit is handed over; from here on the loop is blocked

    unit = partial(operations.read_held, instance_id=parts.writer)
    wait_until(lambda: bool(parts.database.read(unit).result()), "the COMMIT")
    parts.fail_abandoned()
    parts.fail_abandoned()
    taken = await taking

    task = taken if way == "create" else taken.task
    assert (await store.handle(task).complete("done")).status is TaskStatus.COMPLETED
    assert not parts.taken


async def test_an_outage_at_the_end_of_a_block_does_not_swallow_its_cancellation(store):
    """Seen in the crash laboratory: on a full disk a server's work went on after it was told to stop."""
    task = await store.create_task(auth=ALICE)
    began = asyncio.Event()

    async def work():
        async with store.handle(task):
            began.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await began.wait()
    store._parts.database.close()
    working.cancel()

    with pytest.raises(asyncio.CancelledError):
        await working


async def test_an_open_that_is_cancelled_leaves_no_store_running(database_url):
    """Its heartbeat would say for ever that a store lives which nobody has."""
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await TaskStore.open(database_url).__aenter__()

    async with TaskStore.open(database_url) as store, asyncio.timeout(30):
        while (await store.operator.health()).instances > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        while any(thread.name.startswith("taskstore") for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


FORK = """
import os, sys
from taskstore import AuthContext, DatabaseUnavailableError, SyncTaskStore

with SyncTaskStore.open(sys.argv[1]) as store:
    task = store.create_task(auth=AuthContext(subject="alice"))
    if os.fork() == 0:
        for call in (store._store._parts.database.revision, lambda: store._store._parts.database.read(print)):
            try:
                call()
            except DatabaseUnavailableError as error:
                print(error, flush=True)
        store._store._parts.close()
        os._exit(0)
    os.wait()
    print(store.get_task(task.task_id, auth=AuthContext(subject="alice")).status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_the_child_cannot_use_the_parents_store(database_url):
    """Two processes on one connection garble it, and a close by the child would fail the parent's tasks."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, database_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ran.stdout.count("opened before a fork") == 2
    assert ran.stdout.splitlines()[-1] == "working"


async def test_a_store_that_closes_while_its_database_is_away_leaves_no_thread(database_url):
    """Its heart would beat on for the life of the process, and say for ever that it failed."""
    async with TaskStore.open(database_url) as store:
        store._parts.database.close()

    async with asyncio.timeout(30):
        while any(thread.name.startswith("taskstore") for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
