"""Tasks that end at their ttl: whoever finds one due ends it first, then answers; and what expired owners may learn."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from taskstore import (
    EventKind,
    Limits,
    ReasonCode,
    Task,
    TaskExpiredError,
    TaskFinishedError,
    TaskHandle,
    TaskNotFoundError,
    TaskStatus,
    TaskStore,
)
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, BOB, Finish, OpenStore

MINUTE = timedelta(minutes=1)


async def due_task(store: TaskStore, clock: ManualClock) -> tuple[Task, TaskHandle]:
    """Create a task and let its ttl pass."""
    task = await store.create_task(auth=ALICE, ttl=MINUTE)
    handle = store.handle(task)
    clock.advance(MINUTE)
    return task, handle


async def check_ended(
    store: TaskStore, task: Task, reason: ReasonCode = ReasonCode.TTL_EXPIRED, why: str = "it finished"
) -> None:
    """See that the ttl ended the task, everywhere that shows."""
    details = await store.get_details(task.task_id, auth=ALICE)
    assert details.task.status is TaskStatus.FAILED
    assert details.task.status_message == f"{reason}: its time to live passed before {why}."
    assert details.outcome is not None
    assert isinstance(details.outcome.error, dict)
    assert details.outcome.error["data"] == {"reason": reason}
    assert details.task.crashes == 0
    last = (await store.list_events(task.task_id, auth=ALICE))[-1]
    assert (last.kind, last.reason, last.to_status) == (EventKind.EXPIRED, reason, TaskStatus.FAILED)


READS: dict[str, Callable[[TaskStore, str], Awaitable[Any]]] = {
    "get_task": lambda store, task_id: store.get_task(task_id, auth=ALICE),
    "get_details": lambda store, task_id: store.get_details(task_id, auth=ALICE),
    "get_outcome": lambda store, task_id: store.get_outcome(task_id, auth=ALICE),
    "list_tasks": lambda store, _: store.list_tasks(auth=ALICE),
    "list failed": lambda store, _: store.list_tasks(auth=ALICE, status=TaskStatus.FAILED),
    "list_events": lambda store, task_id: store.list_events(task_id, auth=ALICE),
    "wait_for_task": lambda store, task_id: store.wait_for_task(task_id, auth=ALICE),
    "operator": lambda store, task_id: store.operator.get_task(task_id),
    "operator lists": lambda store, _: store.operator.list_tasks(),
    "answer_inputs": lambda store, task_id: store.answer_inputs(task_id, {"key": 1}, auth=ALICE),
    "sweep": lambda store, _: store.sweep(),
    "peer": lambda store, task_id: store.get_task(task_id, auth=ALICE),
}


class StrictTtlContract:
    """Tasks that end at their ttl: whoever finds one due ends it first, then answers."""

    @pytest.fixture
    async def strict(self, open_store: OpenStore) -> TaskStore:
        return await open_store(ttl_policy="strict")

    async def test_a_live_task_ends_at_its_last_millisecond(self, strict: TaskStore, clock: ManualClock) -> None:
        task = await strict.create_task(auth=ALICE, ttl=MINUTE)

        clock.advance(MINUTE - timedelta(milliseconds=1))
        before = await strict.get_task(task.task_id, auth=ALICE)
        clock.advance(timedelta(milliseconds=1))
        after = await strict.get_task(task.task_id, auth=ALICE)

        assert (before.status, before.ttl) == (TaskStatus.WORKING, MINUTE)
        assert after.status is TaskStatus.FAILED
        await check_ended(strict, task)

    @pytest.mark.parametrize("read", READS)
    async def test_whoever_finds_a_task_due_ends_it_first(
        self, strict: TaskStore, clock: ManualClock, read: str
    ) -> None:
        """Nothing may depend on the sweep having run."""
        task, _ = await due_task(strict, clock)

        found = await READS[read](strict, task.task_id)

        if read == "list failed":
            assert [each.task_id for each in found.tasks] == [task.task_id]
        await check_ended(strict, task)

    @pytest.mark.parametrize("write", ["complete", "fail", "progress", "ask", "park", "hand_over", "cancel"])
    async def test_a_late_write_is_refused_and_told_of_the_ttl(
        self, strict: TaskStore, clock: ManualClock, write: str
    ) -> None:
        """The tool learns why its word no longer counts.

        Case 3, nesquikm/mcp-rubber-duck PR#128, nitrocloudofficial/nitrostack#329: a ttl counted from the creation
        removed a task that was still running.
        """
        task, handle = await due_task(strict, clock)
        writes: dict[str, Callable[[], Awaitable[object]]] = {
            "complete": lambda: handle.complete({}),
            "fail": lambda: handle.fail("late"),
            "progress": lambda: handle.progress(1),
            "ask": lambda: handle.ask({"a": {}}),
            "park": lambda: handle.park({"a": {}}),
            "hand_over": handle.hand_over,
            "cancel": lambda: strict.cancel_task(task.task_id, auth=ALICE),
        }

        with pytest.raises(TaskFinishedError) as refused:
            await writes[write]()

        assert refused.value.task.status is TaskStatus.FAILED
        await check_ended(strict, task)

    async def test_a_repeated_create_finds_a_due_task_ended(self, strict: TaskStore, clock: ManualClock) -> None:
        """A record that says 'working' would send its client to wait for what is over."""
        first = await strict.create_task(auth=ALICE, ttl=MINUTE, idempotency_key="k")
        clock.advance(MINUTE)

        again = await strict.create_task(auth=ALICE, ttl=MINUTE, idempotency_key="k")

        assert (again.task_id, again.existing, again.status) == (first.task_id, True, TaskStatus.FAILED)
        await check_ended(strict, first)

    async def test_a_due_task_gives_its_key_free_where_no_outcome_is_retained(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        """Ended and expired in the same moment, it is found by nobody, so it must not answer for its key."""
        strict = await open_store(ttl_policy="strict", min_retention=timedelta(0))
        first = await strict.create_task(auth=ALICE, ttl=MINUTE, idempotency_key="k", name="one")
        clock.advance(MINUTE)

        again = await strict.create_task(auth=ALICE, ttl=MINUTE, idempotency_key="k", name="another")

        assert (again.task_id != first.task_id, again.existing) == (True, False)

    async def test_a_due_task_counts_as_over(self, open_store: OpenStore, clock: ManualClock) -> None:
        """A limit must not depend on the sweep having run."""
        strict = await open_store(ttl_policy="strict", limits=Limits(live_tasks=1))
        await due_task(strict, clock)

        assert (await strict.create_task(auth=ALICE)).status is TaskStatus.WORKING

    async def test_a_listing_by_status_shows_that_status_only(self, strict: TaskStore, clock: ManualClock) -> None:
        """Ending one page of due tasks brings up others, which may be due too."""
        for _ in range(5):
            await strict.create_task(auth=ALICE, ttl=MINUTE)
        clock.advance(MINUTE)

        page = await strict.list_tasks(auth=ALICE, status=TaskStatus.COMPLETED, limit=1)

        assert page.tasks == ()

    async def test_a_due_task_can_be_deleted(self, strict: TaskStore, clock: ManualClock) -> None:
        task, _ = await due_task(strict, clock)

        await strict.delete_task(task.task_id, auth=ALICE)

        with pytest.raises(TaskNotFoundError):
            await strict.get_task(task.task_id, auth=ALICE)

    async def test_a_waiter_wakes_at_the_ttl(self, strict: TaskStore, clock: ManualClock) -> None:
        """Nobody writes anything at that moment, so nobody would wake it."""
        task = await strict.create_task(auth=ALICE, ttl=timedelta(milliseconds=50))
        waiter = asyncio.create_task(strict.wait_for_task(task.task_id, auth=ALICE))
        await asyncio.sleep(0)

        clock.advance(timedelta(milliseconds=50))

        assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.FAILED

    @pytest.mark.parametrize("ended_by", ["itself", "a peer"])
    async def test_a_tool_that_waits_for_an_answer_hears_of_the_ttl(
        self, strict: TaskStore, open_store: OpenStore, clock: ManualClock, ended_by: str
    ) -> None:
        """No answer is to come any more, and the tool must not wait for one for ever."""
        task = await strict.create_task(auth=ALICE, ttl=timedelta(milliseconds=50))
        asking = asyncio.create_task(strict.handle(task).ask({"name": {"method": "elicitation/create"}}))
        await strict.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)

        clock.advance(timedelta(milliseconds=50))
        if ended_by == "a peer":
            peer = await open_store(ttl_policy="strict")
            await peer.get_task(task.task_id, auth=ALICE)

        with pytest.raises(TaskFinishedError) as refused:
            await asyncio.wait_for(asking, 10)
        assert refused.value.task.status is TaskStatus.FAILED
        await check_ended(strict, task)

    async def test_work_is_told_to_stop_at_the_ttl(self, strict: TaskStore, clock: ManualClock) -> None:
        task = await strict.create_task(auth=ALICE, ttl=timedelta(milliseconds=50))

        async with strict.handle(task) as handle:
            stopping = asyncio.create_task(handle.wait_cancelled())
            await asyncio.sleep(0)
            clock.advance(timedelta(milliseconds=50))

            await asyncio.wait_for(stopping, 10)

        await check_ended(strict, task)

    async def test_the_sweep_ends_what_is_due_and_keeps_its_verdict_for_the_retention(
        self, strict: TaskStore, clock: ManualClock
    ) -> None:
        tasks = [await strict.create_task(auth=ALICE, ttl=MINUTE) for _ in range(120)]
        clock.advance(MINUTE)

        first, second = await strict.sweep(), await strict.sweep()

        assert (first.ended, first.deleted, second.ended) == (120, 0, 0)
        await check_ended(strict, tasks[0])
        clock.advance(timedelta(minutes=15))
        assert (await strict.sweep()).deleted == 120

    async def test_two_processes_that_find_a_task_due_end_it_once(
        self, strict: TaskStore, open_store: OpenStore, clock: ManualClock
    ) -> None:
        peer = await open_store(ttl_policy="strict")
        task, handle = await due_task(strict, clock)

        await asyncio.gather(
            *(each.get_task(task.task_id, auth=ALICE) for each in (strict, peer) * 5),
            handle.complete({}),
            strict.sweep(),
            peer.sweep(),
            return_exceptions=True,
        )

        await check_ended(strict, task)
        assert len(await strict.list_events(task.task_id, auth=ALICE)) == 2

    @pytest.mark.parametrize("swept", [False, True], ids=["unswept", "swept"])
    async def test_with_tombstones_the_owner_learns_that_a_task_expired(
        self, open_store: OpenStore, finish: Finish, clock: ManualClock, swept: bool
    ) -> None:
        """A client that lost track can tell 'too late' from 'never was'; to all others the id stays unknown.

        Case 65, joshrotenberg/tower-mcp PR#1297, xorbitsai/xagent#2565: whoever could tell expired from unknown learned
        of tasks that were not theirs.
        """
        store = await open_store(tombstones=timedelta(days=7))
        task, unbound = await finish(store, ttl=MINUTE), await finish(store, ttl=MINUTE, auth=None)
        clock.advance(timedelta(hours=1))
        if swept:
            assert (await store.sweep()).deleted == 2

        for call in (store.get_task, store.get_details, store.cancel_task, store.delete_task, store.list_events):
            with pytest.raises(TaskExpiredError):
                await call(task.task_id, auth=ALICE)
            for task_id, auth in (
                (task.task_id, BOB),
                (task.task_id, None),
                (unbound.task_id, None),
                ("tsk_no", ALICE),
            ):
                with pytest.raises(TaskNotFoundError) as refused:
                    await call(task_id, auth=auth)
                assert type(refused.value) is TaskNotFoundError
                assert str(refused.value).endswith("not found.")

    async def test_tombstones_are_bounded_in_age_and_number(
        self, open_store: OpenStore, finish: Finish, clock: ManualClock
    ) -> None:
        """What is kept of tasks that are gone must not grow for ever.

        Case 65, joshrotenberg/tower-mcp PR#1297, xorbitsai/xagent#2565: whoever could tell expired from unknown learned
        of tasks that were not theirs.
        """
        store = await open_store(tombstones=timedelta(days=7), tombstone_limit=3)
        tasks = []
        for _ in range(5):
            tasks.append(await finish(store, ttl=MINUTE))
            clock.advance(timedelta(seconds=1))
        clock.advance(timedelta(hours=1))
        await store.sweep()

        async def expired() -> list[bool]:
            kinds = []
            for task in tasks:
                with pytest.raises(TaskNotFoundError) as refused:
                    await store.get_task(task.task_id, auth=ALICE)
                kinds.append(type(refused.value) is TaskExpiredError)
            return kinds

        limited = await expired()
        clock.advance(timedelta(days=8))
        await store.sweep()

        assert limited == [False, False, True, True, True]
        assert await expired() == [False] * 5

    async def test_without_the_option_no_tombstone_is_kept(
        self, store: TaskStore, open_store: OpenStore, finish: Finish, clock: ManualClock
    ) -> None:
        task = await finish(store, ttl=MINUTE)
        clock.advance(timedelta(hours=1))
        await store.sweep()
        later = await open_store(tombstones=timedelta(days=7))

        with pytest.raises(TaskNotFoundError) as refused:
            await later.get_task(task.task_id, auth=ALICE)

        assert type(refused.value) is TaskNotFoundError
