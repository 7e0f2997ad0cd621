"""tasks/get, tasks/update and tasks/cancel over a real store, without any SDK."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import JsonValue

from taskstore import AuthContext, Limits, StoreOptions, TaskStatus, TaskStore
from taskstore.adapters.requests import RequestError, cancel_task, get_task, update_task

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")
EVERY_REQUEST = pytest.mark.parametrize("answer", [get_task, update_task, cancel_task])


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[TaskStore]:
    async with TaskStore.open(database_url) as opened:
        yield opened


def params(task_id: JsonValue) -> dict[str, JsonValue]:
    return {"taskId": task_id, "inputResponses": {}}


async def test_get_answers_the_task_and_its_result(store: TaskStore) -> None:
    """One poll brings everything: there is no second request for the result."""
    task = await store.create_task(auth=ALICE)
    working = await get_task(store, ALICE, params(task.task_id))
    await store.handle(task).complete({"content": []})

    completed = await get_task(store, ALICE, params(task.task_id))

    assert (working["status"], completed["status"]) == ("working", "completed")
    assert completed["result"] == {"content": []}


async def test_a_client_that_polls_too_fast_is_told_so(database_url: str) -> None:
    """It must be able to tell 'ask less often' from a fault of the server."""
    options = StoreOptions(limits=Limits(reads_per_minute=1))
    async with TaskStore.open(database_url, options=options) as store:
        task = await store.create_task(auth=ALICE)
        await get_task(store, ALICE, params(task.task_id))

        with pytest.raises(RequestError, match="poll less often") as refusal:
            await get_task(store, ALICE, params(task.task_id))

        assert await update_task(store, ALICE, params(task.task_id)) == {"resultType": "complete"}
    assert (refusal.value.code, refusal.value.data) == (-32603, {"reason": "LIMIT_EXCEEDED"})


@EVERY_REQUEST
@pytest.mark.parametrize("task_id", ["tsk_unknown", "tsk_\x00", "tsk_\ud800", "x" * 100_000])
async def test_an_unknown_id_is_not_found(store: TaskStore, answer: Any, task_id: str) -> None:
    """Ids come from strangers; none of them may reach the database as an error."""
    with pytest.raises(RequestError) as refusal:
        await answer(store, ALICE, params(task_id))

    assert (refusal.value.code, refusal.value.message) == (-32602, "Failed to retrieve task: Task not found")


@EVERY_REQUEST
@pytest.mark.parametrize("stranger", [BOB, None], ids=["bob", "unbound"])
async def test_somebody_elses_task_looks_like_no_task(
    store: TaskStore, answer: Any, stranger: AuthContext | None
) -> None:
    """A different answer would tell a stranger that the id exists."""
    task = await store.create_task(auth=ALICE)

    with pytest.raises(RequestError) as refusal:
        await answer(store, stranger, params(task.task_id))

    assert (refusal.value.code, refusal.value.message) == (-32602, "Failed to retrieve task: Task not found")
    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.WORKING


@EVERY_REQUEST
@pytest.mark.parametrize("task_id", [None, 7, "", ["tsk_1"]])
async def test_a_malformed_task_id_is_named(store: TaskStore, answer: Any, task_id: JsonValue) -> None:
    """The author of the client reads this."""
    with pytest.raises(RequestError, match="taskId") as refusal:
        await answer(store, ALICE, params(task_id))

    assert refusal.value.code == -32602


async def test_missing_params_are_named(store: TaskStore) -> None:
    """The author of the client reads this."""
    with pytest.raises(RequestError, match="taskId"):
        await get_task(store, ALICE, {})


@pytest.mark.parametrize("responses", [None, [], "yes"])
async def test_malformed_input_responses_are_named(store: TaskStore, responses: JsonValue) -> None:
    """The author of the client reads this."""
    task = await store.create_task(auth=ALICE)

    with pytest.raises(RequestError, match="inputResponses") as refusal:
        await update_task(store, ALICE, {"taskId": task.task_id, "inputResponses": responses})

    assert refusal.value.code == -32602


async def test_cancel_acknowledges_and_cancels(store: TaskStore) -> None:
    """The acknowledgement is empty; the status is read with tasks/get."""
    task = await store.create_task(auth=ALICE)

    assert await cancel_task(store, ALICE, params(task.task_id)) == {"resultType": "complete"}

    assert (await get_task(store, ALICE, params(task.task_id)))["status"] == "cancelled"


async def test_cancel_of_a_finished_task_acknowledges_and_changes_nothing(store: TaskStore) -> None:
    """A client that cancels at the moment of success has done nothing wrong, and must not lose the result."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).complete({"content": []})

    assert await cancel_task(store, ALICE, params(task.task_id)) == {"resultType": "complete"}

    assert (await get_task(store, ALICE, params(task.task_id)))["status"] == "completed"


async def test_update_ignores_responses_that_nobody_asked_for(store: TaskStore) -> None:
    """A late or repeated response is no fault of the client, whatever is in it."""
    task = await store.create_task(auth=ALICE)
    responses: dict[str, JsonValue] = {"never-asked": {"ignored": True}, "odd": None}

    acknowledged = await update_task(store, ALICE, {"taskId": task.task_id, "inputResponses": responses})

    assert acknowledged == {"resultType": "complete"}
    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.WORKING


async def test_update_of_a_finished_task_acknowledges(store: TaskStore) -> None:
    """None of its requests is open any more, so every response is one to ignore."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).complete({"content": []})

    acknowledged = await update_task(store, ALICE, {"taskId": task.task_id, "inputResponses": {"k": {}}})

    assert acknowledged == {"resultType": "complete"}
