"""A create that is repeated: one task, however often, wherever and whenever it is said again."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from taskstore import AuthContext, IdempotencyConflictError, Task, TaskNotFoundError, TaskStatus, TaskStore
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, BOB, OpenStore

REQUEST = {"name": "report", "arguments": {"topic": "tides", "pages": 3}}


async def create(store: TaskStore, auth: AuthContext | None = ALICE, **changes: Any) -> Task:
    """Create the task of this module's request."""
    return await store.create_task(
        **{"auth": auth, "name": "report", "request": REQUEST, "idempotency_key": "k1", **changes}
    )


class IdempotencyContract:
    """A create that is repeated: one task, however often, wherever and whenever it is said again."""

    async def test_twenty_creates_at_once_make_one_task(self, store: TaskStore, peer: TaskStore) -> None:
        """A client that got no answer asks again, perhaps through another server, perhaps before the first is done.

        Case 61, aws-samples/sample-autonomous-cloud-coding-agents#58, ulsklyc/yuvomi#822: a create that was retried
        made two tasks, or an error.
        """
        tasks = await asyncio.gather(*(create(each) for each in (store, peer) * 10))

        assert len({task.task_id for task in tasks}) == 1
        assert [task.existing for task in tasks].count(False) == 1
        assert len((await store.list_tasks(auth=ALICE)).tasks) == 1

    async def test_a_repeated_create_finds_the_task_as_it_is_now(self, store: TaskStore, open_store: OpenStore) -> None:
        """Also after a restart, and after the finish: the key lives as long as its task is kept.

        Case 61, aws-samples/sample-autonomous-cloud-coding-agents#58, ulsklyc/yuvomi#822: a create that was retried
        made two tasks, or an error.
        """
        first = await create(store)
        await store.handle(first).complete({"ok": True})

        again = await create(await open_store())

        assert (again.task_id, again.existing, again.status) == (first.task_id, True, TaskStatus.COMPLETED)
        with pytest.raises(ValueError, match="existed before"):
            store.handle(again)

    @pytest.mark.parametrize(
        "changes",
        [{"request": {"name": "report"}}, {"request": None}, {"name": "other"}, {"method": "prompts/get"}],
        ids=str,
    )
    async def test_another_request_under_the_same_key_is_a_conflict(
        self, store: TaskStore, changes: dict[str, Any]
    ) -> None:
        """Answering it with the first one's task would silently drop a request.

        Case 61, aws-samples/sample-autonomous-cloud-coding-agents#58, ulsklyc/yuvomi#822: a create that was retried
        made two tasks, or an error.
        """
        first = await create(store)

        with pytest.raises(IdempotencyConflictError) as refused:
            await create(store, **changes)

        assert refused.value.task_id == first.task_id
        assert len((await store.list_tasks(auth=ALICE)).tasks) == 1

    async def test_the_same_request_may_order_its_keys_otherwise(self, store: TaskStore) -> None:
        """Two encoders of one client need not agree on the order of an object's keys."""
        first = await create(store)

        again = await create(store, request={"arguments": {"pages": 3, "topic": "tides"}, "name": "report"})

        assert again.task_id == first.task_id

    async def test_a_key_is_its_auth_contexts_own(self, store: TaskStore) -> None:
        """Two requestors may choose the same key.

        Case 61, aws-samples/sample-autonomous-cloud-coding-agents#58, ulsklyc/yuvomi#822: a create that was retried
        made two tasks, or an error.
        """
        first, other = await create(store), await create(store, auth=BOB)

        assert first.task_id != other.task_id
        assert not other.existing

    async def test_without_an_auth_context_a_key_is_refused(self, store: TaskStore) -> None:
        """All anonymous callers would share their keys, and find each other's tasks by them."""
        with pytest.raises(ValueError, match="auth context"):
            await create(store, auth=None)

        assert (await store.operator.health()).live == 0

    @pytest.mark.parametrize("swept", [False, True], ids=["unswept", "swept"])
    async def test_an_expired_task_gives_its_key_free(self, store: TaskStore, clock: ManualClock, swept: bool) -> None:
        """What nobody can find any more must not stand in the way of a new request.

        Case 61, aws-samples/sample-autonomous-cloud-coding-agents#58, ulsklyc/yuvomi#822: a create that was retried
        made two tasks, or an error.
        """
        first = await create(store, ttl=timedelta(minutes=20))
        await store.handle(first).complete({"ok": True})
        clock.advance(timedelta(hours=1))
        if swept:
            await store.sweep()

        again = await create(store, request={"another": "request"})

        assert again.task_id != first.task_id
        assert not again.existing
        with pytest.raises(TaskNotFoundError):
            await store.get_task(first.task_id, auth=ALICE)

    async def test_creates_without_a_key_are_all_different(self, store: TaskStore) -> None:
        tasks = [await create(store, idempotency_key=None) for _ in range(3)]

        assert len({task.task_id for task in tasks}) == 3
