"""Waiting: every waiter wakes, none is lost, whoever made the change."""

import asyncio
from datetime import timedelta

import pytest

from taskstore import (
    Task,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStatus,
    TaskStore,
)
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, Crash, Finish

LONG = timedelta(seconds=60)  # longer than any test: a wait that ends by it fails


async def still_waiting(*waiters: asyncio.Task[Task]) -> None:
    """Let waiters begin, and see that none of them returns before there is anything to tell."""
    done, _ = await asyncio.wait(waiters, timeout=0.05)
    assert not done


class WaitingContract:
    """Waiting: every waiter wakes, none is lost, whoever made the change."""

    @pytest.mark.parametrize("where", ["the same process", "another process"])
    async def test_all_waiters_wake_and_a_late_one_returns_at_once(
        self, store: TaskStore, peer: TaskStore, where: str
    ) -> None:
        """With one event a task, the newest waiter takes the wake-up of all others.

        Case 25, modelcontextprotocol/python-sdk#2535: of two waiters one never woke, and a change before the wait was
        lost.
        """
        task = await store.create_task(auth=ALICE)
        waiter = store if where == "the same process" else peer
        waiters = [asyncio.create_task(waiter.wait_for_task(task.task_id, auth=ALICE, timeout=LONG)) for _ in range(10)]
        await still_waiting(*waiters)

        await store.handle(task).complete({"ok": True})

        woken = await asyncio.wait_for(asyncio.gather(*waiters), 10)
        late = await asyncio.wait_for(waiter.wait_for_task(task.task_id, auth=ALICE), 10)
        assert {each.status for each in (*woken, late)} == {TaskStatus.COMPLETED}

    async def test_a_waiter_sees_the_next_change_after_the_version_it_knows(
        self, store: TaskStore, peer: TaskStore, clock: ManualClock
    ) -> None:
        task = await store.create_task(auth=ALICE)
        waiter = asyncio.create_task(
            peer.wait_for_task(task.task_id, auth=ALICE, since_version=task.version, timeout=LONG)
        )
        await still_waiting(waiter)

        await store.handle(task).progress(1, message="begun")

        seen = await waiter
        assert (seen.status, seen.progress, seen.status_message) == (TaskStatus.WORKING, 1, "begun")

    async def test_a_change_before_the_wait_is_not_waited_for(self, store: TaskStore, peer: TaskStore) -> None:
        """The lost wake-up: a change between a client's poll and its wait."""
        task = await store.create_task(auth=ALICE)
        await store.handle(task).progress(1)

        seen = await asyncio.wait_for(peer.wait_for_task(task.task_id, auth=ALICE, since_version=task.version), 10)

        assert seen.progress == 1

    async def test_at_the_timeout_a_waiter_gets_the_task_as_it_is(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)

        seen = await store.wait_for_task(task.task_id, auth=ALICE, timeout=timedelta(0))

        assert seen == task

    async def test_progress_does_not_end_a_wait_for_the_finish(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        waiter = asyncio.create_task(store.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
        await still_waiting(waiter)

        await handle.progress(1)
        await handle.complete({"ok": True})

        assert (await waiter).status is TaskStatus.COMPLETED

    async def test_a_waiter_learns_that_its_task_was_deleted(
        self, store: TaskStore, peer: TaskStore, finish: Finish
    ) -> None:
        task = await finish(store)
        waiter = asyncio.create_task(
            peer.wait_for_task(task.task_id, auth=ALICE, since_version=task.version, timeout=LONG)
        )

        assert (await waiter).is_finished  # nothing more can come of a finished task
        await store.delete_task(task.task_id, auth=ALICE)
        with pytest.raises(TaskNotFoundError):
            await peer.wait_for_task(task.task_id, auth=ALICE)

    async def test_recovery_and_cancel_wake_waiters_too(self, store: TaskStore, peer: TaskStore, crash: Crash) -> None:
        orphan, cancelled = await store.create_task(auth=ALICE), await peer.create_task(auth=ALICE)
        waiters = [
            asyncio.create_task(store.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
            for task in (orphan, cancelled)
        ]
        await still_waiting(*waiters)
        crash(store)

        await peer.recover()
        await peer.cancel_task(cancelled.task_id, auth=ALICE)

        assert [(await waiter).status for waiter in waiters] == [TaskStatus.FAILED, TaskStatus.CANCELLED]

    async def test_a_question_wakes_a_client_that_waits(self, store: TaskStore, peer: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)
        waiter = asyncio.create_task(
            peer.wait_for_task(task.task_id, auth=ALICE, since_version=task.version, timeout=LONG)
        )
        await still_waiting(waiter)

        asking = asyncio.create_task(store.handle(task).ask({"ok": {"method": "elicitation/create"}}))

        assert (await waiter).status is TaskStatus.INPUT_REQUIRED
        await peer.cancel_task(task.task_id, auth=ALICE)
        with pytest.raises(TaskFinishedError):
            await asyncio.wait_for(asking, 10)
