"""The requests of both generations over a real store, without any SDK."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import JsonValue

from taskstore import DEFAULT, AuthContext, DatabaseUnavailableError, Limits, StoreOptions, TaskStatus, TaskStore
from taskstore.adapters import requests
from taskstore.adapters.requests import (
    RequestError,
    cancel_task,
    get_task,
    legacy_cancel_task,
    legacy_get_task,
    legacy_list_tasks,
    legacy_task_result,
    legacy_ttl,
    update_task,
)
from taskstore.testing import ManualClock

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")
EVERY_REQUEST = pytest.mark.parametrize(
    "answer", [get_task, update_task, cancel_task, legacy_get_task, legacy_task_result, legacy_cancel_task]
)


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
    """Ids come from strangers; none of them may reach the database as an error.

    Case 31, oaslananka/kicad-mcp-pro PR#75: an unknown id was answered as 'working', and the client polled for ever.
    """
    with pytest.raises(RequestError) as refusal:
        await answer(store, ALICE, params(task_id))

    assert (refusal.value.code, refusal.value.message) == (-32602, "Failed to retrieve task: Task not found")


@EVERY_REQUEST
async def test_an_expired_id_is_not_found(database_url: str, answer: Any) -> None:
    """A client that comes back too late must hear the end of it.

    Case 31, oaslananka/kicad-mcp-pro PR#75: an unknown id was answered as 'working', and the client polled for ever.
    """
    clock = ManualClock()
    async with TaskStore.open(database_url, options=StoreOptions(clock=clock)) as store:
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete({})
        clock.advance(timedelta(hours=1))

        with pytest.raises(RequestError) as refusal:
            await answer(store, ALICE, params(task.task_id))

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


# --- MCP 2025-11-25


async def test_a_legacy_get_shows_the_task_and_no_outcome(store: TaskStore) -> None:
    """There the result has a request of its own."""
    task = await store.create_task(auth=ALICE)
    working = await legacy_get_task(store, ALICE, params(task.task_id))
    await store.handle(task).complete({"content": []})

    completed = await legacy_get_task(store, ALICE, params(task.task_id))

    assert (working["status"], completed["status"]) == ("working", "completed")
    assert "result" not in completed


async def test_a_legacy_get_of_a_failed_tool_says_why(store: TaskStore) -> None:
    """What the tool said is in its result, which is no part of the task's fields."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).complete({"content": [{"type": "text", "text": "Disk full."}]}, is_error=True)

    polled = await legacy_get_task(store, ALICE, params(task.task_id))

    assert (polled["status"], polled["statusMessage"]) == ("failed", "Disk full.")


async def test_a_result_is_the_stored_one_with_the_mark_of_its_task(store: TaskStore) -> None:
    """The client must get what the call would have returned, isError included (T25-17, T25-19)."""
    task = await store.create_task(auth=ALICE)
    stored: dict[str, JsonValue] = {"content": [], "isError": True, "_meta": {"k": None}}
    await store.handle(task).complete(stored, is_error=True)

    result = await legacy_task_result(store, ALICE, params(task.task_id))

    mark = {"io.modelcontextprotocol/related-task": {"taskId": task.task_id}}
    assert result == {"content": [], "isError": True, "_meta": {"k": None, **mark}}


