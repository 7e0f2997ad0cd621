"""Input requests: asked and answered in the database, so that any process can answer."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import pytest
from pydantic import JsonValue

from taskstore import EventKind, PayloadError, Task, TaskDetails, TaskFinishedError, TaskStatus, TaskStore
from taskstore.testing.protocols import ALICE, OpenStore

NAME: JsonValue = {"method": "elicitation/create", "params": {"message": "Your name?"}}


SURE: JsonValue = {"method": "elicitation/create", "params": {"message": "Sure?"}}


async def ask(
    store: TaskStore, task: Task, questions: dict[str, JsonValue]
) -> tuple[asyncio.Task[Mapping[str, JsonValue]], TaskDetails, dict[str, str]]:
    """Ask, and return once the questions are there."""
    asking: asyncio.Task[Mapping[str, JsonValue]] = asyncio.create_task(store.handle(task).ask(questions))
    asked = await store.wait_for_task(
        task.task_id, auth=ALICE, since_version=task.version, timeout=timedelta(seconds=30)
    )
    assert asked.status is TaskStatus.INPUT_REQUIRED
    details = await store.get_details(task.task_id, auth=ALICE)
    keys = {key.rpartition("-")[0]: key for key in details.input_requests}
    return asking, details, keys


class InputsContract:
    """Input requests: asked and answered in the database, so that any process can answer."""

    async def test_an_answer_through_another_process_resumes_the_tool(self, store: TaskStore, peer: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)
        asking, details, keys = await ask(store, task, {"name": NAME})

        resumed = await peer.answer_inputs(task.task_id, {keys["name"]: {"action": "accept"}}, auth=ALICE)

        assert dict(details.input_requests) == {keys["name"]: NAME}
        assert resumed.status is TaskStatus.WORKING
        assert await asyncio.wait_for(asking, 10) == {"name": {"action": "accept"}}
        events = await store.list_events(task.task_id, auth=ALICE)
        assert [event.kind for event in events] == [EventKind.CREATED, EventKind.INPUT_REQUIRED, EventKind.RESUMED]

    async def test_answers_may_come_one_by_one(self, store: TaskStore) -> None:
        """The task keeps asking for the rest, and shows only that."""
        task = await store.create_task(auth=ALICE)
        asking, _, keys = await ask(store, task, {"name": NAME, "sure": SURE})

        partial = await store.answer_inputs(task.task_id, {keys["name"]: "Ann"}, auth=ALICE)
        left = await store.get_details(task.task_id, auth=ALICE)
        whole = await store.answer_inputs(task.task_id, {keys["sure"]: True}, auth=ALICE)

        assert partial.status is TaskStatus.INPUT_REQUIRED
        assert dict(left.input_requests) == {keys["sure"]: SURE}
        assert whole.status is TaskStatus.WORKING
        assert await asyncio.wait_for(asking, 10) == {"name": "Ann", "sure": True}

    async def test_two_answers_at_once_resume_the_tool(self, store: TaskStore, peer: TaskStore) -> None:
        """Each of two processes sees a question left open, unless one waits for the other."""
        for _ in range(10):
            task = await store.create_task(auth=ALICE)
            asking, _, keys = await ask(store, task, {"name": NAME, "sure": SURE})

            answered = await asyncio.gather(
                store.answer_inputs(task.task_id, {keys["name"]: "Ann"}, auth=ALICE),
                peer.answer_inputs(task.task_id, {keys["sure"]: True}, auth=ALICE),
            )

            assert TaskStatus.WORKING in {task.status for task in answered}
            assert await asyncio.wait_for(asking, 10) == {"name": "Ann", "sure": True}

    async def test_unknown_and_answered_keys_are_ignored_unread(self, store: TaskStore) -> None:
        """MCP 2026-07-28: responses for keys that are not outstanding are ignored, without validating them."""
        task = await store.create_task(auth=ALICE)
        before = await store.answer_inputs(task.task_id, {"never asked": float("nan")}, auth=ALICE)
        asking, _, keys = await ask(store, task, {"name": NAME, "sure": SURE})
        await store.answer_inputs(task.task_id, {keys["name"]: "Ann"}, auth=ALICE)

        again = await store.answer_inputs(
            task.task_id, {keys["name"]: float("nan"), "never asked": cast(Any, object()), "\x00": 1}, auth=ALICE
        )
        await store.answer_inputs(task.task_id, {keys["sure"]: True}, auth=ALICE)

        assert before == task
        assert again.status is TaskStatus.INPUT_REQUIRED
        assert (await asyncio.wait_for(asking, 10))["name"] == "Ann"

    async def test_an_answer_that_cannot_be_stored_leaves_the_question_open(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)
        asking, details, keys = await ask(store, task, {"name": NAME})

        with pytest.raises(PayloadError, match=r"\$\.name-\w+\.age"):
            await store.answer_inputs(task.task_id, {keys["name"]: {"age": float("nan")}}, auth=ALICE)

        assert await store.get_details(task.task_id, auth=ALICE) == details
        await store.cancel_task(task.task_id, auth=ALICE)
        with pytest.raises(TaskFinishedError):
            await asyncio.wait_for(asking, 10)

    async def test_questions_and_answers_are_repaired_where_the_store_is_told_to(self, open_store: OpenStore) -> None:
        store = await open_store(payload_policy="repair")
        task = await store.create_task(auth=ALICE)
        asking, details, keys = await ask(store, task, {"name": {"method": "elicitation/create", "params": ["\ud800"]}})

        await store.answer_inputs(task.task_id, {keys["name"]: {"age": float("nan")}}, auth=ALICE)

        assert details.input_requests[keys["name"]] == {"method": "elicitation/create", "params": ["\ufffd"]}
        assert await asyncio.wait_for(asking, 10) == {"name": {"age": None}}

    async def test_a_tool_may_ask_again_under_the_same_name(self, store: TaskStore) -> None:
        """Keys on the wire are unique for a task's whole life; the tool's own names need not be."""
        task = await store.create_task(auth=ALICE)
        first, _, first_keys = await ask(store, task, {"name": NAME})
        resumed = await store.answer_inputs(task.task_id, {first_keys["name"]: "Ann"}, auth=ALICE)
        await asyncio.wait_for(first, 10)

        second, _, second_keys = await ask(store, resumed, {"name": NAME})
        await store.answer_inputs(task.task_id, {second_keys["name"]: "Bea"}, auth=ALICE)

        assert await asyncio.wait_for(second, 10) == {"name": "Bea"}
        assert first_keys != second_keys

    async def test_asking_nothing_is_refused(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)

        with pytest.raises(ValueError, match="at least one"):
            await store.handle(task).ask({})

    async def test_a_task_that_waits_for_input_can_be_finished_and_shows_no_questions_then(
        self, store: TaskStore
    ) -> None:
        task = await store.create_task(auth=ALICE)
        asking, _, _ = await ask(store, task, {"name": NAME})

        await store.cancel_task(task.task_id, auth=ALICE)

        with pytest.raises(TaskFinishedError):
            await asyncio.wait_for(asking, 10)
        details = await store.get_details(task.task_id, auth=ALICE)
        assert (details.task.status, dict(details.input_requests)) == (TaskStatus.CANCELLED, {})

    async def test_a_tool_that_stops_waiting_for_an_answer_can_go_on(self, store: TaskStore) -> None:
        """A tool's own timeout must not leave the task asking for something that nobody waits for."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        asking = asyncio.create_task(handle.ask({"name": {"method": "elicitation/create"}}))
        asked = await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
        key = next(iter((await store.get_details(task.task_id, auth=ALICE)).input_requests))

        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

        resumed = await store.wait_for_task(task.task_id, auth=ALICE, since_version=asked.version)
        late = await store.answer_inputs(task.task_id, {key: "too late"}, auth=ALICE)
        again = asyncio.create_task(handle.ask({"name": {"method": "elicitation/create"}}))
        await store.wait_for_task(task.task_id, auth=ALICE, since_version=late.version)
        fresh = next(iter((await store.get_details(task.task_id, auth=ALICE)).input_requests))
        await store.answer_inputs(task.task_id, {fresh: "Ann"}, auth=ALICE)
        assert (resumed.status, late.status) == (TaskStatus.WORKING, TaskStatus.WORKING)
        assert await asyncio.wait_for(again, 10) == {"name": "Ann"}

    async def test_a_question_that_is_cancelled_while_it_is_written_is_withdrawn_too(self, store: TaskStore) -> None:
        """The write goes on without its caller; a task that asks for nobody would never be worked on again."""
        for turns in range(1, 6):
            task = await store.create_task(auth=ALICE)
            asking = asyncio.create_task(store.handle(task).ask({"name": {"method": "elicitation/create"}}))
            for _ in range(turns):
                await asyncio.sleep(0)

            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

            left = await store.get_details(task.task_id, auth=ALICE)
            assert (left.task.status, dict(left.input_requests)) == (TaskStatus.WORKING, {})
