"""Listings: newest first, each task once, whatever happens between two pages."""

from datetime import timedelta
from typing import Any

import pytest

from taskstore import TaskStatus, TaskStore
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, BOB, Finish


async def pages(store: TaskStore, **arguments: Any) -> list[list[str]]:
    """Read a listing to its end."""
    cursor, found = None, []
    while True:
        page = await store.list_tasks(cursor=cursor, **arguments)
        found.append([task.task_id for task in page.tasks])
        cursor = page.next_cursor
        if cursor is None:
            return found


class ListingContract:
    """Listings: newest first, each task once, whatever happens between two pages."""

    @pytest.mark.parametrize(
        ("limit", "sizes"),
        [(1, [1] * 120), (50, [50, 50, 20]), (120, [120]), (119, [119, 1]), (1000, [120])],
        ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} pages",
    )
    async def test_tasks_of_the_same_instant_come_once_each(
        self, store: TaskStore, limit: int, sizes: list[int]
    ) -> None:
        """With ties in the order, an offset or a bare timestamp repeats some and skips others.

        Case 11, datalayer/jupyter-mcp-server#456: tasks of one second were repeated or skipped, and there was no next
        cursor.
        """
        created = [(await store.create_task(auth=ALICE)).task_id for _ in range(120)]

        found = await pages(store, auth=ALICE, limit=limit)

        assert [len(page) for page in found] == sizes
        assert [task_id for page in found for task_id in page] == sorted(created, reverse=True)

    async def test_pages_of_one_task_lead_through_all(self, store: TaskStore, clock: ManualClock) -> None:
        created = []
        for _ in range(7):
            created.append((await store.create_task(auth=ALICE)).task_id)
            clock.advance(timedelta(milliseconds=1))

        found = await pages(store, auth=ALICE, limit=1)

        assert [page[0] for page in found] == created[::-1]

    async def test_changes_between_pages_neither_repeat_nor_skip_a_task(
        self, store: TaskStore, clock: ManualClock
    ) -> None:
        """The order is by creation, which nothing changes; an order by activity would shift under the reader.

        Case 41, openclaw/openclaw PR#120354: an offset over an order by activity repeated and skipped rows.
        """
        tasks = []
        for _ in range(200):
            tasks.append(await store.create_task(auth=ALICE))
            clock.advance(timedelta(milliseconds=1))
        cursor, seen, turn = None, [], 0
        while True:
            page = await store.list_tasks(auth=ALICE, cursor=cursor, limit=20)
            seen += [task.task_id for task in page.tasks]
            cursor = page.next_cursor
            if cursor is None:
                break
            updated, completed, cancelled = tasks[turn * 9 : turn * 9 + 3]
            turn += 1
            await store.handle(updated).progress(turn)
            await store.handle(completed).complete({"turn": turn})
            await store.cancel_task(cancelled.task_id, auth=ALICE)
            await store.create_task(auth=ALICE)
            clock.advance(timedelta(milliseconds=1))

        old = {task.task_id for task in tasks}
        assert len(seen) == len(set(seen))
        assert old <= set(seen)

    async def test_a_listing_narrows_by_status_and_session(self, store: TaskStore, finish: Finish) -> None:
        done = await finish(store, session_id="one")
        live = await store.create_task(auth=ALICE, session_id="two")

        by_status = await store.list_tasks(auth=ALICE, status=TaskStatus.COMPLETED)
        by_session = await store.list_tasks(auth=ALICE, session_id="two")
        by_both = await store.list_tasks(auth=ALICE, status=TaskStatus.COMPLETED, session_id="two")
        of_bob = await store.list_tasks(auth=BOB, session_id="two")

        assert [task.task_id for task in by_status.tasks] == [done.task_id]
        assert [task.task_id for task in by_session.tasks] == [live.task_id]
        assert by_both.tasks == of_bob.tasks == ()

    async def test_what_can_be_got_can_be_listed_and_the_other_way_round(
        self, store: TaskStore, finish: Finish, clock: ManualClock
    ) -> None:
        """MCP 2025-11-25: anything retrievable by tasks/get is retrievable by tasks/list for that requestor."""
        live = await store.create_task(auth=ALICE)
        gone = await finish(store, ttl=timedelta(minutes=20))
        kept = await finish(store, ttl=timedelta(days=1))
        clock.advance(timedelta(hours=2))

        listed = {task.task_id for task in (await store.list_tasks(auth=ALICE)).tasks}

        assert listed == {live.task_id, kept.task_id}
        assert gone.task_id not in listed

    @pytest.mark.parametrize("limit", [0, -1, 1001])
    async def test_a_page_size_out_of_range_is_refused(self, store: TaskStore, limit: int) -> None:
        for auth in (ALICE, None):
            with pytest.raises(ValueError, match="limit must be 1 to 1000"):
                await store.list_tasks(auth=auth, limit=limit)

    async def test_the_operator_lists_everybodys_tasks(
        self, store: TaskStore, clock: ManualClock, finish: Finish
    ) -> None:
        created = []
        for auth in (ALICE, BOB, None):
            created.append((await store.create_task(auth=auth, name="tool", session_id="s")).task_id)
            clock.advance(timedelta(milliseconds=1))
        done = await finish(store, name="other")

        first = await store.operator.list_tasks(limit=2)
        second = await store.operator.list_tasks(limit=2, cursor=first.next_cursor)
        named = await store.operator.list_tasks(name="tool", session_id="s", server="", status=TaskStatus.WORKING)

        assert [task.task_id for task in (*first.tasks, *second.tasks)] == [done.task_id, *created[::-1]]
        assert second.next_cursor is None
        assert [task.task_id for task in named.tasks] == created[::-1]