@pytest.mark.parametrize("data", [None, {"limit": 3}], ids=["bare", "with data"])
async def test_a_stored_error_is_replayed_as_the_request_s_own(store: TaskStore, data: JsonValue) -> None:
    """Code, message and data are those that the call would have been answered with (T25-17)."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).fail("Quota exceeded", code=-31999, data=data)

    with pytest.raises(RequestError) as replayed:
        await legacy_task_result(store, ALICE, params(task.task_id))

    assert (replayed.value.code, replayed.value.message, replayed.value.data) == (-31999, "Quota exceeded", data)


async def test_every_waiter_for_a_result_is_answered(store: TaskStore) -> None:
    """Several requests may wait at once, also on a task that waits for input (T25-18)."""
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    waiters = [asyncio.create_task(legacy_task_result(store, ALICE, params(task.task_id))) for _ in range(3)]
    asking = asyncio.create_task(handle.ask({"name": {"method": "elicitation/create", "params": {}}}))
    asked = await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
    gone = waiters.pop()
    gone.cancel()

    unanswered = [waiter.done() for waiter in waiters]
    open_keys = (await store.get_details(task.task_id, auth=ALICE)).input_requests
    await store.answer_inputs(task.task_id, {key: {"action": "accept"} for key in open_keys}, auth=ALICE)
    await asking
    await handle.complete({"content": []})

    assert asked.status is TaskStatus.INPUT_REQUIRED
    assert unanswered == [False, False]
    assert [result["content"] for result in await asyncio.gather(*waiters)] == [[], []]


async def test_an_answer_waits_for_a_database_that_is_away(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has answered, and will not be asked again."""
    answer_inputs, outages = (
        TaskStore.answer_inputs,
        [DatabaseUnavailableError("away"), DatabaseUnavailableError("away")],
    )

    async def sometimes_away(self: TaskStore, *arguments: Any, **keywords: Any) -> Any:
        if outages:
            raise outages.pop()
        return await answer_inputs(self, *arguments, **keywords)

    async def accept(method: str, params: Any) -> JsonValue:
        return {"action": "accept"}

    monkeypatch.setattr(TaskStore, "answer_inputs", sometimes_away)
    monkeypatch.setattr(requests, "_RETRY", timedelta(0))
    task = await store.create_task(auth=ALICE)
    waiting = asyncio.create_task(legacy_task_result(store, ALICE, params(task.task_id), ask=accept))

    answers = await store.handle(task).ask({"name": {"method": "elicitation/create", "params": {}}})

    waiting.cancel()
    assert answers == {"name": {"action": "accept"}}
    assert caplog.text.count("waits for the database") == 2


async def test_an_answer_that_cannot_be_stored_is_an_error_to_the_tool(database_url: str) -> None:
    """A tool that waited for ever instead would never learn why."""
    options = StoreOptions(limits=Limits(payload_bytes=200))

    async def ramble(method: str, params: Any) -> JsonValue:
        return {"action": "accept", "content": {"name": "x" * 200}}

    async with TaskStore.open(database_url, options=options) as store:
        task = await store.create_task(auth=ALICE)
        waiting = asyncio.create_task(legacy_task_result(store, ALICE, params(task.task_id), ask=ramble))

        answers: Any = await store.handle(task).ask({"name": {"method": "elicitation/create", "params": {}}})

        waiting.cancel()
    assert answers["name"]["error"]["code"] == -32602


async def test_the_result_of_a_cancelled_task_is_an_error_that_says_so(store: TaskStore) -> None:
    """The call came to nothing, and an empty result would look like one."""
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(legacy_task_result(store, ALICE, params(task.task_id)))

    cancelled = await legacy_cancel_task(store, ALICE, params(task.task_id))

    with pytest.raises(RequestError, match="cancelled") as refusal:
        await waiter
    assert cancelled["status"] == "cancelled"
    assert (refusal.value.code, refusal.value.data) == (-32603, {"reason": "CANCELLED"})


