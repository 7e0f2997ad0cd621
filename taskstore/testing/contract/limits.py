"""Limits: what one auth context may have and ask, whatever comes at once, and at nobody else's cost."""

import asyncio
from datetime import timedelta

import pytest

from taskstore import LimitExceededError, Limits, PayloadError, TaskStatus
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, BOB, Finish, OpenStore


class LimitsContract:
    """Limits: what one auth context may have and ask, whatever comes at once, and at nobody else's cost."""

    async def test_creates_at_once_cannot_pass_a_limit(self, open_store: OpenStore) -> None:
        """A count that is read before the INSERT of another transaction lets both through."""
        limits = Limits(live_tasks=10)
        store, peer = await open_store(limits=limits), await open_store(limits=limits)

        answers = await asyncio.gather(
            *(each.create_task(auth=ALICE) for each in (store, peer) * 10), return_exceptions=True
        )

        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(answers) - len(refused) == 10
        assert all(isinstance(answer, LimitExceededError) for answer in refused)
        assert len((await store.list_tasks(auth=ALICE)).tasks) == 10

    async def test_one_auth_context_at_its_limit_leaves_the_others_alone(self, open_store: OpenStore) -> None:
        """Nothing of anybody is thrown out to make room.

        Case 67, TJC-LP/fast-mcp-scala PR#89: cheap calls with a long ttl filled the store, which all requestors shared.
        """
        store = await open_store(limits=Limits(live_tasks=1))
        kept = await store.create_task(auth=ALICE)

        with pytest.raises(
            LimitExceededError, match=r"live_tasks=1; wait for one of its tasks to finish, or cancel one\.$"
        ):
            await store.create_task(auth=ALICE)

        assert (await store.create_task(auth=BOB)).status is TaskStatus.WORKING
        assert (await store.create_task(auth=None)).status is TaskStatus.WORKING
        assert (await store.get_task(kept.task_id, auth=ALICE)) == kept

    async def test_a_finished_task_counts_as_stored_and_no_longer_as_live(
        self, open_store: OpenStore, clock: ManualClock, finish: Finish
    ) -> None:
        """Each limit says what it counts.

        Case 67, TJC-LP/fast-mcp-scala PR#89: cheap calls with a long ttl filled the store, which all requestors shared.
        """
        live = await open_store(limits=Limits(live_tasks=1))
        stored = await open_store(limits=Limits(stored_tasks=2))
        await finish(live, ttl=timedelta(minutes=20))
        await finish(live, ttl=timedelta(minutes=20))

        with pytest.raises(
            LimitExceededError, match=r"stored_tasks=2; delete a finished task, or wait for one to go\.$"
        ):
            await stored.create_task(auth=ALICE)
        clock.advance(timedelta(hours=1))

        assert (await stored.create_task(auth=ALICE)).status is TaskStatus.WORKING

    async def test_a_repeated_create_is_found_at_the_limit_too(self, open_store: OpenStore) -> None:
        store = await open_store(limits=Limits(live_tasks=1, stored_tasks=1))
        first = await store.create_task(auth=ALICE, idempotency_key="k")

        again = await store.create_task(auth=ALICE, idempotency_key="k")

        assert (again.task_id, again.existing) == (first.task_id, True)

    async def test_a_payload_over_the_limit_is_refused_and_the_task_can_still_end(self, open_store: OpenStore) -> None:
        store = await open_store(limits=Limits(payload_bytes=100))
        with pytest.raises(PayloadError, match=r"\$\.request cannot be stored: it takes 202 bytes"):
            await store.create_task(auth=ALICE, request="x" * 200)
        handle = store.handle(await store.create_task(auth=ALICE))

        with pytest.raises(PayloadError, match="payload_bytes=100"):
            await handle.complete("x" * 200)

        assert (await handle.fail("the result is too large")).status is TaskStatus.FAILED

    async def test_reads_are_limited_by_the_minute_and_by_auth_context(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = await open_store(limits=Limits(reads_per_minute=3))
        task, other = await store.create_task(auth=ALICE), await store.create_task(auth=BOB)
        for _ in range(3):
            await store.get_task(task.task_id, auth=ALICE)

        with pytest.raises(LimitExceededError, match="reads_per_minute"):
            await store.get_details(task.task_id, auth=ALICE)
        of_bob = await store.get_task(other.task_id, auth=BOB)
        clock.advance(timedelta(minutes=1))

        assert of_bob == other
        assert await store.get_task(task.task_id, auth=ALICE) == task

    async def test_a_page_is_no_larger_than_its_limit(self, open_store: OpenStore) -> None:
        store = await open_store(limits=Limits(page_size=10))

        with pytest.raises(ValueError, match="limit must be 1 to 10, not 100"):
            await store.list_tasks(auth=ALICE)

    @pytest.mark.parametrize("name", ["live_tasks", "stored_tasks", "payload_bytes", "page_size", "reads_per_minute"])
    def test_a_limit_below_one_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"Limits.{name} must be at least 1"):
            Limits(**{name: 0})
