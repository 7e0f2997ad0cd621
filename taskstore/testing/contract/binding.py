"""Whose task it is: exact equality, and nothing that tells a foreign task from no task."""

from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from taskstore import AuthContext, BindingError, InvalidCursorError, TaskNotFoundError, TaskStore
from taskstore.testing.protocols import ALICE, BOB, Finish, OpenStore

UNKNOWN = "tsk_06dndml800" + "0" * 54


def calls_of_a_requestor(
    store: TaskStore, task_id: str, auth: AuthContext | None
) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every call that names a task and says who asks."""
    return {
        "get_task": lambda: store.get_task(task_id, auth=auth),
        "get_details": lambda: store.get_details(task_id, auth=auth),
        "get_outcome": lambda: store.get_outcome(task_id, auth=auth),
        "wait_for_task": lambda: store.wait_for_task(task_id, auth=auth),
        "cancel_task": lambda: store.cancel_task(task_id, auth=auth),
        "answer_inputs": lambda: store.answer_inputs(task_id, {"key": {}}, auth=auth),
        "list_events": lambda: store.list_events(task_id, auth=auth),
        "delete_task": lambda: store.delete_task(task_id, auth=auth),
    }


CALLS = sorted(calls_of_a_requestor(None, "", None))  # type: ignore[arg-type]


class BindingContract:
    """Whose task it is: exact equality, and nothing that tells a foreign task from no task."""

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("finished", [False, True], ids=["live", "finished"])
    async def test_somebody_elses_task_looks_like_no_task(
        self, store: TaskStore, finish: Finish, call: str, finished: bool
    ) -> None:
        """Any difference would tell an attacker which ids exist.

        Case 9, modelcontextprotocol/typescript-sdk PR#1486: the argument that says who asks was accepted and ignored.
        """
        task = await finish(store) if finished else await store.create_task(auth=ALICE)

        with pytest.raises(TaskNotFoundError) as foreign:
            await calls_of_a_requestor(store, task.task_id, BOB)[call]()
        with pytest.raises(TaskNotFoundError) as unknown:
            await calls_of_a_requestor(store, UNKNOWN, BOB)[call]()

        assert str(foreign.value).replace(task.task_id[:18], "ID") == str(unknown.value).replace(UNKNOWN[:18], "ID")
        assert await store.get_task(task.task_id, auth=ALICE) == task

    @pytest.mark.parametrize("owner", [None, ALICE], ids=["unbound", "alice's"])
    @pytest.mark.parametrize("reader", [None, ALICE, BOB], ids=["nobody", "alice", "bob"])
    async def test_only_the_same_auth_context_finds_a_task(
        self, store: TaskStore, owner: AuthContext | None, reader: AuthContext | None
    ) -> None:
        """An unbound task is no public one, and a bound one is not open to those without an auth context.

        Case 39, joshrotenberg/tower-mcp PR#1089: tasks with and without an owner were mixed up.
        """
        task = await store.create_task(auth=owner)

        if owner == reader:
            assert (await store.get_task(task.task_id, auth=reader)).task_id == task.task_id
        else:
            with pytest.raises(TaskNotFoundError):
                await store.get_task(task.task_id, auth=reader)

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("wrong", ["", "alice"], ids=["empty", "name"])
    async def test_a_bare_string_asks_for_nothing(self, store: TaskStore, call: str, wrong: str) -> None:
        """None must be said explicitly, and an empty string is what a missing claim looks like.

        Case 39, joshrotenberg/tower-mcp PR#1089: tasks with and without an owner were mixed up.
        """
        task = await store.create_task(auth=None)

        with pytest.raises(TypeError, match="AuthContext"):
            await calls_of_a_requestor(store, task.task_id, cast(AuthContext, wrong))[call]()

        assert await store.get_task(task.task_id, auth=None) == task

    async def test_listing_shows_ones_own_tasks_only(self, store: TaskStore) -> None:
        """A listing names ids, and so must not be wider than a get.

        Case 9, modelcontextprotocol/typescript-sdk PR#1486: the argument that says who asks was accepted and ignored.
        """
        mine = await store.create_task(auth=ALICE)
        await store.create_task(auth=BOB)
        await store.create_task(auth=None)

        page = await store.list_tasks(auth=ALICE)

        assert [task.task_id for task in page.tasks] == [mine.task_id]

    async def test_without_an_auth_context_nothing_is_listed(self, store: TaskStore) -> None:
        """All anonymous callers look the same, so a listing would show each of them everybody's tasks."""
        task = await store.create_task(auth=None)

        assert (await store.list_tasks(auth=None)).tasks == ()
        assert (await store.get_task(task.task_id, auth=None)).task_id == task.task_id

    async def test_a_cursor_is_bound_to_its_auth_context_and_filter(self, store: TaskStore) -> None:
        """A cursor that leaked, or was made up, must lead nowhere."""
        for auth in (ALICE, BOB):
            for _ in range(3):
                await store.create_task(auth=auth, session_id="s")
        cursor = (await store.list_tasks(auth=ALICE, limit=2)).next_cursor
        assert cursor is not None

        for arguments in (
            {"auth": BOB, "cursor": cursor},
            {"auth": ALICE, "cursor": cursor, "status": "working"},
            {"auth": ALICE, "cursor": cursor, "session_id": "s"},
            {"auth": ALICE, "cursor": cursor[:-2]},
            {"auth": ALICE, "cursor": "A" * len(cursor)},
            {"auth": ALICE, "cursor": ""},
            {"auth": ALICE, "cursor": "é"},
            {"auth": ALICE, "cursor": (await store.operator.list_tasks(limit=2)).next_cursor},
        ):
            with pytest.raises(InvalidCursorError):
                await store.list_tasks(**arguments)

        assert len((await store.list_tasks(auth=ALICE, cursor=cursor)).tasks) == 1

    async def test_ids_and_cursors_hold_no_trace_of_the_auth_context(self, store: TaskStore) -> None:
        auth = AuthContext(subject="mallory@example.com")
        for _ in range(2):
            task = await store.create_task(auth=auth)
        cursor = (await store.list_tasks(auth=auth, limit=1)).next_cursor

        assert "mallory" not in repr((task, cursor))

    @pytest.mark.parametrize(
        "nonsense",
        ["", "x", "tsk_", "a\x00b", "\ud800", "💥", "' OR 1=1 --", "%", "_" * 10_000],
        ids=lambda text: ascii(text)[:12],
    )
    async def test_an_id_that_never_was_one_is_just_unknown(self, store: TaskStore, nonsense: str) -> None:
        """What comes from the wire may be anything; the answer is the same on both databases.

        Case 31, oaslananka/kicad-mcp-pro PR#75: an unknown id was answered as 'working', and the client polled for
        ever.
        """
        with pytest.raises(TaskNotFoundError):
            await store.get_task(nonsense, auth=ALICE)

    async def test_a_database_opens_only_under_its_binding_secret(
        self, store: TaskStore, open_store: OpenStore
    ) -> None:
        """Under another secret every task would silently be nobody's."""
        with pytest.raises(BindingError, match="bound under another secret"):
            await open_store(binding_secret=b"another secret, long enough")
