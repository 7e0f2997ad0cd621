"""Lifetime: exact on every read, and never at the cost of a live task."""

import asyncio
from datetime import timedelta

import pytest

from taskstore import TaskNotFoundError, TaskStatus, TaskStore
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, Finish, OpenStore

MINUTE = timedelta(minutes=1)
LEASE = timedelta(seconds=30)


RETENTION = timedelta(minutes=15)


async def is_found(store: TaskStore, task_id: str) -> bool:
    """Tell whether alice still finds a task."""
    try:
        await store.get_task(task_id, auth=ALICE)
    except TaskNotFoundError:
        return False
    return True


class ExpiryContract:
    """Lifetime: exact on every read, and never at the cost of a live task."""

    async def test_a_finished_task_is_found_up_to_its_last_millisecond(
        self, store: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        """Expiry is decided by the read; whether the sweep ran makes no difference."""
        task = await finish(store, ttl=timedelta(hours=1))

        clock.advance(timedelta(hours=1) - timedelta(milliseconds=1))
        before = await is_found(store, task.task_id)
        clock.advance(timedelta(milliseconds=1))
        after = await is_found(store, task.task_id)

        assert (before, after) == (True, False)

    @pytest.mark.parametrize("swept", [False, True], ids=["unswept", "swept"])
    async def test_an_expired_task_is_unknown_to_every_call(
        self, store: TaskStore, finish: Finish, clock: ManualClock, swept: bool
    ) -> None:
        """Whether the sweep has been there makes no difference.

        Case 31, oaslananka/kicad-mcp-pro PR#75: an unknown id was answered as 'working', and the client polled for
        ever.
        """
        task = await finish(store, ttl=timedelta(hours=1))
        clock.advance(timedelta(hours=1))
        if swept:
            await store.sweep()

        for call in (
            store.get_task,
            store.get_details,
            store.get_outcome,
            store.cancel_task,
            store.delete_task,
            store.list_events,
            store.wait_for_task,
        ):
            with pytest.raises(TaskNotFoundError):
                await call(task.task_id, auth=ALICE)
        with pytest.raises(TaskNotFoundError):
            await store.operator.get_task(task.task_id)
        assert (await store.list_tasks(auth=ALICE)).tasks == ()
        assert (await store.operator.list_tasks()).tasks == ()

    async def test_a_live_task_outlives_its_ttl_and_finishes_normally(
        self, store: TaskStore, clock: ManualClock
    ) -> None:
        """A ttl counted from creation alone removed work that was still running.

        Case 3, nesquikm/mcp-rubber-duck PR#128, nitrocloudofficial/nitrostack#329: a ttl counted from the creation
        removed a task that was still running.
        """
        task = await store.create_task(auth=ALICE, ttl=timedelta(milliseconds=300))
        handle = store.handle(task)
        for step in range(1, 11):
            clock.advance(timedelta(milliseconds=50))
            await handle.progress(step)
        await store.sweep()

        clock.advance(timedelta(milliseconds=200))
        running = await store.get_task(task.task_id, auth=ALICE)
        done = await handle.complete({"late": True})

        assert running.status is TaskStatus.WORKING
        assert running.ttl == timedelta(milliseconds=700) + LEASE  # what has passed, and one lease
        assert done.ttl == timedelta(milliseconds=700) + RETENTION  # kept from the finish on

    async def test_nothing_is_written_to_keep_a_live_task(self, store: TaskStore, clock: ManualClock) -> None:
        task = await store.create_task(auth=ALICE, ttl=MINUTE)
        clock.advance(timedelta(hours=5))

        shown = await store.get_task(task.task_id, auth=ALICE)
        await store.sweep()
        again = await store.get_task(task.task_id, auth=ALICE)

        assert shown == again
        assert shown.version == task.version
        assert shown.expires_at == shown.created_at + timedelta(hours=5) + LEASE

    async def test_an_outcome_is_kept_for_the_retention_however_short_the_ttl(
        self, store: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        """A client that polls every few minutes must get the outcome of a task with a ttl of seconds."""
        task = await finish(store, ttl=timedelta(seconds=1))

        clock.advance(RETENTION - timedelta(milliseconds=1))
        kept = await is_found(store, task.task_id)
        clock.advance(timedelta(milliseconds=1))

        assert kept
        assert not await is_found(store, task.task_id)

    async def test_an_outcome_is_kept_for_its_ttl_when_that_is_longer(self, store: TaskStore, finish: Finish) -> None:
        task = await finish(store, ttl=timedelta(days=2))

        assert task.ttl == timedelta(days=2)
        assert task.expires_at == task.created_at + timedelta(days=2)

    async def test_an_unlimited_task_never_expires(
        self, open_store: OpenStore, clock: ManualClock, finish: Finish
    ) -> None:
        store = await open_store(max_ttl=None)
        task = await finish(store, ttl=None)

        clock.advance(timedelta(days=4000))
        await store.sweep()

        assert await is_found(store, task.task_id)

    async def test_a_clock_that_steps_back_refuses_no_outcome(self, store: TaskStore, clock: ManualClock) -> None:
        """NTP may set the wall clock back below a task's creation; its result must still be stored."""
        task = await store.create_task(auth=ALICE)
        clock.set_wall(clock.now() - 3_600_000)

        done = await store.handle(task).complete({"ok": True})

        assert done.status is TaskStatus.COMPLETED
        assert done.finished_at is not None
        assert done.finished_at < done.created_at

    async def test_the_sweep_deletes_what_is_expired_and_nothing_else(
        self, store: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        for _ in range(250):  # more than two batches
            await finish(store, ttl=MINUTE)
        kept = await finish(store, ttl=timedelta(days=1))
        live = await store.create_task(auth=ALICE, ttl=MINUTE)
        clock.advance(timedelta(hours=1))

        first, second = await store.sweep(), await store.sweep()

        health = await store.operator.health()
        assert (first.deleted, second.deleted) == (250, 0)
        assert (health.live, health.finished, health.expired) == (1, 1, 0)
        assert await is_found(store, kept.task_id)
        assert await is_found(store, live.task_id)

    async def test_two_sweeps_at_once_delete_each_task_once(
        self, store: TaskStore, peer: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        for _ in range(150):
            await finish(store, ttl=MINUTE)
        clock.advance(timedelta(hours=1))

        reports = await asyncio.gather(store.sweep(), peer.sweep())

        assert sum(report.deleted for report in reports) == 150

    async def test_an_id_of_an_expired_task_tells_nothing_to_its_owner_either(
        self, store: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        task = await finish(store, ttl=MINUTE)
        clock.advance(timedelta(hours=1))

        with pytest.raises(TaskNotFoundError) as expired:
            await store.get_task(task.task_id, auth=ALICE)

        assert type(expired.value) is TaskNotFoundError
