"""Creating tasks: durable, bound, with the lifetime asked for."""

from datetime import timedelta
from typing import Any, cast

import pytest

from taskstore import AuthContext, PayloadError, TaskStatus, TaskStore
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, OpenStore


def task_id_is_header_safe(task_id: str) -> bool:
    """Tell whether a header can carry an id, and any client can compare it."""
    return task_id.isascii() and task_id.replace("_", "").isalnum() and task_id == task_id.lower()


class CreateContract:
    """Creating tasks: durable, bound, with the lifetime asked for."""

    async def test_a_created_task_is_there_for_everybody_at_once(self, store: TaskStore, peer: TaskStore) -> None:
        """A client may poll through another server the moment it has the id."""
        task = await store.create_task(auth=ALICE, name="report", request={"topic": "tides"})

        seen = await peer.get_task(task.task_id, auth=ALICE)

        assert seen == task
        assert (seen.status, seen.version, seen.attempt, seen.crashes) == (TaskStatus.WORKING, 1, 1, 0)
        assert (seen.name, seen.method, seen.existing, seen.cancel_requested) == ("report", "tools/call", False, False)

    async def test_ids_are_unguessable_unique_and_sort_by_creation(self, store: TaskStore, clock: ManualClock) -> None:
        """An id of an unbound task is a bearer secret; the time in front keeps inserts in index order."""
        first = [(await store.create_task(auth=ALICE)).task_id for _ in range(20)]
        clock.advance(timedelta(milliseconds=1))
        later = (await store.create_task(auth=ALICE)).task_id

        assert len(set(first)) == 20
        assert all(task_id.startswith("tsk_") and len(task_id) == 68 for task_id in first)
        assert task_id_is_header_safe(first[0])
        assert max(first) < later
        assert len({task_id[14:] for task_id in first}) == 20

    @pytest.mark.parametrize(
        ("asked", "granted"),
        [
            (timedelta(minutes=5), timedelta(minutes=5)),
            (timedelta(days=30), timedelta(days=30)),
            (timedelta(days=400), timedelta(days=30)),
            (None, timedelta(days=30)),
            (timedelta(0), timedelta(0)),
            (timedelta(microseconds=1500), timedelta(milliseconds=2)),
        ],
    )
    async def test_a_ttl_is_cut_to_the_longest_allowed_and_reported_so(
        self, store: TaskStore, clock: ManualClock, asked: timedelta | None, granted: timedelta
    ) -> None:
        """A client plans by the ttl it is told; one beyond a 32-bit count of milliseconds must not fire at once.

        Case 33, stablemates/workhorse PR#106, isaacs/ttlcache#41: a ttl above 24.8 days, the milliseconds of 32 bits,
        fired at once.
        """
        task = await store.create_task(auth=ALICE, ttl=asked)

        stored = await store.get_task(task.task_id, auth=ALICE)
        await store.sweep()

        if asked != timedelta(0):  # past its ttl already, a live task is shown with what it still has
            assert stored.ttl == granted
            assert stored.expires_at == stored.created_at + granted
        assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.WORKING

    async def test_a_ttl_of_none_is_unlimited_only_where_there_is_no_maximum(self, open_store: OpenStore) -> None:
        """'Unlimited' is the operator's to grant.

        Case 33, stablemates/workhorse PR#106, isaacs/ttlcache#41: a ttl above 24.8 days, the milliseconds of 32 bits,
        fired at once.
        """
        store = await open_store(max_ttl=None)

        task = await store.create_task(auth=ALICE, ttl=None)
        far = await store.create_task(auth=ALICE, ttl=timedelta(days=400))

        assert (task.ttl, task.expires_at) == (None, None)
        assert (await store.get_task(far.task_id, auth=ALICE)).ttl == timedelta(days=400)

    @pytest.mark.parametrize(
        "ttl", [timedelta.max, timedelta(milliseconds=10**14 + 1)], ids=["the longest", "3,000 years"]
    )
    async def test_a_ttl_beyond_all_measure_is_refused_where_there_is_no_maximum(
        self, open_store: OpenStore, store: TaskStore, ttl: timedelta
    ) -> None:
        """Its end would be an instant that nothing can hold; under a maximum it is cut like any other."""
        unlimited = await open_store(max_ttl=None)

        with pytest.raises(ValueError, match="ask for None instead"):
            await unlimited.create_task(auth=ALICE, ttl=ttl)
        longest = await unlimited.create_task(auth=ALICE, ttl=timedelta(milliseconds=10**14))

        assert (await store.create_task(auth=ALICE, ttl=ttl)).ttl == timedelta(days=30)
        assert longest.expires_at is not None
        assert longest.expires_at.year > 5000

    async def test_a_ttl_that_is_not_given_is_the_stores_default(self, open_store: OpenStore) -> None:
        store = await open_store(default_ttl=timedelta(minutes=7))

        task = await store.create_task(auth=ALICE)

        assert task.ttl == timedelta(minutes=7)

    @pytest.mark.parametrize("setting", ["ttl", "poll_interval"])
    async def test_a_negative_span_is_refused_before_anything_is_written(self, store: TaskStore, setting: str) -> None:
        with pytest.raises(ValueError, match=f"{setting} must not be negative"):
            await store.create_task(auth=ALICE, **cast(dict[str, Any], {setting: timedelta(milliseconds=-1)}))

        assert (await store.list_tasks(auth=ALICE)).tasks == ()

    @pytest.mark.parametrize(
        ("arguments", "path"),
        [
            ({"request": {"rows": [1, float("nan")]}}, r"\$\.request\.rows\[1\]"),
            ({"request": {"text": "\ud800"}}, r"\$\.request\.text"),
            ({"name": "a\x00b"}, r"\$\.name"),
            ({"method": "\udfff"}, r"\$\.method"),
        ],
    )
    async def test_what_cannot_be_stored_is_refused_by_its_path(
        self, store: TaskStore, arguments: dict[str, Any], path: str
    ) -> None:
        """The error must lead to the value, alike on both databases, and before anything is written."""
        with pytest.raises(PayloadError, match=path):
            await store.create_task(auth=ALICE, **arguments)

        assert (await store.operator.health()).live == 0

    @pytest.mark.parametrize("component", ["issuer", "subject", "client_id", "tenant"])
    def test_an_auth_context_has_no_empty_components(self, component: str) -> None:
        """An empty string is what a missing claim looks like; it must never become an identity.

        Case 39, joshrotenberg/tower-mcp PR#1089: tasks with and without an owner were mixed up.
        """
        with pytest.raises(ValueError, match=f"AuthContext.{component} is empty"):
            AuthContext(**{component: ""})

        with pytest.raises(ValueError, match="at least one component"):
            AuthContext()

    async def test_an_auth_context_must_be_given_and_be_one(self, store: TaskStore) -> None:
        """Whose task it is is never left to a default, and a bare string is no auth context.

        Case 39, joshrotenberg/tower-mcp PR#1089: tasks with and without an owner were mixed up.
        """
        with pytest.raises(TypeError, match="auth"):
            await store.create_task()  # type: ignore[call-arg]
        for wrong in ("alice", "", 0, False):
            with pytest.raises(TypeError, match="AuthContext"):
                await store.create_task(auth=wrong)  # type: ignore[arg-type]