async def test_a_result_that_no_request_can_have_is_an_error(store: TaskStore) -> None:
    """A task that was made through the Python API may hold any JSON."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).complete([1, 2])

    with pytest.raises(RequestError, match="no JSON object") as refusal:
        await legacy_task_result(store, ALICE, params(task.task_id))

    assert refusal.value.code == -32603


@pytest.mark.parametrize(
    ("is_error", "shown"), [(False, "completed"), (True, "failed")], ids=["completed", "tool error"]
)
async def test_a_legacy_cancel_of_a_finished_task_is_refused(store: TaskStore, is_error: bool, shown: str) -> None:
    """There a client is told that it came too late, in the words its polls use (T25-37)."""
    task = await store.create_task(auth=ALICE)
    await store.handle(task).complete({"content": []}, is_error=is_error)

    with pytest.raises(RequestError) as refusal:
        await legacy_cancel_task(store, ALICE, params(task.task_id))

    assert refusal.value.code == -32602
    assert refusal.value.message == f"Cannot cancel task: already in terminal status '{shown}'"


async def test_a_list_leads_from_page_to_page_through_the_requestor_s_tasks(database_url: str) -> None:
    """Whatever a client can get it can also list, once each, and nobody else's (T25-35, T25-36, T25-43)."""
    options = StoreOptions(limits=Limits(page_size=2))
    async with TaskStore.open(database_url, options=options) as store:
        created = [(await store.create_task(auth=ALICE)).task_id for _ in range(5)]
        await store.create_task(auth=BOB)

        pages = [await legacy_list_tasks(store, ALICE, {})]
        while "nextCursor" in pages[-1]:
            pages.append(await legacy_list_tasks(store, ALICE, {"cursor": pages[-1]["nextCursor"]}))

    listed: Any = [page["tasks"] for page in pages]
    assert [len(page) for page in listed] == [2, 2, 1]
    assert sorted(task["taskId"] for page in listed for task in page) == sorted(created)


@pytest.mark.parametrize("cursor", ["", "nonsense", "\x00", "\ud800", 7, ["a"]])
async def test_a_cursor_that_is_none_is_refused(store: TaskStore, cursor: JsonValue) -> None:
    """An empty page instead would look like the end of the list (T25-35)."""
    await store.create_task(auth=ALICE)

    with pytest.raises(RequestError, match="cursor") as refusal:
        await legacy_list_tasks(store, ALICE, {"cursor": cursor})

    assert refusal.value.code == -32602


async def test_there_is_no_list_for_requestors_that_cannot_be_told_apart(store: TaskStore) -> None:
    """It would be everybody's list, and with the ids everybody's tasks (T25-45)."""
    with pytest.raises(RequestError) as refusal:
        await legacy_list_tasks(store, None, {})

    assert refusal.value.code == -32601


async def test_legacy_requests_that_come_too_fast_are_told_so(database_url: str) -> None:
    """It must be able to tell 'ask less often' from a fault of the server."""
    options = StoreOptions(limits=Limits(reads_per_minute=1))
    async with TaskStore.open(database_url, options=options) as store:
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete({"content": []})
        await legacy_get_task(store, ALICE, params(task.task_id))

        for answer in (legacy_get_task, legacy_task_result, legacy_list_tasks):
            with pytest.raises(RequestError, match="poll less often") as refusal:
                await answer(store, ALICE, params(task.task_id))
            assert (refusal.value.code, refusal.value.data) == (-32603, {"reason": "LIMIT_EXCEEDED"})


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, DEFAULT),
        ({"ttl": None}, None),
        ({"ttl": 0}, timedelta(0)),
        ({"ttl": 60_000}, timedelta(minutes=1)),
        ({"ttl": 0.1}, timedelta(milliseconds=1)),
        ({"ttl": 60_000.0}, timedelta(minutes=1)),
        ({"ttl": 10**400}, timedelta(milliseconds=10**14)),
        ({"ttl": 1e300}, timedelta(milliseconds=10**14)),
        ({"ttl": float("inf")}, timedelta(milliseconds=10**14)),
    ],
)
async def test_a_requested_ttl_is_any_number_of_milliseconds(
    store: TaskStore, asked: dict[str, JsonValue], given: Any
) -> None:
    """JSON has one kind of number, and no largest one; none of them may end in an internal error."""
    ttl = legacy_ttl(asked, DEFAULT)

    assert ttl == given
    await store.create_task(auth=ALICE, ttl=ttl)


@pytest.mark.parametrize("ttl", [-1, -0.5, float("-inf"), float("nan"), True, "60000", [], {}])
def test_a_requested_ttl_that_is_no_lifetime_is_refused(ttl: JsonValue) -> None:
    """A client that asks for nonsense should learn it at once, not by a task that is gone."""
    with pytest.raises(RequestError, match="ttl") as refusal:
        legacy_ttl({"ttl": ttl}, DEFAULT)

    assert refusal.value.code == -32602
