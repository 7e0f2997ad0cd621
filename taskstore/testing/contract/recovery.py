"""Recovery: an honest verdict for every orphan, and live work is never touched."""

import asyncio
from datetime import timedelta

import pytest

from taskstore import EventKind, LeaseLostError, ReasonCode, StoreOptions, TaskNotFoundError, TaskStatus, TaskStore
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, Crash, Finish, OpenStore, StoreOpener

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)


class RecoveryContract:
    """Recovery: an honest verdict for every orphan, and live work is never touched."""

    async def test_orphans_fail_with_crash_recovery_and_finished_tasks_stay(
        self, store: TaskStore, peer: TaskStore, crash: Crash, finish: Finish
    ) -> None:
        """Tasks of a killed process stayed 'working' for ever, and clients polled for ever."""
        done = await finish(store, {"pages": 10})
        before = await store.get_details(done.task_id, auth=ALICE)
        orphans = [await store.create_task(auth=ALICE) for _ in range(3)]
        await store.handle(orphans[0]).progress(62, total=100, message="rendering")
        crash(store)

        first, second = await peer.recover(), await peer.recover()

        assert set(first.recovered) == {task.task_id for task in orphans}
        assert (first.dead_instances, second.recovered, second.dead_instances) == (1, (), 0)
        assert await peer.get_details(done.task_id, auth=ALICE) == before
        failed = await peer.get_details(orphans[0].task_id, auth=ALICE)
        assert (failed.task.status, failed.task.attempt, failed.task.crashes) == (TaskStatus.FAILED, 2, 1)
        assert failed.task.status_message is not None
        assert failed.task.status_message.startswith("CRASH_RECOVERY: ")
        assert failed.outcome is not None
        assert failed.outcome.error == {
            "code": -32603,
            "message": failed.task.status_message,
            "data": {
                "reason": "CRASH_RECOVERY",
                "progress": 62.0,
                "total": 100.0,
                "attempt": 1,
                "crashes": 1,
                "retrySafe": False,
            },
        }
        last = (await peer.list_events(orphans[0].task_id, auth=ALICE))[-1]
        assert (last.kind, last.reason, last.from_status) == (
            EventKind.RECOVERED,
            ReasonCode.CRASH_RECOVERY,
            TaskStatus.WORKING,
        )

    async def test_recovery_is_done_before_open_returns(
        self, store: TaskStore, open_store: OpenStore, crash: Crash
    ) -> None:
        """The first poll after a restart must get the verdict, not 'working'."""
        task = await store.create_task(auth=ALICE)
        crash(store)

        restarted = await open_store(upkeep=True)

        assert (await restarted.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED

    async def test_opening_and_recovering_leaves_live_work_alone(self, store: TaskStore, open_store: OpenStore) -> None:
        """The classic bug of this field: a second server declares the first one's work dead."""
        task = await store.create_task(auth=ALICE)

        for _ in range(20):
            other = await open_store(upkeep=True)
            assert (await other.recover()).recovered == ()

        done = await store.handle(task).complete({"ok": True})
        assert (done.status, done.attempt) == (TaskStatus.COMPLETED, 1)

    async def test_a_late_result_cannot_undo_recovery(self, store: TaskStore, peer: TaskStore, crash: Crash) -> None:
        """A process presumed dead may still be running; its result arrives after the task was failed."""
        task, other = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
        handle = store.handle(task)
        crash(store)  # its process is gone for the others, its coroutine runs on
        await peer.recover()

        with pytest.raises(LeaseLostError):
            await handle.complete({"ok": True})
        with pytest.raises(LeaseLostError):
            await store.handle(other).progress(1)

        assert handle.cancel_requested
        assert (await peer.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED

    async def test_work_that_recovery_gave_up_is_told_to_stop(
        self, store: TaskStore, peer: TaskStore, crash: Crash
    ) -> None:
        task = await store.create_task(auth=ALICE)

        async with store.handle(task) as handle:
            crash(store)
            await peer.recover()

            await asyncio.wait_for(handle.wait_cancelled(), 10)

    async def test_a_row_of_a_dead_instance_goes_only_after_its_tasks(
        self, store: TaskStore, peer: TaskStore, crash: Crash
    ) -> None:
        await store.create_task(auth=ALICE)
        crash(store)

        before = (await peer.operator.health()).orphans
        await peer.recover()

        health = await peer.operator.health()
        assert (before, health.orphans, health.instances, health.live) == (1, 0, 1, 0)

    async def test_recovery_goes_on_in_batches_until_nothing_is_left(
        self, store: TaskStore, peer: TaskStore, crash: Crash
    ) -> None:
        for _ in range(450):
            await store.create_task(auth=ALICE)
        crash(store)

        report = await peer.recover()

        assert len(report.recovered) == len(set(report.recovered)) == 450
        assert (await peer.operator.health()).live == 0

    async def test_two_recoveries_at_once_fail_each_orphan_once(
        self, store: TaskStore, peer: TaskStore, open_store: OpenStore, crash: Crash
    ) -> None:
        other = await open_store()
        tasks = [await store.create_task(auth=ALICE) for _ in range(300)]
        crash(store)

        reports = await asyncio.gather(peer.recover(), other.recover())

        recovered = [task_id for report in reports for task_id in report.recovered]
        assert sorted(recovered) == sorted(task.task_id for task in tasks)
        events = await peer.list_events(tasks[0].task_id, auth=ALICE)
        assert [event.kind for event in events] == [EventKind.CREATED, EventKind.RECOVERED]

    async def test_what_is_live_when_a_store_closes_is_failed_at_once(
        self, store_opener: StoreOpener, store: TaskStore
    ) -> None:
        """Nobody should have to wait for a lease to learn that a stopped server will not finish."""
        async with store_opener(options=StoreOptions(upkeep=False)) as leaving:
            task = await leaving.create_task(auth=ALICE)

        left = await store.get_task(task.task_id, auth=ALICE)
        assert (left.status, left.crashes) == (TaskStatus.FAILED, 0)  # a stop is no crash
        assert (
            left.status_message == "SERVER_STOPPED: the server process that ran this task stopped before it finished."
        )
        assert (await store.operator.health()).instances == 1

    async def test_orphans_get_their_verdict_while_a_server_runs(
        self, store: TaskStore, open_store: OpenStore, crash: Crash
    ) -> None:
        """A peer may die at any time; nobody should have to restart a server to learn of it."""
        task = await store.create_task(auth=ALICE)
        watching = await open_store(upkeep=True, recovery_interval=SOON)
        crash(store)

        seen = await watching.wait_for_task(task.task_id, auth=ALICE, timeout=LONG)

        assert seen.status is TaskStatus.FAILED

    async def test_expired_tasks_are_swept_while_a_server_runs(
        self, open_store: OpenStore, finish: Finish, clock: ManualClock
    ) -> None:
        store = await open_store(upkeep=True, sweep_interval=SOON)
        task = await finish(store, ttl=timedelta(minutes=1))

        clock.advance(timedelta(hours=1))

        async with asyncio.timeout(30):
            while (await store.operator.health()).expired:  # noqa: ASYNC110  a sweep tells nobody what it deleted
                await asyncio.sleep(0)
        with pytest.raises(TaskNotFoundError):
            await store.get_task(task.task_id, auth=ALICE)
